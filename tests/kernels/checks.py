"""One check for each Triton kernel, against float64: under Triton's interpreter on the CPU, and compiled on a GPU.

They call the launchers, so that the Triton kernel runs whatever the device. Inputs are random and rounded to the dtype
before the oracle sees them; outputs start as NaN, so that what isn't written fails.
"""

from typing import Any

import torch
from torch import Tensor

from nanollm.kernels.decode_attention import Launch, NewTokens, _decode_attention_triton
from nanollm.kernels.embedding import _embedding_triton
from nanollm.kernels.one_row_experts import _one_row_experts_triton, one_row_experts_reference
from nanollm.kernels.one_row_matmul import OneRow, _one_row_triton, one_row_matmul_reference
from nanollm.kernels.prefill_attention import _prefill_attention_triton
from nanollm.kernels.prepare_decode import (
    NEW_BLOCK,
    DecodeInputs,
    DecodeState,
    _prepare_decode_triton,
    prepare_decode_reference,
)
from nanollm.kernels.qkv_to_cache import _qkv_to_cache_triton, qkv_to_cache_reference
from nanollm.kernels.rms_norm import _rms_norm_triton, add_rms_norm_reference, rms_norm_reference
from nanollm.kernels.silu_mul import _silu_mul_triton, silu_mul_reference
from nanollm.kernels.sparse_mlp import _sparse_mlp_triton, sparse_mlp_reference
from nanollm.kernels.split_matmul import Tiles, _split_matmul_gpu, split_matmul_reference

# Relative error of a result that is rounded once, and of one whose softmax weights are rounded too.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def assert_close(out: Tensor, expected: Tensor, factor: float = 1) -> None:
    """The relative error of each row, not only of the whole, which would hide a wrong row among many."""
    assert out.shape == expected.shape
    assert not out.isnan().any()
    out, expected = out.double().flatten(0, -2), expected.double().flatten(0, -2)
    error = (out - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-3)
    for row, relative in enumerate(error.tolist()):
        assert relative <= factor, f"relative error {relative:.2e} in row {row}, allowed {factor:.2e}"


