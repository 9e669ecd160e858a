"""The Triton kernels in float32 under Triton's interpreter: test_interpreter.py runs this file with TRITON_INTERPRET=1.

Shapes are small and at edges: one token, around a block, around a tile, context 1, uneven groups and head dims.
"""

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from triton.runtime import interpreter

from nanollm.kernels.all_reduce import PeerMemory, empty_buffers, peer_all_reduce, peer_best_of_ranks
from nanollm.kernels.decode_attention import Launch
from nanollm.kernels.split_matmul import Tiles
from tests.kernels import checks, peers, sampling_checks

torch.set_num_threads(1)
_patch_tensor = interpreter._patch_lang_tensor


def _patch_index_too(tensor: Any, scope: Any) -> None:
    """Triton 3.6's interpreter asks NumPy for int(array of one element), which NumPy 2.4 refuses."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_index_too
# A GPU's maximum of NaN and a number is the number, and so are NumPy's fmax and fmin.
for name, ufunc in {"create_maxnumf": np.fmax, "create_minnumf": np.fmin}.items():
    method = functools.partialmethod(interpreter.InterpreterBuilder.binary_op, op=ufunc)
    setattr(interpreter.InterpreterBuilder, name, method)
ON_CPU = {"device": "cpu", "dtype": torch.float32}


@pytest.mark.parametrize(
    ("group", "head_dim", "block_size"),
    [(1, 64, 16), (2, 128, 256), (3, 80, 32), (5, 64, 1), (7, 96, 4), (8, 256, 16)],
)
def test_decode_attention(group: int, head_dim: int, block_size: int) -> None:
    contexts = [1, 16, 17, 0, 70]
    checks.check_decode_attention(
        contexts, Launch(num_splits=4, min_split=32, tile=16, stages=3, num_warps=4),
        group=group, num_kv_heads=1 + group % 2, head_dim=head_dim, block_size=block_size, **ON_CPU,
    )  # fmt: skip


@pytest.mark.parametrize("num_splits", [1, 2, 16])
def test_decode_attention_of_any_number_of_splits(num_splits: int) -> None:
    checks.check_decode_attention(
        [1, 65, 200], Launch(num_splits, min_split=16, tile=16, stages=3, num_warps=4),
        group=2, num_kv_heads=2, head_dim=64, block_size=16, **ON_CPU,
    )  # fmt: skip


def test_decode_attention_combines_many_large_splits() -> None:
    checks.check_decode_attention(
        [1, 65, 200], Launch(16, min_split=16, tile=16, stages=3, num_warps=4),
        group=8, num_kv_heads=1, head_dim=256, block_size=16, **ON_CPU,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("group", "head_dim", "block_size", "launch", "qk_norm"),
    [
        (1, 64, 16, Launch(4, 32, 16, 3, 4), False),
        (2, 128, 256, Launch(1, 32, 16, 3, 4), True),
        (3, 80, 1, Launch(4, 32, 16, 3, 4), True),
        (8, 256, 16, Launch(2, 32, 16, 3, 4), True),
        (3, 80, 16, Launch(1, 2048, 16, 3, 4, early=False), True),
        (3, 80, 16, Launch(4, 16, 16, 3, 4), True),  # some splits have the new token's tile, and nothing of the cache
    ],
)
def test_decode_attention_from_qkv(group: int, head_dim: int, block_size: int, launch: Launch, qk_norm: bool) -> None:
    checks.check_decode_attention_from_qkv(
        [1, 16, 17, 0, 33, 70], launch,
        group=group, num_kv_heads=1 + group % 2, head_dim=head_dim, block_size=block_size, qk_norm=qk_norm, **ON_CPU,
    )  # fmt: skip


def test_decode_attention_as_it_is_launched_by_default() -> None:
    checks.check_decode_attention([5, 700], group=2, num_kv_heads=2, head_dim=128, block_size=16, **ON_CPU)


@pytest.mark.parametrize(
    ("group", "head_dim", "block_size"),
    [(1, 64, 16), (2, 128, 256), (3, 80, 32), (5, 64, 1), (7, 96, 4), (8, 256, 16)],
)
def test_prefill_attention(group: int, head_dim: int, block_size: int) -> None:
    rows = [(1, 1), (1, 40), (17, 17), (16, 16), (0, 0), (5, 37)]
    checks.check_prefill_attention(
        rows, group=group, num_kv_heads=1 + group % 2, head_dim=head_dim, block_size=block_size, **ON_CPU,
        tiles=(16, 16, 4, 2),
    )  # fmt: skip


def test_prefill_attention_by_copy_engine() -> None:
    checks.check_prefill_attention(
        [(1, 1), (40, 100), (33, 33)], group=2, num_kv_heads=2, head_dim=64, block_size=32, **ON_CPU,
        tiles=(32, 16, 4, 2), by_copy_engine=True,
    )  # fmt: skip


def test_prefill_attention_as_it_is_launched_by_default() -> None:
    rows = [(0, 0)] * 130 + [(50, 80)]  # more rows than a program looks through at a time
    checks.check_prefill_attention(rows, group=2, num_kv_heads=1, head_dim=64, block_size=16, **ON_CPU)


@pytest.mark.parametrize("shape", [(1, 64), (3, 80), (2, 5, 128), (2, 5120), (0, 64)])
@pytest.mark.parametrize("add", [False, True])
def test_rms_norm(shape: tuple[int, ...], add: bool) -> None:
    checks.check_rms_norm(shape, add=add, **ON_CPU)


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 1023), (2, 1024), (1, 2500), (0, 64)])
def test_silu_mul(num_tokens: int, size: int) -> None:
    checks.check_silu_mul(num_tokens, size, **ON_CPU)


@pytest.mark.parametrize(
    ("num_tokens", "size", "inner", "num_experts", "num_chosen"),
    [(1, 64, 48, 8, 3), (33, 80, 40, 6, 6), (200, 64, 32, 5, 2), (600, 32, 16, 4, 1), (3, 48, 16, 1, 1)],
)
def test_sparse_mlp(num_tokens: int, size: int, inner: int, num_experts: int, num_chosen: int) -> None:
    """Blocks of 16 to 128 rows, and more pairs than one program places."""
    checks.check_sparse_mlp(num_tokens, size, inner, num_experts, num_chosen, **ON_CPU)


@pytest.mark.parametrize(
    ("size", "inner", "num_experts", "num_chosen", "norm"),
    [(64, 48, 8, 3, True), (528, 48, 6, 6, True), (32, 528, 4, 4, True), (48, 16, 1, 1, False)],
)
def test_one_row_experts(size: int, inner: int, num_experts: int, num_chosen: int, norm: bool) -> None:
    """Few outputs, many, and more inputs than a chunk of either kernel."""
    checks.check_one_row_experts(size, inner, num_experts, num_chosen, norm=norm, residual=not norm, **ON_CPU)


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 64), (9, 80), (5, 1500)])
def test_embedding(num_tokens: int, size: int) -> None:
    checks.check_embedding(num_tokens, size, **ON_CPU)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "qk_norm"),
    [(16, 8, 128, True), (9, 3, 64, False), (5, 1, 80, True), (3, 3, 96, False), (2, 1, 256, True)],
)
def test_qkv_to_cache(num_heads: int, num_kv_heads: int, head_dim: int, qk_norm: bool) -> None:
    checks.check_qkv_to_cache(
        [5, -1, 16, 33, 0], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16,
        qk_norm=qk_norm, **ON_CPU,
    )  # fmt: skip


def test_noise_is_the_definitions() -> None:
    sampling_checks.check_noise(device="cpu")


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 128), (4, 300), (2, 5000)])
def test_tile_stats(num_rows: int, size: int) -> None:
    sampling_checks.check_tile_stats(num_rows, size, **ON_CPU)


@pytest.mark.parametrize(("size", "parts"), [(300, 1), (40_000, 2)])
def test_counts(size: int, parts: int) -> None:
    sampling_checks.check_counts(4, size, parts, **ON_CPU)


@pytest.mark.parametrize("kind", sampling_checks.KINDS)
def test_filters(kind: str) -> None:
    sampling_checks.check_filters(33_000, kind, **ON_CPU)


@pytest.mark.parametrize("size", [1, 100, 1000])
def test_filters_of_small_vocabularies(size: int) -> None:
    sampling_checks.check_filters(size, "random", **ON_CPU)


@pytest.mark.parametrize(
    ("size", "kind"), [(33_000, "random"), (33_000, "mostly banned"), (1000, "far below"), (1000, "tiny")]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_filters_of_16_bit_logits(size: int, kind: str, dtype: torch.dtype) -> None:
    sampling_checks.check_filters(size, kind, device="cpu", dtype=dtype)


def test_filters_of_gathered_logits() -> None:
    sampling_checks.check_filters_of_gathered_logits(3000, device="cpu")


@pytest.mark.parametrize(("size", "dtype"), [(33_000, torch.float32), (3000, torch.bfloat16)])
def test_filters_after_rules(size: int, dtype: torch.dtype) -> None:
    sampling_checks.check_filters_after_rules(size, device="cpu", dtype=dtype)


@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize(("num_rows", "size", "first_id"), [(2, 1, 0), (7, 300, 0), (5, 2048, 128), (4, 5000, 1280)])
def test_draw(num_rows: int, size: int, first_id: int, filtered: bool) -> None:
    sampling_checks.check_draw(num_rows, size, first_id=first_id, filtered=filtered, **ON_CPU)


def test_advance_rows() -> None:
    sampling_checks.check_advance_rows(device="cpu")


def test_ties() -> None:
    sampling_checks.check_ties(device="cpu")


@pytest.mark.parametrize(
    ("norm", "gated", "residual"),
    [(True, False, True), (True, True, False), (False, False, True), (False, True, True)],
)
@pytest.mark.parametrize(("size_in", "size_out"), [(64, 16), (1280, 48)])
def test_one_row_matmul(norm: bool, gated: bool, residual: bool, size_in: int, size_out: int) -> None:
    checks.check_one_row_matmul(size_in, size_out, norm=norm, gated=gated, residual=residual, **ON_CPU)


@pytest.mark.parametrize(
    ("num_rows", "tiles"),
    [
        (3, Tiles(16, 64, 64, 3, 4, 4)),
        (20, Tiles(32, 64, 64, 3, 4)),
        (70, Tiles(64, 64, 128, 3, 4, 2)),
        (130, Tiles(128, 64, 64, 3, 4, 2)),
    ],
)
def test_split_matmul(num_rows: int, tiles: Tiles) -> None:
    checks.check_split_matmul(num_rows, 512, 128, tiles, **ON_CPU)


@pytest.mark.parametrize(
    ("num_rows", "tiles"),
    [(3, Tiles(16, 128, 64, 3, 8)), (20, Tiles(32, 64, 64, 3, 4)), (130, Tiles(128, 64, 64, 3, 4))],
)
def test_split_matmul_of_gate_and_up(num_rows: int, tiles: Tiles) -> None:
    checks.check_split_matmul(num_rows, 512, 256, tiles, gated=True, **ON_CPU)


@pytest.mark.parametrize(("num_rows", "num_columns", "block_size"), [(1, 1, 16), (5, 3, 1), (9, 300, 64)])
def test_prepare_decode(num_rows: int, num_columns: int, block_size: int) -> None:
    checks.check_prepare_decode(num_rows, num_columns, block_size, "cpu")


def run_rank(
    rank: int, memory: list[Tensor], abort: Tensor, num_programs: int, calls: list[peers.Call], results: list[Tensor]
) -> None:
    outputs = peers.run_calls(rank, memory, abort, num_programs, calls)
    bits = torch.cat([out.flatten().view(torch.uint8) for out in outputs])
    results[rank][: len(bits)] = bits


@pytest.mark.parametrize(("num_ranks", "num_programs"), [(2, 1), (3, 2)])
def test_all_reduce_and_choice_among_ranks_that_are_processes(num_ranks: int, num_programs: int) -> None:
    """They really poll: all at once, on memory that they share. A buffer holds 8 KiB, so larger calls go in pieces."""
    sizes, dtypes = [64, 33, 80], [torch.float32, torch.float16]
    calls = peers.edge_calls(sizes, dtypes, 17) + [peers.Call.draw(seed, sizes, dtypes, 20) for seed in range(100, 130)]
    memory, abort = peers.shared_memory(num_ranks, 3 * 8192), torch.zeros(1, dtype=torch.int32).share_memory_()
    outputs = [torch.zeros(10**6, dtype=torch.uint8).share_memory_() for _ in range(num_ranks)]
    mp.spawn(run_rank, (memory, abort, num_programs, calls, outputs), nprocs=num_ranks)
    assert all(peers.is_empty(m) for m in memory)
    assert all(torch.equal(outputs[0], out) for out in outputs[1:]), "every rank must get the same bits"


@pytest.mark.parametrize("two_shot", [False, True])
def test_an_abort_ends_the_wait_for_a_peer_that_is_gone(two_shot: bool) -> None:
    memory, gone = torch.empty(2, 3 * 4096, dtype=torch.uint8)
    empty_buffers(memory)
    aborted = torch.ones(1, dtype=torch.int32)
    alone = PeerMemory.of(0, [memory.data_ptr(), gone.data_ptr()], aborted, 3 * 4096, memory.device)
    peer_all_reduce(torch.ones(3, 16), None, None, 0.0, alone, two_shot=two_shot)
    peer_best_of_ranks(torch.ones(3), torch.ones(3, dtype=torch.long), alone)
