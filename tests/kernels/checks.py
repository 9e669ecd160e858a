"""One check for each Triton kernel, against float64: under Triton's interpreter on the CPU, and compiled on a GPU.

They call the launchers, so that the Triton kernel runs whatever the device. Inputs are random and rounded to the dtype
before the oracle sees them; outputs start as NaN, so that what isn't written fails.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanollm import sampling_params
from nanollm.kernels.advance_rows import _advance_rows_triton, advance_rows_reference
from nanollm.kernels.backend import tl, triton
from nanollm.kernels.decode_attention import Launch, NewTokens, _decode_attention_triton
from nanollm.kernels.draw import _draw_triton, draw_reference
from nanollm.kernels.embedding import _embedding_triton
from nanollm.kernels.histogram import BINS
from nanollm.kernels.noise import TOKEN_STREAM, TOKENS, gumbel, gumbel_noise, noise_word, noise_words
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
from nanollm.kernels.split_matmul import Tiles, _split_matmul_gpu, split_matmul_reference
from nanollm.kernels.threshold import Limits, _threshold_triton, threshold_reference
from nanollm.kernels.tile_stats import _tile_stats_triton, tile_stats_reference
from nanollm.kernels.token_rules import COUNT_MASK, SLOT_SHIFT, RowLogits, SamplerState
from nanollm.sampling_params import (
    BAD_PREFIX,
    FREQUENCY,
    HAS_MASK,
    HAS_RULES,
    NUM_SLOTS,
    ONLY_BANS,
    PRESENCE,
    REPETITION,
    RULES,
    TEMPERATURE,
    TOP_P,
)

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
        parts = randn(3, *shape, device=device, dtype=torch.float32)
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


@triton.jit
def _noise_kernel(words, noise, seed_low, seed_high, choice, position, first_id, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    seeds = tl.load(seed_low), tl.load(seed_high)
    word = noise_word(seeds[0], seeds[1], tl.load(choice), tl.load(position), first_id + i, TOKEN_STREAM)
    tl.store(words + i, word.to(tl.int64))
    tl.store(noise + i, gumbel_noise(word))


def check_noise(*, device: str) -> None:
    """Integers bit for bit; the float noise within rounding, most of all where it is large, since those values win."""
    for seed, choice, position, first_id in [
        (0, 0, 0, 0), (-1, 3, 17, 4096), (2**63 - 1, 2**31 - 1, 2**31 + 5, 151_552), (-(2**63), 1, 40_000, 4)
    ]:  # fmt: skip
        halves = torch.tensor([seed]).view(torch.int32)[:, None].to(device)
        parameters = [torch.tensor([value], device=device) for value in (seed, choice, position)]
        words = torch.zeros(2048, dtype=torch.int64, device=device)
        noise = torch.zeros(2048, device=device)
        _noise_kernel[(1,)](words, noise, *halves, *parameters[1:], first_id, SIZE=2048)
        ids = first_id + torch.arange(2048, device=device)
        expected = noise_words(*parameters, ids[None], TOKENS)[0]
        assert torch.equal(words, expected)
        u = ((expected.double() + 0.5) / 2**32).float().clamp(max=1 - 2**-24)
        exact = -torch.log(-torch.log1p(-u.double()))
        for approximation in (noise, gumbel(expected)):
            torch.testing.assert_close(approximation.double(), exact, rtol=5e-7, atol=4e-6)


def make_state(num_rows: int, size: int, device: str = "cpu", **columns: list[float]) -> SamplerState:
    """Rows without any filter or rule at temperature 1, but for the columns that are given (lists of a value a row)."""
    state = SamplerState.empty(num_rows + 1, size, torch.device(device))
    given = {"TEMPERATURE": [1.0], "TOP_P": [1.0], "REPETITION": [1.0], "SEED_LOW": list(range(num_rows))} | columns
    for name, values in given.items():
        column = getattr(sampling_params, name)
        dtype = torch.int32 if name in ("SEED_LOW", "SEED_HIGH", "CHOICE", "TOP_K", "RULES") else torch.float32
        values = list(values) * num_rows if len(values) == 1 else values
        state.params_RP[:num_rows, column] = torch.tensor(values, dtype=dtype).view(torch.int32).to(device)
    return state


def make_rules(state: SamplerState, num_rows: int, size: int) -> None:
    """Random penalties, biases and bans for every second row, of some only the bans."""
    words = torch.zeros_like(state.words_RV)
    words += torch.randint(0, 4, words.shape).to(words) * (torch.rand(words.shape) < 0.1).to(words)
    slots = torch.randint(0, NUM_SLOTS, words.shape) * (torch.rand(words.shape) < 0.3)
    words |= slots.to(words) << SLOT_SHIFT
    words[(torch.rand(words.shape) < 0.1).to(words.device)] |= -(2**31)
    state.words_RV.copy_(words)
    state.slots_R3S[:, 0] = torch.randn(state.slots_R3S[:, 0].shape).view(torch.int32).to(words)
    state.slots_R3S[:, 1:] = torch.randint(0, 12, state.slots_R3S[:, 1:].shape).to(words)
    state.slots_R3S[:, :, 0] = 0
    state.masks_RW.copy_(torch.randint(-(2**31), 2**31, state.masks_RW.shape))
    for row in range(0, num_rows, 2):
        state.params_RP[row, RULES] = HAS_RULES | (HAS_MASK if row % 4 == 0 else 0)
        values = torch.tensor([0.5 + row, 0.3, -0.7])
        if row % 6 == 4:
            state.params_RP[row, RULES] |= ONLY_BANS
            state.slots_R3S[row, 0], values = 0, torch.tensor([1.0, 0.0, 0.0])
        state.params_RP[row, [REPETITION, FREQUENCY, PRESENCE]] = values.view(torch.int32).to(words)


def check_tile_stats(num_rows: int, size: int, *, device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = randn(num_rows, size + 8, device=device, dtype=dtype)[:, :size] * 3
    logits[:, ::7] = float("-inf")
    logits[0, 0] = float("nan")
    # Where x * scale has no bits left for what the x of a tile differ by
    huge = torch.tensor([1e5, -1e5, 1e9, -1e9, 1e30, -3e38, float("-inf")], device=device)
    token = torch.arange(size, device=device)
    logits[-1] = huge[token // 128 % len(huge)] * (token % 128 + 1)
    state = make_state(num_rows, size, device, TEMPERATURE=[0.7])
    make_rules(state, num_rows, size)
    order = torch.randperm(num_rows, device=device)
    rows = RowLogits(logits, order, order + 3, state)
    maxima, mass = _tile_stats_triton(rows)
    expected = tile_stats_reference(rows)
    torch.testing.assert_close(maxima, expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mass, expected[1], rtol=2e-5, atol=0)


def check_counts(num_rows: int, size: int, parts: int, *, device: str, dtype: torch.dtype) -> None:
    """A bin's count is how many logits there are whose keys' upper 16 bits are the bin's, kept within the bins."""
    torch.manual_seed(0)
    logits = randn(num_rows, size, device=device, dtype=dtype) * 3
    logits[:, ::5] *= 1e-7
    logits[:, 1::5] *= 100
    logits[:, :3] = torch.tensor([float("-inf"), float("nan"), 3e4], device=device)[:size]
    kind = [s % 3 for s in range(num_rows)]  # counted, without a filter, without a temperature
    state = make_state(
        num_rows, size, device, TOP_P=[1.0 if k == 1 else 0.9 for k in kind], TEMPERATURE=[float(k < 2) for k in kind]
    )
    index = torch.arange(num_rows, device=device)
    rows, plain = (RowLogits(logits, index, index, state) for _ in range(2))
    (max_SN, mass_SN), (plain_max_SN, plain_mass_SN) = _tile_stats_triton(rows, True, parts), _tile_stats_triton(plain)
    drawn_S = rows.floats(TEMPERATURE) > 0  # to the last bit, for what is drawn must not depend on others' filters
    assert torch.equal(max_SN, plain_max_SN) and torch.equal(mass_SN[drawn_S], plain_mass_SN[drawn_S])
    x_SV = logits[::3].float().nan_to_num(float("-inf"), float("inf"), float("-inf"))
    bits_SV = x_SV.view(torch.int32)
    steps_SV = torch.where(bits_SV < 0, -(bits_SV & 0x7FFFFFFF), bits_SV) >> 16
    least = 0x3380  # 2**-24
    positive_SV = (steps_SV - least).clamp(0, BINS // 2 - 1) + BINS // 2
    bin_SV = torch.where(steps_SV >= 0, positive_SV, (steps_SV + least).clamp(1 - BINS // 2, 0) + BINS // 2 - 1)
    assert rows.counts_SPB is not None
    count_SB = rows.counts_SPB[::3].sum(1)
    count_SB[:, 0] -= count_SB.sum(1) - size  # what fills up the last tiles
    for count_B, bin_V in zip(count_SB, bin_SV, strict=True):
        assert torch.equal(count_B, bin_V.bincount(minlength=BINS))


def check_threshold(
    logits: Tensor, state: SamplerState, *, exact: bool = True, parts: int = 1, **settings: Any
) -> None:
    """The same kept set as the definition's, which sorts in float64.

    exact: False allows what float32 sums of the mass allow: the set of another top_p, 2e-6 away. parts: of a row, whose
    logits are counted apart; 0 for none, which changes nothing but the time. settings: of RowLogits.
    """
    num_rows = len(logits)
    index = torch.arange(num_rows, device=logits.device)
    rows = RowLogits(logits, index, index + 3, state, **settings)
    stats = _tile_stats_triton(rows, parts > 0, parts)
    limits = _threshold_triton(rows, *stats)
    _draw_triton(rows, *stats, limits)  # which settles what is open
    found = limits.threshold_S
    x = rows.processed().logits_SV
    if exact:
        expected = [threshold_reference(rows)] * 2
    else:
        bounds = []
        for change in (2e-6, -2e-6):
            changed = replace(state, params_RP=state.params_RP.clone())
            changed.params_RP.view(torch.float32)[:, TOP_P] += change
            bounds.append(threshold_reference(replace(rows, state=changed)))
        expected = bounds
    kept, most, least = ((x >= limit[:, None]).sum(-1).tolist() for limit in (found, *expected))
    for row, (fewest, count, largest) in enumerate(zip(least, kept, most, strict=True)):
        assert fewest <= count <= largest, f"row {row} keeps {count} tokens, not {fewest} to {largest}"


FILTERS = {
    "TEMPERATURE": [1.0, 0.6, 1.0, 1.3, 0.6, 1.0, 2.0, 0.0, 0.01, 1.0, 1.5, 0.7, 1.0],
    "TOP_K": [0, 0, 20, 20, 1, 3000, 500, 5, 7, 2**30, 0, 90, 0],
    "TOP_P": [0.9, 1.0, 1.0, 0.95, 0.9, 0.5, 0.999, 0.5, 0.9, 1e-9, 0.8, 0.9, 0.9],
    "MIN_P": [0.0, 0.05, 0.0, 0.02, 0.0, 0.0, 1e-5, 0.5, 0.0, 0.0, 1e-3, 0.0, 1.0],
}
FILTERED = len(FILTERS["TOP_K"])


def adversarial_logits(num_rows: int, size: int, kind: str, device: str, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(num_rows, size) * 2
    if kind == "sharp":
        x *= 4
    if kind == "ties":
        x = x.round()
    if kind == "equal":
        x = x * 0 + 1.5
    if kind == "mostly banned":
        x[:, 3:] = float("-inf")
    if kind == "one-hot":
        x = x * 0
        x[:, size // 2] = 60.0
    if kind == "peaked":
        x[:, ::97] += 12
    if kind == "zipf":
        x = -1.1 * torch.rand(num_rows, size).argsort(-1).add(1).log()
    if kind == "sorted":
        x = x.sort(-1).values
    if kind == "negative":
        x -= 30
    if kind == "far below":
        x -= 258
    if kind == "huge":
        x *= 200
    if kind == "tiny":
        x *= 1e-8
    if kind == "cut at zero":  # by the first of FILTERS
        x -= 1.44
    if kind == "infinite":
        x[:, 5], x[:, 6] = float("inf"), float("nan")
    return x.to(device, dtype)


KINDS = [
    "random",
    "sharp",
    "ties",
    "equal",
    "mostly banned",
    "one-hot",
    "peaked",
    "zipf",
    "sorted",
    "negative",
    "far below",
    "huge",
    "tiny",
    "cut at zero",
    "infinite",
]


def check_filters(size: int, kind: str, *, device: str, dtype: torch.dtype) -> None:
    state = make_state(FILTERED, size, device, **FILTERS)
    exact = dtype != torch.float32 and size < 50_000  # a boundary of many values may fall within float32 rounding
    logits = adversarial_logits(FILTERED, size, kind, device, dtype)
    logits[:, 7:8] = float("nan")
    for parts in (0, 3) if device == "cpu" else (0, 1, 3):
        check_threshold(logits, state, exact=exact, parts=parts)


def check_filters_of_gathered_logits(size: int, *, device: str) -> None:
    """As ranks have them: float32, with the values of bfloat16, but in rows whose rules changed them."""
    state = make_state(FILTERED, size, device, **FILTERS)
    make_rules(state, FILTERED, size)
    logits = adversarial_logits(FILTERED, size, "random", device, torch.bfloat16)
    index = torch.arange(FILTERED, device=device)
    rows = RowLogits(logits, index, index + 3, state)
    check_threshold(rows.processed().logits_SV, state, exact=False, has_rules=False, raw_dtype=torch.bfloat16)


def check_filters_after_rules(size: int, *, device: str, dtype: torch.dtype) -> None:
    state = make_state(FILTERED, size, device, **FILTERS)
    make_rules(state, FILTERED, size)
    check_threshold(adversarial_logits(FILTERED, size, "random", device, dtype), state, exact=False)


def check_draw(num_rows: int, size: int, *, first_id: int, filtered: bool, device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = randn(num_rows, size + 8, device=device, dtype=dtype)[:, :size] * 2
    logits[-1] = float("-inf")
    temperature = (torch.rand(num_rows) * (torch.arange(num_rows) % 3 > 0)).tolist()
    filters = {"TOP_P": [0.8], "TOP_K": [max(size // 3, 1)]} if filtered else {}
    state = make_state(num_rows, size, device, TEMPERATURE=temperature, SEED_HIGH=[5], CHOICE=[1], **filters)
    make_rules(state, num_rows, size)
    index = torch.arange(num_rows, device=device)
    rows = RowLogits(logits, index, index + 3, state, first_id)
    stats = _tile_stats_triton(rows, counts=filtered)
    limits = Limits(threshold_reference(rows))
    found = _threshold_triton(rows, *stats)
    draws = [_draw_triton(rows, *stats, of) for of in (limits, found, found)]  # which the first draw completes
    if not filtered:
        draws.append(_draw_triton(rows, *stats))
    expected_value, expected_id = draw_reference(rows, *stats, limits)
    for value, token_id in draws:
        # A near tie may fall either way, by the rounding of logarithms; with few random rows there is none.
        assert torch.equal(token_id, expected_id)
        assert token_id[-1] == -1
        torch.testing.assert_close(value, expected_value, rtol=2e-6, atol=2e-5)
        assert torch.equal(value[1::2], draws[0][0][1::2]), "rows without rules are the same in any batch"
    drawn = rows.floats(TEMPERATURE) > 0
    beyond = Limits(torch.full_like(limits.threshold_S, 1e9).where(drawn, float("-inf")))  # all kept is on other ranks
    value, token_id = _draw_triton(rows, *stats, beyond)
    assert (value[drawn] == float("-inf")).all() and (token_id < first_id + size).all()


def check_ties(*, device: str) -> None:
    """Of equal logits the lowest id wins, within a tile and across tiles; a row of -inf has no token."""
    logits = torch.zeros(5, 5001, device=device)
    logits[1, [4999, 2500, 2499]] = 1.0
    logits[2, 5000] = 1.0
    logits[3] = float("-inf")
    logits[4] = float("nan")
    index = torch.arange(5, device=device)
    rows = RowLogits(logits, index, index, make_state(5, 5001, device, TEMPERATURE=[0.0]), 384)
    limits = Limits(threshold_reference(rows))
    for of in (None, limits):
        assert _draw_triton(rows, *_tile_stats_triton(rows), of)[1].tolist() == [384, 2883, 5384, -1, -1]


def check_advance_rows(*, device: str) -> None:
    """Integers, so exactly the definition's: counts, last tokens, and bad words of 1 to 16 tokens."""
    torch.manual_seed(0)
    state = make_state(6, 512, device, RULES=[0, 1, 3, 3, 3, 1])
    state.bad_words_RWN[:, :40, 0] = torch.randint(0, 50, (7, 40)).to(device)
    state.bad_words_RWN[:, :40, 1:] = torch.randint(-1, 2, (7, 40, BAD_PREFIX)).to(device)
    state.bad_words_RWN[:, :40, 1:-1] = -1
    state.last_RH[:] = torch.randint(0, 2, state.last_RH.shape).to(device)
    states = [replace(state, **{n: t.clone() for n, t in vars(state).items()}) for _ in range(2)]
    lasts = [torch.zeros(7, dtype=torch.int64, device=device) for _ in range(2)]
    row = torch.tensor([5, 0, 1, 2, 3, 4], device=device)
    for token_ids in ([600, 100, 101, 0, 1, -1], [1, 0, 700, 1, 0, 1]):
        arguments = (torch.tensor(token_ids, device=device), row, row * 10)
        _advance_rows_triton(*arguments, states[0], lasts[0], 100)
        advance_rows_reference(*arguments, states[1], lasts[1], 100)
    assert torch.equal(*lasts)
    assert states[0].words_RV[1, 1] & COUNT_MASK == 1
    assert (states[0].slots_R3S != state.slots_R3S).any()
    for name, ours in vars(states[0]).items():
        assert torch.equal(ours, getattr(states[1], name)), name


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
