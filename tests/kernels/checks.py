"""One check for each Triton kernel, against float64: under Triton's interpreter on the CPU, and compiled on a GPU.

They call the launchers, so that the Triton kernel runs whatever the device. Inputs are random and rounded to the dtype
before the oracle sees them; outputs start as NaN, so that what isn't written fails.
"""

from typing import Any

import torch
from torch import Tensor

from nanollm.kernels.backend import tl, triton
from nanollm.kernels.decode_attention import Launch, _decode_attention_triton
from nanollm.kernels.embedding import _embedding_triton
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
from nanollm.kernels.sampling import (
    _best_candidate_triton,
    _gumbel,
    _noise_words,
    best_candidate_reference,
    gumbel,
    noise_words,
)
from nanollm.kernels.silu_mul import _silu_mul_triton, silu_mul_reference
from nanollm.kernels.skinny_matmul import _one_row_triton, _skinny_matmul_triton, skinny_matmul_reference

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


def check_prefill_attention(
    rows: list[tuple[int, int]], *, group: int, num_kv_heads: int, head_dim: int, block_size: int, device: str,
    dtype: torch.dtype, **options: Any,
) -> None:  # fmt: skip
    """rows: (query length, context length) of each."""
    torch.manual_seed(0)
    contexts = [context for _, context in rows]
    k_cache, v_cache, tables_BM = paged_cache(contexts, block_size, num_kv_heads, head_dim, device, dtype)
    v_cache = v_cache.nan_to_num(0.0)  # as qkv_to_cache keeps it, for whole tiles are read
    starts_B1 = torch.tensor([0] + [query for query, _ in rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q_TNH = randn(int(starts_B1[-1]), group * num_kv_heads, head_dim, device=device, dtype=dtype)
    lens_B = torch.tensor(contexts, dtype=torch.int32, device=device)
    out_TNH = torch.full_like(q_TNH, float("nan"))
    _prefill_attention_triton(out_TNH, q_TNH, k_cache, v_cache, tables_BM, starts_B1.to(device), lens_B, **options)
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
    else:
        expected = rms_norm_reference(x.double(), weight.double(), 1e-6)
    assert_close(y, expected, TOLERANCE[dtype])


def check_silu_mul(num_tokens: int, size: int, *, device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = randn(num_tokens, 2 * size, device=device, dtype=dtype)
    assert_close(_silu_mul_triton(gate_up), silu_mul_reference(gate_up.double()), TOLERANCE[dtype])


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


@triton.jit
def _noise_kernel(words, noise, seed, choice, position, first_id, TILE: tl.constexpr, FAST: tl.constexpr):
    quad = first_id // 4 + tl.arange(0, TILE // 4)
    w0, w1, w2, w3 = _noise_words(quad, tl.load(position), tl.load(choice), tl.load(seed))
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    tl.store(words + tl.arange(0, TILE), word.to(tl.int64))
    tl.store(noise + tl.arange(0, TILE), _gumbel(word, FAST))


def check_noise(*, device: str) -> None:
    """Integers bit for bit; the float noise within rounding, most of all where it is large, since those values win."""
    for seed, choice, position, first_id in [
        (0, 0, 0, 0), (-1, 3, 17, 4096), (2**63 - 1, 2**31, 2**31 + 5, 151_552), (-(2**63), 1, 40_000, 4)
    ]:  # fmt: skip
        parameters = [torch.tensor([value], device=device) for value in (seed, choice, position)]
        words = torch.zeros(2048, dtype=torch.int64, device=device)
        noise = torch.zeros(2048, device=device)
        _noise_kernel[(1,)](words, noise, *parameters, first_id, TILE=2048, FAST=words.is_cuda)
        expected = noise_words(*parameters, first_id, 2048)[0]
        assert torch.equal(words, expected)
        u = ((expected.double() + 0.5) / 2**32).float().clamp(max=1 - 2**-24)
        exact = -torch.log(-torch.log1p(-u.double()))
        for approximation in (noise, gumbel(expected)):
            torch.testing.assert_close(approximation.double(), exact, rtol=5e-7, atol=4e-6)


def check_best_candidate(
    num_rows: int, size: int, *, first_id: int, greedy: bool, device: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    logits = randn(num_rows, size + 8, device=device, dtype=dtype)[:, :size]
    temperature = torch.zeros(num_rows) if greedy else torch.rand(num_rows) * (torch.arange(num_rows) % 3 > 0)
    seed, choice, position = (torch.randint(0, 2**31, (num_rows,), device=device) for _ in range(3))
    parameters = (temperature.to(device), seed, choice, position, first_id)
    value, index = _best_candidate_triton(logits, *parameters)
    expected_value, expected_index = best_candidate_reference(logits, *parameters)
    assert index.dtype == torch.int64
    # A near tie may fall either way, by the rounding of logarithms; with few random rows there is none.
    assert torch.equal(index, expected_index)
    torch.testing.assert_close(value, expected_value, rtol=2e-6, atol=8e-6)
    if greedy:
        assert torch.equal(value, expected_value)


def check_ties(*, device: str) -> None:
    """Of equal logits the lowest id wins, within a tile and across tiles; a row of -inf names a real token."""
    logits = torch.zeros(4, 5001, device=device)
    logits[1, [4999, 2500, 2499]] = 1.0
    logits[2, 5000] = 1.0
    logits[3] = float("-inf")
    zeros = torch.zeros(4, dtype=torch.int64, device=device)
    _, index = _best_candidate_triton(logits, zeros.float(), zeros, zeros, zeros, 400)
    assert index.tolist() == [400, 2899, 5400, 400]


def check_skinny_matmul(
    num_rows: int, size_in: int, size_out: int, *, norm: bool, gated: bool, residual: bool, device: str,
    dtype: torch.dtype, **options: Any,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    x = randn(num_rows, size_in, device=device, dtype=dtype)
    weight = randn(size_out * (1 + gated), size_in, device=device, dtype=dtype) * size_in**-0.5
    norm_weight = randn(size_in, device=device, dtype=dtype) if norm else None
    added = randn(num_rows, size_out, device=device, dtype=dtype) if residual else None
    ys = [_skinny_matmul_triton(x, weight, norm_weight, 1e-6, added, gated=gated, **options)]
    if num_rows == 1:
        ys.append(_one_row_triton(x, weight, norm_weight, 1e-6, added, gated=gated))
    expected = skinny_matmul_reference(
        x.double(),
        weight.double(),
        None if norm_weight is None else norm_weight.double(),
        1e-6,
        None if added is None else added.double(),
        gated=gated,
    )
    for y in ys:
        assert_close(y, expected, 2 * TOLERANCE[dtype])  # what is normed is rounded too


def check_prepare_decode(num_rows: int, num_columns: int, block_size: int, device: str) -> None:
    """Integers, so exactly the definition's; every third row is padding, some get a new block or a host token."""

    def state() -> DecodeState:
        generator = torch.Generator().manual_seed(num_rows)
        table = torch.randint(0, 1000, (num_rows + 1, num_columns), generator=generator, dtype=torch.int32)
        last, seed, choice = torch.randint(-(2**40), 2**40, (3, num_rows + 1), generator=generator)
        return DecodeState(*(x.to(device) for x in (table, last, torch.rand(num_rows + 1), seed, choice)))

    row = torch.randperm(num_rows)
    words = torch.stack((row, torch.randint(0, num_columns * block_size, (num_rows,)), row * 7, row + 2000), 1).int()
    words[torch.rand(num_rows) < 0.5, 2] = -1
    words[torch.rand(num_rows) < 0.5, NEW_BLOCK] = -1
    words[2::3] = torch.tensor([-1, 0, -1, -1], dtype=torch.int32)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ours = state()
        torch.manual_seed(0)
        theirs = state()
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
