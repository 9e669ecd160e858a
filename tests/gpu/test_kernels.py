"""The Triton kernels compiled, on a GPU, against float64: the shapes of models and the edges between tiles."""

import itertools
from collections.abc import Callable

import pytest
import torch

from tests.kernels import checks, sampling_checks

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from nanollm.kernels.attention import paged_attention
from nanollm.kernels.decode_attention import Launch, decode_attention, decode_attention_reference
from nanollm.kernels.embedding import embedding, embedding_reference
from nanollm.kernels.prefill_attention import prefill_attention
from nanollm.kernels.qkv_to_cache import qkv_to_cache
from nanollm.kernels.rms_norm import add_rms_norm, rms_norm
from nanollm.kernels.silu_mul import silu_mul
from nanollm.kernels.split_matmul import LIBRARY_HALVES, Tiles

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
SHAPES = pytest.mark.parametrize(
    ("group", "head_dim", "block_size", "dtype"),
    [
        *itertools.product([1], [64], [16], [torch.bfloat16, torch.float16, torch.float32]),
        *itertools.product([8], [256], [16], [torch.bfloat16, torch.float16, torch.float32]),
        *[(*shape, torch.bfloat16) for shape in [(2, 128, 16), (3, 80, 32), (4, 128, 1), (4, 128, 64), (7, 96, 4)]],
        (5, 128, 256, torch.float16),
    ],
)
EDGES = [1, 2, 15, 16, 17, 63, 64, 65, 0, 127, 128, 129, 255, 256, 257, 1000, 2049]