def randn(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(device, dtype)


def paged_cache(
    context_lens: list[int], block_size: int, num_kv_heads: int, head_dim: int, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """k_cache, v_cache and block tables: blocks in random order, NaN in every slot that no row owns."""
    counts = [-(-length // block_size) for length in context_lens]
    order = torch.randperm(sum(counts) + 2).tolist()
    tables = torch.zeros(len(context_lens), max(counts) + 1, dtype=torch.int32)
    caches = torch.full((2, len(order), block_size, num_kv_heads, head_dim), float("nan"))
    for row, (length, count) in enumerate(zip(context_lens, counts, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(blocks)
        for i, block in enumerate(blocks):
            filled = min(block_size, length - i * block_size)
            caches[:, block, :filled] = torch.randn(2, filled, num_kv_heads, head_dim)
    k_cache, v_cache = caches.to(device, dtype)
    return k_cache, v_cache, tables.to(device)


def attention_oracle(q_QNH: Tensor, k_cache: Tensor, v_cache: Tensor, table_M: Tensor, context: int) -> Tensor:
    """One row in float64, its keys and values gathered token by token."""
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    query_len, num_heads, _ = q_QNH.shape
    token_C = torch.arange(context, device=q_QNH.device)
    block_C, offset_C = table_M[token_C // block_size].long(), token_C % block_size
    k_CNH, v_CNH = (
        cache[block_C, offset_C].double().repeat_interleave(num_heads // num_kv_heads, dim=1)
        for cache in (k_cache, v_cache)
    )
    scores_NQC = torch.einsum("qnh,cnh->nqc", q_QNH.double(), k_CNH) / head_dim**0.5
    position_Q = torch.arange(context - query_len, context, device=q_QNH.device)
    scores_NQC = scores_NQC.masked_fill(token_C > position_Q[:, None], float("-inf"))
    return torch.einsum("nqc,cnh->qnh", scores_NQC.softmax(-1), v_CNH)


def check_decode_attention(
    context_lens: list[int], launch: Launch | None = None, *, group: int, num_kv_heads: int, head_dim: int,
    block_size: int, device: str, dtype: torch.dtype,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    k_cache, v_cache, tables_BM = paged_cache(context_lens, block_size, num_kv_heads, head_dim, device, dtype)
    # q as a part of wider rows, as it could come from a QKV projection.
    wide_BNH = randn(len(context_lens), group * num_kv_heads + 2, head_dim, device=device, dtype=dtype)
    q_BNH = wide_BNH[:, : group * num_kv_heads]
    lens_B = torch.tensor(context_lens, dtype=torch.int32, device=device)
    runs = []
    for _ in range(2):  # the second finds the arrival counts that the first left
        out_BNH = torch.full(q_BNH.shape, float("nan"), device=device, dtype=dtype)
        _decode_attention_triton(out_BNH, q_BNH, k_cache, v_cache, tables_BM, lens_B, launch)
        runs.append(out_BNH)
    assert torch.equal(*runs)
    for row, context in enumerate(context_lens):
        if context:
            expected = attention_oracle(q_BNH[row : row + 1], k_cache, v_cache, tables_BM[row], context)
            assert_close(runs[0][row : row + 1], expected, TOLERANCE[dtype])
        else:
            assert not runs[0][row].any()
    kept_BNH = torch.full_like(runs[0], float("nan"))
    _decode_attention_triton(kept_BNH, q_BNH, k_cache, v_cache, tables_BM, lens_B, launch, keep=True)
    empty_B = lens_B == 0
    assert kept_BNH[empty_B].isnan().all()
    assert torch.equal(kept_BNH[~empty_B], runs[0][~empty_B])


def check_decode_attention_from_qkv(
    context_lens: list[int], launch: Launch | None = None, *, group: int, num_kv_heads: int, head_dim: int,
    block_size: int, qk_norm: bool, device: str, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Against its definition in float64, with the projection whole and in parts; padding rows have context 0."""
    torch.manual_seed(0)
    k_cache, v_cache, tables_BM = paged_cache(context_lens, block_size, num_kv_heads, head_dim, device, dtype)
    qkv = randn(len(context_lens), (group + 2) * num_kv_heads * head_dim, device=device, dtype=dtype)
    lens_B = torch.tensor(context_lens, dtype=torch.int32, device=device)
    last_B = (lens_B - 1).clamp(min=0).long()
    slots = tables_BM.gather(1, last_B[:, None] // block_size)[:, 0].long() * block_size + last_B % block_size
    norms = [randn(head_dim, device=device, dtype=dtype) if qk_norm else None for _ in range(2)]
    angles = torch.rand(max(context_lens) + 1, head_dim // 2) * 6
    rope = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
    source = NewTokens(*norms, 1e-6, rope, last_B, slots.where(lens_B > 0, -1))
    wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in vars(source).values()]
    expected_caches = k_cache.double(), v_cache.double()
    q_BNH = qkv_to_cache_reference(qkv.double(), *wide, *expected_caches)
    for projection in (qkv, torch.stack((qkv, qkv)).float() / 2):
        caches = k_cache.clone(), v_cache.clone()
        out_BNH = torch.full_like(q_BNH, float("nan"), dtype=dtype)
        _decode_attention_triton(out_BNH, projection, *caches, tables_BM, lens_B, launch, source=source)
        for ours, expected in zip(caches, expected_caches, strict=True):
            assert_close(ours.nan_to_num(7.0), expected.nan_to_num(7.0), TOLERANCE[dtype])
        for row, context in enumerate(context_lens):
            if context:
                expected = attention_oracle(q_BNH[row : row + 1], *expected_caches, tables_BM[row], context)
                assert_close(out_BNH[row : row + 1], expected, 2 * TOLERANCE[dtype])  # q and k are rounded too
            else:
                assert not out_BNH[row].any()


def check_prefill_attention(
    rows: list[tuple[int, int]], *, group: int, num_kv_heads: int, head_dim: int, block_size: int, device: str,
    dtype: torch.dtype, **options: Any,
) -> None:  # fmt: skip
    """rows: (query length, context length) of each. Before them, as in steps with decodes, come tokens of no row."""
    torch.manual_seed(0)
    contexts, num_others = [context for _, context in rows], 130
    k_cache, v_cache, tables_BM = paged_cache(contexts, block_size, num_kv_heads, head_dim, device, dtype)
    v_cache = v_cache.nan_to_num(0.0)  # as qkv_to_cache keeps it, for whole tiles are read
    lengths = [num_others] + [query for query, _ in rows]
    starts_B1 = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q_TNH = randn(int(starts_B1[-1]), group * num_kv_heads, head_dim, device=device, dtype=dtype)

    def after(poison: int, numbers: Tensor) -> Tensor:
        """These numbers in memory where something else precedes them."""
        return torch.cat((numbers.new_tensor([poison]), numbers))[1:].to(device)

    lens_B = torch.tensor(contexts, dtype=torch.int32)
    out_TNH = torch.full_like(q_TNH, float("nan"))
    _prefill_attention_triton(
        out_TNH, q_TNH, k_cache, v_cache, tables_BM, after(-1000, starts_B1), after(40, lens_B), **options
    )
    assert out_TNH[:num_others].isnan().all()
    for row, (query_len, context) in enumerate(rows):
        queries = slice(int(starts_B1[row]), int(starts_B1[row + 1]))
        if query_len:
            expected = attention_oracle(q_TNH[queries], k_cache, v_cache, tables_BM[row], context)
            assert_close(out_TNH[queries], expected, TOLERANCE[dtype])


def check_rms_norm(shape: tuple[int, ...], *, add: bool, device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = (randn(*shape, device=device, dtype=dtype) for _ in range(2))
    weight = randn(shape[-1], device=device, dtype=dtype)
    y, summed = _rms_norm_triton(x, residual if add else None, weight, 1e-6)
    if add:
        expected, expected_sum = add_rms_norm_reference(x.double(), residual.double(), weight.double(), 1e-6)
        assert_close(summed, expected_sum, TOLERANCE[dtype])
        for part_dtype in (torch.float32, dtype):
            parts = randn(3, *shape, device=device, dtype=part_dtype)
            of_parts = _rms_norm_triton(parts, residual, weight, 1e-6)
            definition = add_rms_norm_reference(parts.double(), residual.double(), weight.double(), 1e-6)
            for ours, theirs in zip(of_parts, definition, strict=True):
                assert_close(ours, theirs, TOLERANCE[dtype])
    else:
        expected = rms_norm_reference(x.double(), weight.double(), 1e-6)
    assert_close(y, expected, TOLERANCE[dtype])


def check_silu_mul(num_tokens: int, size: int, *, device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = randn(num_tokens, 2 * size, device=device, dtype=dtype)
    assert_close(_silu_mul_triton(gate_up), silu_mul_reference(gate_up.double()), TOLERANCE[dtype])


def check_sparse_mlp(
    num_tokens: int, size: int, inner: int, num_experts: int, num_chosen: int, *, device: str, dtype: torch.dtype
) -> None:
    """Twice, since counts must be zeros again. The first token finds all experts equal, and takes the first of them;
    the last one, of NaN, spoils no other."""
    torch.manual_seed(0)
    x, logits = (randn(num_tokens, n, device=device, dtype=dtype) for n in (size, num_experts))
    if num_tokens > 1:
        x[-1], logits[-1] = float("nan"), float("nan")
    logits[0] = 1.0
    gate_up = randn(num_experts, 2 * inner, size, device=device, dtype=dtype) / size**0.5
    down = randn(num_experts, size, inner, device=device, dtype=dtype) / inner**0.5
    count = torch.zeros(num_experts, dtype=torch.int32, device=device)
    for normalize in (True, False):
        chosen = x.double(), logits, gate_up.double(), down.double(), num_chosen
        expected = sparse_mlp_reference(*chosen, normalize=normalize)
        parts = _sparse_mlp_triton(x, logits, gate_up, down, count, num_chosen, normalize=normalize)
        assert parts.shape == (num_chosen, num_tokens, size) and not count.any()
        y = parts.double().sum(0)
        assert_close(y[: num_tokens - 1 or 1], expected[: num_tokens - 1 or 1], TOLERANCE[dtype])
        assert num_tokens == 1 or y[-1].isnan().all()


def check_one_row_experts(
    size: int, inner: int, num_experts: int, num_chosen: int, *, norm: bool, residual: bool, device: str,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    x, norm_weight, added = (randn(1, size, device=device, dtype=dtype) for _ in range(3))
    gate_up = randn(num_experts, 2 * inner, size, device=device, dtype=dtype) / size**0.5
    down = randn(num_experts, size, inner, device=device, dtype=dtype) / inner**0.5
    given_norm, given_residual = norm_weight[0] if norm else None, added if residual else None
    drawn = randn(1, num_experts, device=device, dtype=dtype)
    for logits in (drawn, torch.ones_like(drawn)):  # of equals the first are taken
        for normalize in (True, False):
            given = x, logits, gate_up, down, num_chosen, given_norm, 1e-6, given_residual
            doubled = [a.double() if isinstance(a, Tensor) and a is not logits else a for a in given]
            expected = one_row_experts_reference(*doubled, normalize=normalize)  # type: ignore[arg-type]
            assert_close(_one_row_experts_triton(*given, normalize=normalize), expected, TOLERANCE[dtype])
    # NaN chooses experts that there are, and gives NaN.
    of_nan = _one_row_experts_triton(x, drawn * float("nan"), *given[2:], normalize=True)
    assert of_nan.isnan().all()


def check_embedding(num_tokens: int, size: int, *, device: str, dtype: torch.dtype) -> None:
    """A shard of 8 rows, the last 3 padding, for ids 10 … 14 of 0 … 19."""
    torch.manual_seed(0)
    weight = randn(8, size, device=device, dtype=dtype)
    ids = torch.randint(0, 20, (num_tokens,), device=device)
    rows = [weight[i - 10] if 10 <= i < 15 else torch.zeros_like(weight[0]) for i in ids.tolist()]
    assert torch.equal(_embedding_triton(ids, weight, 10, 5), torch.stack(rows))


def check_qkv_to_cache(
    slots: list[int], *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, qk_norm: bool,
    device: str, dtype: torch.dtype,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    num_tokens = len(slots)
    qkv = randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, device=device, dtype=dtype)
    qkv[0, -1], qkv[-1, -2] = float("nan"), float("-inf")  # in v, which is kept finite
    norms = [randn(head_dim, device=device, dtype=dtype) if qk_norm else None for _ in range(2)]
    angles = torch.rand(64, head_dim // 2) * 6
    rope = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
    positions = torch.randint(0, 64, (num_tokens,), device=device)
    slots_T = torch.tensor(slots, device=device)
    shape = (max(slots) // block_size + 2, block_size, num_kv_heads, head_dim)
    before = randn(2, *shape, device=device, dtype=dtype)
    cache, expected_cache = before.clone(), before.double()
    q = _qkv_to_cache_triton(qkv, *norms, 1e-6, rope, positions, slots_T, cache[0], cache[1])
    expected_q = qkv_to_cache_reference(
        qkv.double(), *(None if w is None else w.double() for w in norms), 1e-6, rope.double(), positions, slots_T,
        expected_cache[0], expected_cache[1],
    )  # fmt: skip
    assert_close(q, expected_q, TOLERANCE[dtype])
    assert_close(cache, expected_cache, TOLERANCE[dtype])
    untouched = torch.ones(shape[0] * block_size, dtype=torch.bool)
    untouched[[slot for slot in slots if slot >= 0]] = False
    assert torch.equal(cache.flatten(1, 2)[:, untouched], before.flatten(1, 2)[:, untouched])
    halves, again = torch.stack((qkv, qkv)).float() / 2, before.clone()  # parts that add up to qkv exactly
    assert torch.equal(q, _qkv_to_cache_triton(halves, *norms, 1e-6, rope, positions, slots_T, again[0], again[1]))
    assert torch.equal(cache, again)


def check_one_row_matmul(
    size_in: int, size_out: int, *, norm: bool, gated: bool, residual: bool, device: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = randn(1, size_in, device=device, dtype=dtype)
    weight = randn(size_out * (1 + gated), size_in, device=device, dtype=dtype) * size_in**-0.5
    norm_weight = randn(size_in, device=device, dtype=dtype) if norm else None
    added = randn(1, size_out, device=device, dtype=dtype) if residual else None
    expected = one_row_matmul_reference(
        x.double(),
        weight.double(),
        None if norm_weight is None else norm_weight.double(),
        1e-6,
        None if added is None else added.double(),
        gated=gated,
    )
    for cut in (None, OneRow(2, 512, 1), OneRow(16 << gated, 1024, 8)):
        y = _one_row_triton(x, weight, norm_weight, 1e-6, added, gated=gated, cut=cut)
        assert_close(y, expected, 2 * TOLERANCE[dtype])  # what is normed is rounded too


def check_split_matmul(
    num_rows: int,
    size_in: int,
    size_out: int,
    tiles: Tiles,
    *,
    device: str,
    dtype: torch.dtype,
    gated: bool = False,
) -> None:
    torch.manual_seed(0)
    x = randn(num_rows, size_in, device=device, dtype=dtype)
    weight = randn(size_out, size_in, device=device, dtype=dtype) * size_in**-0.5
    y = _split_matmul_gpu(x, weight, tiles, gated=gated)
    # Parts are float32 sums of products that float32 holds exactly, if dtype is a 16-bit one.
    tolerance = 1e-5 if tiles.splits > 1 else TOLERANCE[dtype]
    assert_close(y, split_matmul_reference(x.double(), weight.double(), tiles.splits, gated=gated), tolerance)


def check_prepare_decode(num_rows: int, num_columns: int, block_size: int, device: str) -> None:
    """Integers, so exactly the definition's; every third row is padding, some get a new block or a host token."""

    def state() -> DecodeState:
        generator = torch.Generator().manual_seed(num_rows)
        table = torch.randint(0, 1000, (num_rows + 1, num_columns), generator=generator, dtype=torch.int32)
        last = torch.randint(-(2**40), 2**40, (num_rows + 1,), generator=generator)
        return DecodeState(table.to(device), last.to(device))

    row = torch.randperm(num_rows)
    words = torch.stack((row, torch.randint(0, num_columns * block_size, (num_rows,)), row * 7, row + 2000), 1).int()
    words[torch.rand(num_rows) < 0.5, 2] = -1
    words[torch.rand(num_rows) < 0.5, NEW_BLOCK] = -1
    words[2::3] = torch.tensor([-1, 0, -1, -1], dtype=torch.int32)
    ours, theirs = state(), state()
    filled, expected = DecodeInputs.empty(num_rows, ours), DecodeInputs.empty(num_rows, theirs)
    _prepare_decode_triton(words.to(device), ours, filled, block_size)
    prepare_decode_reference(words.to(device), theirs, expected, block_size)
    for name, value in vars(expected).items():
        out = getattr(filled, name)
        if name == "block_tables_BM":  # what lies beyond the context is nobody's
            used = torch.arange(num_columns, device=device) <= (expected.positions_B // block_size)[:, None]
            out, value = out.where(used, 0), value.where(used, 0)
        assert torch.equal(out, value), name
    real = slice(0, num_rows)  # the scratch row takes any padding's last write
    assert torch.equal(ours.block_table_RM[real], theirs.block_table_RM[real])
