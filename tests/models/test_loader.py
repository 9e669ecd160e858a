import logging

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nanollm.layers.weights import TensorPart
from nanollm.models.checkpoint import CheckpointError, DummyCheckpoint, SafetensorsCheckpoint
from nanollm.models.loader import load_weights

D, V = 4, 6
TENSORS = {
    "embed.weight": torch.arange(V * D).reshape(V, D).float(),
    "q.weight": torch.randn(8, D, generator=torch.Generator().manual_seed(1)),
    "k.weight": torch.randn(4, D, generator=torch.Generator().manual_seed(2)),
    "o.weight": torch.randn(D, 8, generator=torch.Generator().manual_seed(3)),
    "norm.weight": torch.ones(D),
}


class TinyModel(nn.Module):
    """What a rank of two holds: 4 of 8 vocabulary rows (6 and padding), q and k fused, o by columns, the norm."""

    def __init__(self, rank: int = 0, tp: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.rank, self.tp = rank, tp
        self.embed = nn.Parameter(torch.zeros(8 // tp, D, dtype=dtype))
        self.qk = nn.Parameter(torch.full((12 // tp, D), torch.nan, dtype=dtype))
        self.o = nn.Parameter(torch.full((D, 8 // tp), torch.nan, dtype=dtype))
        self.norm = nn.Parameter(torch.full((D,), torch.nan, dtype=dtype))
        rows = range(V)[self._share(8)]
        self.embed.num_padding = (8 // tp - len(rows)) * D

    def _share(self, n: int) -> slice:
        return slice(self.rank * n // self.tp, (self.rank + 1) * n // self.tp)

    def tensor_parts(self) -> list[TensorPart]:
        columns, rows = slice(0, D), self._share(8)
        vocab = slice(min(rows.start, V), min(rows.stop, V))
        num_q = 8 // self.tp
        return [
            TensorPart("embed.weight", (V, D), (vocab, columns), self.embed[: vocab.stop - vocab.start]),
            TensorPart("q.weight", (8, D), (rows, columns), self.qk[:num_q]),
            TensorPart("k.weight", (4, D), (self._share(4), columns), self.qk[num_q:]),
            TensorPart("o.weight", (D, 8), (columns, rows), self.o[:]),
            TensorPart("norm.weight", (D,), (columns,), self.norm[:]),
        ]


@pytest.fixture
def save(tmp_path):
    def save(tensors: dict[str, torch.Tensor]) -> SafetensorsCheckpoint:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        return SafetensorsCheckpoint(tmp_path)

    return save


def test_one_rank_gets_every_tensor(save):
    model = TinyModel()
    load_weights(model, save(TENSORS))
    assert torch.equal(model.embed, torch.cat([TENSORS["embed.weight"], torch.zeros(2, D)]))
    assert torch.equal(model.qk, torch.cat([TENSORS["q.weight"], TENSORS["k.weight"]]))
    assert torch.equal(model.o, TENSORS["o.weight"])


def test_two_ranks_together_hold_what_one_holds(save):
    checkpoint = save(TENSORS)
    ranks = [TinyModel(rank, tp=2) for rank in range(2)]
    for model in ranks:
        load_weights(model, checkpoint)
    assert torch.equal(torch.cat([m.embed for m in ranks])[:V], TENSORS["embed.weight"])
    assert torch.equal(torch.cat([m.qk[:4] for m in ranks]), TENSORS["q.weight"])
    assert torch.equal(torch.cat([m.qk[4:] for m in ranks]), TENSORS["k.weight"])
    assert torch.equal(torch.cat([m.o for m in ranks], dim=1), TENSORS["o.weight"])


def test_a_rank_whose_share_of_a_tensor_is_empty(save):
    model = TinyModel(rank=3, tp=4)  # vocabulary rows 6 and 7: only padding
    load_weights(model, save(TENSORS))
    assert torch.equal(model.embed, torch.zeros(2, D))


def test_values_are_cast_to_the_parameters_dtype(save):
    model = TinyModel(dtype=torch.bfloat16)
    load_weights(model, save(TENSORS))
    assert torch.equal(model.o, TENSORS["o.weight"].bfloat16())


def test_dummy_weights_are_the_same_at_any_degree():
    shapes = {part.name: part.shape for part in TinyModel().tensor_parts()}
    checkpoint = DummyCheckpoint(shapes, 0, torch.float32, torch.device("cpu"))
    one, ranks = TinyModel(), [TinyModel(rank, tp=2) for rank in range(2)]
    for model in (one, *ranks):
        load_weights(model, checkpoint)
    assert torch.equal(torch.cat([m.o for m in ranks], dim=1), one.o)


class Unreadable:
    """A checkpoint that must be refused by its shapes alone."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        raise AssertionError(f"{name} was read before the checks")

    def close(self) -> None: ...


SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


def test_missing_unexpected_and_misshapen_tensors_come_in_one_error_before_any_is_read():
    shapes = {name: shape for name, shape in SHAPES.items() if name != "k.weight"}
    with pytest.raises(CheckpointError) as error:
        load_weights(TinyModel(), Unreadable(shapes | {"extra.weight": (1,), "norm.weight": (5,)}))
    assert str(error.value) == (
        "the checkpoint does not fit config.json; tensors: 1 missing (k.weight); 1 unexpected (extra.weight); "
        "1 of the wrong shape (norm.weight is [5], the model needs [4])"
    )


def test_long_lists_are_cut_at_ten_names():
    extra = {f"extra.{i}": (1,) for i in range(12)}
    with pytest.raises(CheckpointError, match=r"12 unexpected \(extra\.0, .*extra\.9, …\)$"):
        load_weights(TinyModel(), Unreadable(SHAPES | extra))


def test_transposed_weight_is_refused():
    with pytest.raises(CheckpointError, match=r"o\.weight is \[8, 4\], the model needs \[4, 8\]"):
        load_weights(TinyModel(), Unreadable(SHAPES | {"o.weight": (8, D)}))


def test_tensors_that_are_known_to_be_of_no_use_are_ignored(save):
    model = TinyModel()
    model.ignored_tensors = lambda: ["lm_head.weight"]
    load_weights(model, save(TENSORS | {"lm_head.weight": torch.ones(1), "l.0.rotary_emb.inv_freq": torch.ones(1)}))


def test_lm_head_of_an_untied_model_is_not_ignored():
    with pytest.raises(CheckpointError, match=r"1 unexpected \(lm_head\.weight\)"):
        load_weights(TinyModel(), Unreadable(SHAPES | {"lm_head.weight": (V, D)}))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_is_a_warning_naming_the_tensor(save, caplog, bad):
    q = TENSORS["q.weight"].clone()
    q[3, 2] = bad
    model = TinyModel()
    with caplog.at_level(logging.WARNING, "nanollm"):
        load_weights(model, save(TENSORS | {"q.weight": q}))
    assert [record.getMessage() for record in caplog.records] == ["tensor q.weight has NaN or infinite values"]
    assert torch.equal(model.o, TENSORS["o.weight"])


def test_a_value_that_overflows_in_the_parameters_dtype_is_a_warning(save, caplog):
    load_weights(TinyModel(dtype=torch.float16), save(TENSORS | {"norm.weight": torch.full((D,), 1e6)}))
    assert "norm.weight" in caplog.text


def test_a_layer_that_forgets_part_of_its_parameter_is_a_bug():
    model = TinyModel()
    model.embed.num_padding = 0
    with pytest.raises(RuntimeError, match="parameter embed fill 24 elements, not 32"):
        load_weights(model, Unreadable(SHAPES))


def test_a_part_that_does_not_fit_its_target_is_a_bug():
    model = TinyModel()
    parts = model.tensor_parts()
    parts[-1].target = model.norm[:2]
    model.tensor_parts = lambda: parts
    with pytest.raises(RuntimeError, match=r"norm\.weight: .* can't fill \(2,\)"):
        load_weights(model, Unreadable(SHAPES))