@SHAPES
def test_decode_attention(group: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    checks.check_decode_attention(
        EDGES, group=group, num_kv_heads=2, head_dim=head_dim, block_size=block_size, device="cuda", dtype=dtype
    )


@SHAPES
@pytest.mark.parametrize("qk_norm", [True, False])
def test_decode_attention_from_qkv(
    group: int, head_dim: int, block_size: int, dtype: torch.dtype, qk_norm: bool
) -> None:
    checks.check_decode_attention_from_qkv(
        EDGES, group=group, num_kv_heads=2, head_dim=head_dim, block_size=block_size, qk_norm=qk_norm,
        device="cuda", dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("group", "launch"),
    [
        (4, Launch(16, 64, 64, 2, 4)),
        (8, Launch(32, 64, 64, 2, 4)),
        (2, Launch(2, 2048, 64, 4, 4)),
        (4, Launch(1, 2048, 64, 4, 4, early=False)),
    ],
)
def test_decode_attention_from_qkv_as_it_is_launched_for_few_and_many_rows(group: int, launch: Launch) -> None:
    checks.check_decode_attention_from_qkv(
        EDGES, launch, group=group, num_kv_heads=2, head_dim=128, block_size=64, qk_norm=True,
        device="cuda", dtype=torch.bfloat16,
    )  # fmt: skip


@pytest.mark.parametrize("num_splits", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("tile", "stages", "num_warps"), [(32, 3, 2), (64, 4, 4), (128, 3, 8)])
def test_decode_attention_in_every_launch_form(num_splits: int, tile: int, stages: int, num_warps: int) -> None:
    checks.check_decode_attention(
        [*EDGES, 32768], Launch(num_splits, 128, tile, stages, num_warps),
        group=4, num_kv_heads=8, head_dim=128, block_size=16, device="cuda", dtype=torch.bfloat16,
    )  # fmt: skip


@SHAPES
def test_prefill_attention(group: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    rows = [(1, 1), (1, 700), (17, 17), (128, 128), (0, 0), (129, 129), (5, 37), (127, 640), (300, 300), (1, 129)]
    checks.check_prefill_attention(
        rows, group=group, num_kv_heads=2, head_dim=head_dim, block_size=block_size, device="cuda", dtype=dtype
    )


@pytest.mark.parametrize("tiles", [(128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3)])
@pytest.mark.parametrize("by_copy_engine", [False, True])
def test_prefill_attention_in_every_launch_form(tiles: tuple[int, int, int, int], by_copy_engine: bool) -> None:
    if by_copy_engine and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a bulk tensor copy engine")
    checks.check_prefill_attention(
        [(1, 1), (33, 4096), (1000, 1000), (64, 32768), (2, 3)], group=4, num_kv_heads=8, head_dim=128,
        block_size=128, device="cuda", dtype=torch.bfloat16, tiles=tiles, by_copy_engine=by_copy_engine,
    )  # fmt: skip


def test_attention_reaches_beyond_two_to_the_31_elements() -> None:
    num_blocks, context = 2**31 // (16 * 8 * 128) + 8, 40
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB")
    caches = torch.zeros(2, num_blocks, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    q = checks.randn(context, 16, 128, device="cuda", dtype=torch.bfloat16)
    qkv = checks.randn(context, 32 * 128, device="cuda", dtype=torch.bfloat16)
    table = torch.tensor([[num_blocks - 1, num_blocks - 2, num_blocks - 3]], dtype=torch.int32, device="cuda")
    tokens = torch.arange(context, device="cuda")
    slots = table[0, tokens // 16] * 16 + tokens % 16
    rope = torch.cat((torch.ones(1, 64), torch.zeros(1, 64)), dim=-1).cuda()
    qkv_to_cache(qkv, None, None, 1e-6, rope, tokens * 0, slots, *caches)
    k, v = qkv.view(context, 32, 128)[:, 16:].split(8, dim=1)
    assert torch.equal(caches[0].flatten(0, 1)[slots], k)
    assert torch.equal(caches[1].flatten(0, 1)[slots], v)
    expected = checks.attention_oracle(q, *caches, table[0], context)
    starts, lens = (torch.tensor(values, dtype=torch.int32, device="cuda") for values in ([0, context], [context]))
    checks.assert_close(prefill_attention(q, *caches, table, starts, lens), expected, 5e-3)
    checks.assert_close(decode_attention(q[-1:], *caches, table, lens), expected[-1:], 5e-3)


def test_mixed_step_is_its_rows_one_by_one() -> None:
    queries, contexts = [1, 1, 1, 30, 100], [5, 700, 33, 30, 420]
    torch.manual_seed(0)
    k_cache, v_cache, tables = checks.paged_cache(contexts, 16, 2, 128, "cuda", torch.bfloat16)
    q = checks.randn(sum(queries), 8, 128, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32, device="cuda")
    lens = torch.tensor(contexts, dtype=torch.int32, device="cuda")
    decode_lens = torch.tensor([5, 700, 33, 0, 0], dtype=torch.int32, device="cuda")  # as a CUDA graph has them
    out = paged_attention(q, k_cache, v_cache, tables, lens, decode_lens, starts.clamp(min=3))
    rows = zip(out.split(queries), q.split(queries), tables, contexts, strict=True)
    for out_row, q_row, table, context in rows:
        checks.assert_close(out_row, checks.attention_oracle(q_row, k_cache, v_cache, table, context), 5e-3)


def test_captured_decode_attention_serves_other_contexts() -> None:
    k_cache, v_cache, tables = checks.paged_cache([3000] * 8, 16, 8, 128, "cuda", torch.bfloat16)
    q = checks.randn(8, 16, 128, device="cuda", dtype=torch.bfloat16)
    lens = torch.full((8,), 7, dtype=torch.int32, device="cuda")
    decode_attention(q, k_cache, v_cache, tables, lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(q, k_cache, v_cache, tables, lens)
    for contexts in ([1, 3000, 0, 64, 65, 257, 1024, 2999], [0] * 8, [2048] * 8):
        lens.copy_(torch.tensor(contexts))
        graph.replay()
        eager = decode_attention(q, k_cache, v_cache, tables, lens)
        assert torch.equal(out, eager)
        expected = decode_attention_reference(q.double(), k_cache.nan_to_num().double(), v_cache.nan_to_num().double(),
                                              tables, lens)  # fmt: skip
        checks.assert_close(out, expected, 5e-3)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    k_cache, v_cache, tables = checks.paged_cache([900] * 8, 16, 8, 128, "cuda", torch.bfloat16)
    q = checks.randn(8, 16, 128, device="cuda", dtype=torch.bfloat16)
    outs = []
    for others in (1, 900):
        lens = torch.tensor([900] + [others] * 7, dtype=torch.int32, device="cuda")
        outs.append(decode_attention(q, k_cache, v_cache, tables, lens)[0])
    assert torch.equal(*outs)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 64), (3, 80), (2, 5, 128), (300, 1024), (17, 5120), (2, 8192)], ids=str)
@pytest.mark.parametrize("add", [False, True])
def test_rms_norm(shape: tuple[int, ...], add: bool, dtype: torch.dtype) -> None:
    checks.check_rms_norm(shape, add=add, device="cuda", dtype=dtype)


@DTYPES
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 1023), (300, 3072), (2, 25600)])
def test_silu_mul(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    checks.check_silu_mul(num_tokens, size, device="cuda", dtype=dtype)


@DTYPES
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 100, 300, 1000, 3000])
@pytest.mark.parametrize(("size", "inner"), [(512, 192), (208, 80)])
def test_sparse_mlp(num_tokens: int, size: int, inner: int, dtype: torch.dtype) -> None:
    checks.check_sparse_mlp(num_tokens, size, inner, 28, 6, device="cuda", dtype=dtype)


