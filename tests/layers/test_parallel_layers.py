"""Every parallel layer, all its ranks built in this one process: their shares together are the whole layer.

The expectation is plain PyTorch on the whole weights, in float64.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanollm.config import ModelConfig
from nanollm.distributed.partition import HeadPartition, even_split
from nanollm.distributed.tp_group import TPGroup
from nanollm.layers.activation import GatedMLP
from nanollm.layers.attention import Attention
from nanollm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from nanollm.layers.hidden import Hidden
from nanollm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanollm.layers.rotary import rope_table
from nanollm.layers.step_batch import StepBatch
from nanollm.models.checkpoint import Checkpoint
from nanollm.models.loader import load_weights

SIZE, TOKENS, EPS = 48, 5, 1e-6
DEGREES = [1, 2, 3, 5, 8]


@pytest.fixture(autouse=True)
def same_inputs_every_time() -> None:
    """Whatever tests ran before: of some inputs, float32 rounds a number just beyond what is allowed here."""
    torch.manual_seed(0)


class RankOf(TPGroup):
    """A rank whose input is whole already, so that there is nothing to communicate."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


class InMemory(Checkpoint):
    """Random float32 tensors of the names and shapes that a layer asks for, the same for every rank."""

    def __init__(self, layer: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        self.shapes = {part.name: part.shape for part in layer.tensor_parts()}
        self.tensors = {name: torch.randn(self.shapes[name], generator=generator) * 0.3 for name in sorted(self.shapes)}

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        return self.tensors[name][index]

    def close(self) -> None:
        pass


class Whole(nn.Module):
    """A layer at the path `layer`, so that its weights have a parent's name as in a model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def tensor_parts(self) -> list[Any]:
        modules = ((path, module) for path, module in self.named_modules() if path and hasattr(module, "tensor_parts"))
        return [part for path, module in modules for part in module.tensor_parts(path)]


def ranks(make: Callable[[TPGroup], Any], size: int) -> tuple[list[Any], dict[str, Tensor]]:
    """The layer of each rank, loaded; and the whole weights in float64 by their names below `layer`."""
    layers, weights = [], {}
    for rank in range(size):
        layer = make(RankOf(rank, size))
        checkpoint = InMemory(Whole(layer))
        load_weights(Whole(layer), checkpoint, show_progress=False)
        layers.append(layer)
        weights = {n.removeprefix("layer").lstrip("."): tensor.double() for n, tensor in checkpoint.tensors.items()}
    return layers, weights


def hidden() -> tuple[Hidden, Tensor]:
    """A Hidden with everything pending, and what a layer must see of it, in float64."""
    residual_TD, pending_TD, weight_D = torch.randn(TOKENS, SIZE), torch.randn(TOKENS, SIZE), torch.rand(SIZE) + 0.5
    summed = (residual_TD + pending_TD).double()
    normed = summed * (summed.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight_D.double()
    return Hidden(residual_TD, pending_TD, weight_D, EPS), normed


def fresh(given: Hidden) -> Hidden:
    """A copy, because a layer may overwrite what it is given."""
    assert given.residual_TD is not None and given.pending_TD is not None
    return Hidden(given.residual_TD.clone(), given.pending_TD.clone(), given.norm_weight_D, given.norm_eps)


def share(out: Hidden) -> Tensor:
    """What this rank adds to the sum over ranks."""
    return next(x_TD for x_TD in (out.pending_TD, out.residual_TD) if x_TD is not None)


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", DEGREES)
@pytest.mark.parametrize("bias", [False, True])
def test_column_parallel_outputs_side_by_side(size: int, bias: bool) -> None:
    split = even_split(20, size)
    layers, w = ranks(lambda tp: ColumnParallelLinear(SIZE, [("proj", 20, split[tp.rank])], bias, tp), size)
    given, normed = hidden()
    outputs = [layer(fresh(given)) for layer in layers]
    assert_same(torch.cat([y for y, _ in outputs], -1), F.linear(normed, w["proj.weight"], w.get("proj.bias")))
    for _, residual_TD in outputs:
        assert given.residual_TD is not None and given.pending_TD is not None
        assert_same(residual_TD, (given.residual_TD + given.pending_TD).double())


@pytest.mark.parametrize("size", DEGREES)
@pytest.mark.parametrize("bias", [False, True])
def test_merged_column_parallel_has_its_range_of_each_projection(size: int, bias: bool) -> None:
    split = even_split(20, size)
    layers, w = ranks(lambda tp: MergedColumnParallelLinear(SIZE, 20, ("gate", "up"), split, bias, tp), size)
    given, normed = hidden()
    halves = [layer(fresh(given))[0].chunk(2, dim=-1) for layer in layers]
    for i, name in enumerate(("gate", "up")):
        whole = F.linear(normed, w[f"{name}.weight"], w.get(f"{name}.bias"))
        assert_same(torch.cat([half[i] for half in halves], -1), whole)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 8), (8, 4), (9, 3)])
def test_qkv_parallel_gives_each_rank_its_heads(size: int, num_heads: int, num_kv_heads: int) -> None:
    def heads(rank: int) -> HeadPartition:
        return HeadPartition(num_heads, num_kv_heads, size, rank)

    layers, w = ranks(lambda tp: QKVParallelLinear(SIZE, heads(tp.rank), 6, True, tp), size)
    given, normed = hidden()
    whole = {n: F.linear(normed, w[f"{n}_proj.weight"], w[f"{n}_proj.bias"]).view(TOKENS, -1, 6) for n in "qkv"}
    for rank, layer in enumerate(layers):
        own = heads(rank)
        expected = [whole["q"][:, own.heads], whole["k"][:, own.kv_heads], whole["v"][:, own.kv_heads]]
        assert_same(layer(fresh(given))[0], torch.cat(expected, 1).flatten(1))


@pytest.mark.parametrize("size", DEGREES)
@pytest.mark.parametrize("bias", [False, True])
def test_row_parallel_partial_sums_add_up_with_the_bias_once(size: int, bias: bool) -> None:
    split = even_split(20, size)
    layers, w = ranks(lambda tp: RowParallelLinear(20, SIZE, split[tp.rank], bias, tp), size)
    x, residual_TD = torch.randn(TOKENS, 20), torch.randn(TOKENS, SIZE)
    outputs = [layer(x[:, kept.start : kept.stop], residual_TD) for layer, kept in zip(layers, split, strict=True)]
    assert_same(sum(share(out) for out in outputs), F.linear(x.double(), w["weight"], w.get("bias")))
    assert all(out.residual_TD is residual_TD for out in outputs)


@pytest.mark.parametrize("size", DEGREES)
@pytest.mark.parametrize("vocab_size", [3, 128, 301, 1024])
def test_each_token_is_embedded_by_one_rank(size: int, vocab_size: int) -> None:
    layers, w = ranks(lambda tp: VocabParallelEmbedding(vocab_size, SIZE, tp), size)
    token_ids_T = torch.arange(vocab_size)
    parts = torch.stack([share(layer(token_ids_T)) for layer in layers])
    assert ((parts != 0).any(-1).sum(0) == 1).all()
    assert torch.equal(parts.sum(0).double(), w["weight"])


@pytest.mark.parametrize("size", DEGREES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [3, 128, 301, 1024])
def test_logits_side_by_side_are_in_the_order_of_the_ids(size: int, tied: bool, vocab_size: int) -> None:
    class Both(nn.Module):
        def __init__(self, tp: TPGroup) -> None:
            super().__init__()
            self.embed = VocabParallelEmbedding(vocab_size, SIZE, tp)
            self.head = ParallelLMHead(vocab_size, SIZE, tp, tied_to=self.embed if tied else None)

    layers, w = ranks(Both, size)
    given, normed = hidden()
    shards = [layer.head(fresh(given)) for layer in layers]
    side_by_side = torch.cat(shards, -1)
    assert_same(side_by_side[:, :vocab_size], F.linear(normed, w["embed.weight" if tied else "head.weight"]))
    assert (side_by_side[:, vocab_size:] == -torch.inf).all()  # so that padding is never sampled
    for layer, shard in zip(layers, shards, strict=True):
        assert layer.head.start % 4 == 0 or layer.head.num_rows == 0  # what the sampler's noise needs
        assert shard.shape == shards[0].shape  # what all_gather needs


def model_config(**changes: Any) -> ModelConfig:
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": SIZE,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "vocab_size": 300,
        "attention_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": EPS,
    }
    return ModelConfig.from_hf(settings | changes)


@pytest.mark.parametrize("size", DEGREES)
def test_feed_forward_parts_add_up(size: int) -> None:
    layers, w = ranks(lambda tp: GatedMLP(model_config(), tp), size)
    given, normed = hidden()
    total = sum(share(layer(fresh(given))) for layer in layers)
    gate, up = (F.linear(normed, w[f"{n}_proj.weight"], w[f"{n}_proj.bias"]) for n in ("gate", "up"))
    assert_same(total, F.linear(F.silu(gate) * up, w["down_proj.weight"], w["down_proj.bias"]))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 9])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_parts_add_up(size: int, qk_norm: bool) -> None:
    config = model_config()
    layers, w = ranks(lambda tp: Attention(config, tp, qk_norm=qk_norm), size)
    given, normed = hidden()
    rope_PH = rope_table(config.rope, 8, TOKENS)
    block_table = torch.tensor([[2, 0]], dtype=torch.int32)  # blocks of 4 slots
    slots_T = torch.tensor([8, 9, 10, 11, 0])
    positions_T = torch.arange(TOKENS)
    starts_B1, lengths_B = torch.tensor([0, TOKENS]).int(), torch.tensor([TOKENS]).int()
    batch = StepBatch(positions_T, positions_T, slots_T, block_table, lengths_B, None, starts_B1, None)
    total = torch.zeros(TOKENS, SIZE)
    for layer in layers:
        layer.k_cache, layer.v_cache = torch.zeros(2, 3, 4, layer.num_kv_heads, 8)
        total += share(layer(fresh(given), batch, rope_PH))

    q, k, v = (
        F.linear(normed, w[f"{n}_proj.weight"], w[f"{n}_proj.bias"]).view(TOKENS, -1, 8).transpose(0, 1) for n in "qkv"
    )
    if qk_norm:
        q, k = (F.rms_norm(x, (8,), w[f"{n}_norm.weight"], EPS) for n, x in (("q", q), ("k", k)))
    cos, sin = (half.repeat(1, 2) for half in rope_PH.double().chunk(2, dim=-1))
    q, k = (x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin for x in (q, k))
    k, v = (x.repeat_interleave(3, dim=0) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
    assert_same(total, F.linear(out, w["o_proj.weight"], w["o_proj.bias"]))