@DTYPES
@pytest.mark.parametrize(("norm", "residual"), [(False, False), (True, True)])
@pytest.mark.parametrize(("size", "inner"), [(2048, 768), (208, 80)])
def test_one_row_experts(size: int, inner: int, norm: bool, residual: bool, dtype: torch.dtype) -> None:
    checks.check_one_row_experts(size, inner, 28, 6, norm=norm, residual=residual, device="cuda", dtype=dtype)


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 64), (9, 80), (500, 5120)])
def test_embedding(num_tokens: int, size: int) -> None:
    checks.check_embedding(num_tokens, size, device="cuda", dtype=torch.bfloat16)


@DTYPES
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "qk_norm"),
    [(16, 8, 128, True), (9, 3, 64, False), (5, 1, 80, True), (3, 3, 96, False), (2, 1, 256, True), (64, 8, 128, True)],
)
def test_qkv_to_cache(num_heads: int, num_kv_heads: int, head_dim: int, qk_norm: bool, dtype: torch.dtype) -> None:
    slots = [5, -1, 16, 33, 0, *range(100, 300), -1]
    checks.check_qkv_to_cache(
        slots, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16, qk_norm=qk_norm,
        device="cuda", dtype=dtype,
    )  # fmt: skip


def test_noise_is_the_definitions() -> None:
    sampling_checks.check_noise(device="cuda")


@DTYPES
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (6, 300), (6, 301), (16, 151936)])
def test_tile_stats(num_rows: int, size: int, dtype: torch.dtype) -> None:
    sampling_checks.check_tile_stats(num_rows, size, device="cuda", dtype=dtype)


@DTYPES
@pytest.mark.parametrize(("num_rows", "size", "parts"), [(1, 1, 1), (6, 301, 1), (4, 100_001, 2), (64, 151936, 0)])
def test_counts(num_rows: int, size: int, parts: int, dtype: torch.dtype) -> None:
    sampling_checks.check_counts(num_rows, size, parts, device="cuda", dtype=dtype)


@DTYPES
@pytest.mark.parametrize("kind", sampling_checks.KINDS)
@pytest.mark.parametrize("size", [151936, 100_001, 1000])
def test_filters(size: int, kind: str, dtype: torch.dtype) -> None:
    sampling_checks.check_filters(size, kind, device="cuda", dtype=dtype)


def test_filters_of_gathered_logits() -> None:
    sampling_checks.check_filters_of_gathered_logits(151936, device="cuda")


@DTYPES
def test_filters_after_rules(dtype: torch.dtype) -> None:
    sampling_checks.check_filters_after_rules(151936, device="cuda", dtype=dtype)


@DTYPES
@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize(("num_rows", "size", "first_id"), [(2, 1, 0), (7, 300, 0), (16, 151936, 0), (5, 50000, 1280)])
def test_draw(num_rows: int, size: int, first_id: int, filtered: bool, dtype: torch.dtype) -> None:
    sampling_checks.check_draw(num_rows, size, first_id=first_id, filtered=filtered, device="cuda", dtype=dtype)


def test_advance_rows() -> None:
    sampling_checks.check_advance_rows(device="cuda")


def test_ties() -> None:
    sampling_checks.check_ties(device="cuda")


@pytest.mark.parametrize(
    ("norm", "gated", "residual"), [(True, False, False), (False, False, True), (True, True, False)]
)
@pytest.mark.parametrize(("size_in", "size_out"), [(64, 16), (1024, 4096), (3072, 1024), (2560, 48), (4096, 6144)])
def test_one_row_matmul(norm: bool, gated: bool, residual: bool, size_in: int, size_out: int) -> None:
    checks.check_one_row_matmul(
        size_in, size_out, norm=norm, gated=gated, residual=residual, device="cuda", dtype=torch.bfloat16
    )


@pytest.mark.parametrize("num_rows", [2, 16, 17, 33, 64, 100, 256])
@pytest.mark.parametrize("shape", [(512, 128), (1024, 4096), (12288, 256)], ids=str)
def test_split_matmul(num_rows: int, shape: tuple[int, int]) -> None:
    rows = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    cuts = Tiles(rows, 64, 128, 4, 4, 4), Tiles(rows, 64, 64, 3, 4), Tiles(128, 64, 64, 3, 8, 2), LIBRARY_HALVES
    for tiles in cuts:
        checks.check_split_matmul(num_rows, *shape, tiles, device="cuda", dtype=torch.bfloat16)
    for tiles in (Tiles(rows, 64, 128, 4, 4), Tiles(rows, 128, 64, 4, 8), Tiles(128, 128, 64, 4, 8)):
        checks.check_split_matmul(num_rows, *shape, tiles, device="cuda", dtype=torch.bfloat16, gated=True)


def test_public_functions_run_the_kernels_and_can_be_captured() -> None:
    x, weight = (checks.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in [(5, 256), (256,)])
    ids = torch.arange(5, device="cuda")
    calls: list[Callable[[], object]] = [
        lambda: rms_norm(x, weight, 1e-6),
        lambda: add_rms_norm(x, x, weight, 1e-6),
        lambda: silu_mul(x),
        lambda: embedding(ids, x, 2, 3),
    ]
    for call in calls:
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
    assert torch.equal(embedding(ids, x, 2, 3), embedding_reference(ids, x, 2, 3))


def test_kernels_that_follow_each_other_see_what_the_one_before_wrote() -> None:
    """Where kernels overlap (Hopper), each must wait for all before it."""
    x = checks.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.full((4096,), 1.01, device="cuda", dtype=torch.bfloat16)

    def chain() -> torch.Tensor:
        residual = y = x
        for _ in range(100):
            y, residual = add_rms_norm(y, residual, weight, 1e-6)
        return y

    results = []
    for _ in range(10):
        results.append(chain())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in itertools.pairwise([*results, captured]))


@pytest.mark.parametrize(("num_rows", "num_columns", "block_size"), [(1, 1, 16), (5, 3, 1), (256, 2561, 16)])
def test_prepare_decode(num_rows: int, num_columns: int, block_size: int) -> None:
    checks.check_prepare_decode(num_rows, num_columns, block_size, "cuda")
