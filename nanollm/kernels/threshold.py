"""min_p, top_k and top_p as one number a row: the smallest logit that is kept.

In vLLM's order: min_p keeps tokens of at least min_p × the largest probability; of those top_k keeps the k largest;
of those top_p keeps the smallest set of largest ones that has top_p of their mass. Each keeps a token if its logit is
large enough, so together they are a threshold. Ties are kept or dropped together: all tokens that equal the k-th
largest stay, and a token stays iff what is strictly larger has less mass than top_p, to within 1e-6, which is what
float32 sums are good for. The largest logit always stays.

On a GPU nothing is sorted. The answer is the largest threshold at or above which there is enough: k tokens, or enough
mass. One program a row searches for it in a bracket of float32 bit patterns, which order as the numbers do:
each pass over the logits sums what is above the bracket, spreads what is inside over 2,048 bins, and the answer
lies in one bin. Two passes, at most four, are enough for any float32 values, and one if the bracket holds few values
of a 16-bit type. It looks only at tiles whose largest logit reaches the bracket, and starts from a good bracket: there
are k tokens at or above the k-th largest of the tiles' maxima; for top_p, a sample of the tiles says about where.
Sums in bins are integers, so their order doesn't matter and a row is cut at the same place every time.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import replace

import torch
from torch import Tensor

from nanollm.kernels.backend import gdc_launch_dependents, gdc_wait, overlap, power_of_2, runs_triton, tl, triton
from nanollm.kernels.tile_stats import TILE, TILE_SIZE
from nanollm.kernels.token_rules import RowLogits, float_param, has_rules, int_param, load_logits
from nanollm.sampling_params import MIN_P, TEMPERATURE, TOP_K, TOP_P

SLACK = 1e-6  # masses this close to top_p count as equal to it
_SLACK, _LOG2_E = tl.constexpr(SLACK), tl.constexpr(1.4426950408889634)
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = (tl.constexpr(column) for column in (TEMPERATURE, TOP_K, TOP_P, MIN_P))
# float32 bits that are 0, or for negative numbers the same in all, in numbers that were converted from this type.
_UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13}
_COUNTING, _WEIGHING, _CUTTING, _DONE = (tl.constexpr(phase) for phase in range(4))


def cut(rows: RowLogits, x_SC: Tensor, count_SC: Tensor) -> Tensor:
    """The definition: the smallest logit that each row's filters keep, float32 [S], in float64 throughout.

    x_SC: float32, the row's logits in descending order. count_SC: float64, how many tokens have each.
    """
    temperature_S1, top_p_S1, min_p_S1 = (rows.floats(column)[:, None] for column in (TEMPERATURE, TOP_P, MIN_P))
    top_k_S1, peak_S1, last = rows.ints(TOP_K)[:, None], x_SC[:, :1], x_SC.shape[1] - 1
    limit_S1 = min_p_S1.log() * temperature_S1 + peak_S1
    kth_S1 = x_SC.gather(1, (count_SC.cumsum(-1) < top_k_S1).sum(-1, keepdim=True).clamp(max=last))
    limit_S1 = limit_S1.maximum(kth_S1.where(top_k_S1 > 0, float("-inf")))
    weight_SC = count_SC * torch.exp((x_SC.double() - peak_S1) / temperature_S1) * (x_SC >= limit_S1)
    # Of equal logits the first decides; if it stays, the last of them that does has the same value.
    larger_SC = weight_SC.cumsum(-1) - weight_SC
    enough_S1 = (top_p_S1.double() - SLACK).clamp(min=SLACK / 10) * weight_SC.sum(-1, keepdim=True)
    stays_SC = (larger_SC < enough_S1) & (x_SC >= limit_S1)
    smallest_S1 = x_SC.gather(1, stays_SC.sum(-1, keepdim=True).clamp(min=1) - 1)
    limit_S1 = limit_S1.maximum(smallest_S1.where(top_p_S1 < 1, float("-inf")))
    has_filter_S1 = (temperature_S1 > 0) & ((top_k_S1 > 0) | (top_p_S1 < 1) | (min_p_S1 > 0))
    return torch.where(peak_S1.isinf(), peak_S1, limit_S1).where(has_filter_S1, float("-inf"))[:, 0]


def threshold_reference(rows: RowLogits) -> Tensor:
    """The definition; as threshold. Sorts only rows with filters, and few of them at a time."""
    filters = rows.ints(TOP_K).bool() | (rows.floats(TOP_P) < 1) | (rows.floats(MIN_P) > 0)
    threshold_S = torch.full((len(filters),), float("-inf"), device=filters.device)
    x_SV = rows.processed().logits_SV
    for index in (filters & (rows.floats(TEMPERATURE) > 0)).nonzero()[:, 0].split(1 + 2**22 // x_SV.shape[1]):
        some = replace(rows, rows_S=rows.rows_S[index])
        x_SC = x_SV[index].sort(descending=True).values
        threshold_S[index] = cut(some, x_SC, torch.ones_like(x_SC, dtype=torch.float64))
    return threshold_S


@triton.jit
def _key(x):
    """int32 that order as the float32 numbers do; -0 is 0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key):
    """The inverse of _key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, peak, scale, counting):
    """What a token counts: 1, or its probability relative to the largest."""
    return tl.where(counting, tl.where(x > float("-inf"), 1.0, 0.0), tl.exp2((x - peak) * scale))


@triton.jit
def _add_to_bins(bins, index, value, mask, COMPILED: tl.constexpr):
    """bins[index] += round(value), in integers, where the mask is set."""
    if COMPILED:
        # tl.atomic_add would move everything through shared memory, to a layout that it has no use for here.
        tl.inline_asm_elementwise(
            """{
            .reg .pred %inside;
            .reg .b64 %at, %amount;
            setp.ne.b32 %inside, $4, 0;
            @%inside mad.wide.u32 %at, $2, 8, $1;
            @%inside cvt.rni.u64.f32 %amount, $3;
            @%inside red.relaxed.gpu.global.add.u64 [%at], %amount;
            mov.b32 $0, 0;
            }""",
            "=r,l,r,f,r",
            [bins.to(tl.int64), index, value, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        amount = (tl.where(mask, value, 0.0) + 0.5).to(tl.int64)
        tl.atomic_add(bins + index, amount, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["threshold_S", "rows_S"])
def _threshold_kernel(
    threshold_S,
    tiles_SN,
    bins_SB,
    max_SN,
    mass_SN,
    scratch_SV,
    logits_SV,
    rows_S,
    params_RP,
    size,
    row_stride,
    num_tiles,
    HAS_RULES: tl.constexpr,
    ALL_TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    SAMPLED: tl.constexpr,
    BINS: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(rows_S + s)
    temperature = float_param(params_RP, row, _TEMPERATURE)
    top_k = int_param(params_RP, row, _TOP_K)
    top_p = float_param(params_RP, row, _TOP_P)
    min_p = float_param(params_RP, row, _MIN_P)
    threshold = tl.full((), float("-inf"), tl.float32)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        t = tl.arange(0, ALL_TILES)
        top = tl.load(max_SN + s * num_tiles + t, mask=t < num_tiles, other=float("-inf"))
        peak = tl.max(top, 0)
        threshold = peak
        if (peak > float("-inf")) & (peak < float("inf")):
            tiles, bins, bin_ids = tiles_SN + s * ALL_TILES, bins_SB + s * BINS, tl.arange(0, BINS)
            within = tl.arange(0, TILE_SIZE)
            logits, scratch = logits_SV + s * row_stride, scratch_SV + s * size
            top_keys = _key(top)
            scale = _LOG2_E / temperature
            threshold = peak + temperature * tl.log(min_p)
            mass = tl.load(mass_SN + s * num_tiles + t, mask=t < num_tiles, other=0.0)
            total = tl.sum(mass * tl.exp2((top - peak) * scale), 0).to(tl.float64)
            fraction = tl.maximum(top_p - _SLACK, _SLACK / 10).to(tl.float64)

            # Bits that a converted logit doesn't have need not be searched, unless rules changed it.
            ruled = has_rules(params_RP, row, HAS_RULES)
            enough_bits = tl.where(ruled, 0, UNUSED_BITS)

            phase = tl.full((), _DONE, tl.int32)
            target = total * fraction
            if top_p < 1:
                phase = tl.where(threshold > float("-inf"), _WEIGHING, _CUTTING)
            # The answer lies in [low, high) of keys.
            low, high = _key(threshold), _key(peak) + 1
            guess = tl.full((), 1, tl.int32)
            if (top_k > 0) & (top_k < size):
                phase = tl.full((), _COUNTING, tl.int32)
                target = top_k.to(tl.float64)
                if top_k <= num_tiles:
                    # The upper 16 bits of the k-th largest maximum, rounded down.
                    kth = tl.full((), -(2**31), tl.int32)
                    step = tl.full((), 1 << 30, tl.int32)
                    if tl.sum((top_keys >= 0).to(tl.int32), 0) >= top_k:
                        kth = tl.full((), 0, tl.int32)
                    while step >= 1 << 16:
                        if tl.sum((top_keys >= kth + step).to(tl.int32), 0) >= top_k:
                            kth += step
                        step = step >> 1
                    low = tl.maximum(low, kth)
                    guess = tl.full((), 0, tl.int32)

            while phase != _DONE:
                counting = phase == _COUNTING
                # This pass looks at [from_key, to_key): the bracket, or a part that is likely to have the answer.
                from_key, to_key = low, high
                if phase == _WEIGHING:
                    to_key = low
                elif guess != 0:
                    reach = tl.sum((top_keys >= low).to(tl.int32), 0)
                    if reach > 4 * SAMPLED:
                        picked = tl.arange(0, SAMPLED) * (num_tiles // SAMPLED)
                        column = picked[:, None] * TILE_SIZE + within[None, :]
                        sample = load_logits(logits, scratch, column, column < size, ruled, HAS_RULES)
                        sample_weight = _weight(sample, peak, scale, counting)
                        sample_weight = tl.where(counting | (sample >= threshold), sample_weight, 0.0)
                        # Of what is small a sample tells the mass best, and all but that is above the answer.
                        below = tl.where(counting, size + 0.0, total.to(tl.float32)) - target.to(tl.float32)
                        below = below * SAMPLED / num_tiles
                        from_low = tl.maximum(tl.min(tl.where(sample > float("-inf"), sample, peak)), _number(low))
                        from_low = tl.where(counting, from_low, tl.maximum(from_low, peak - 40 * temperature))
                        from_high, to_low, to_high = peak, from_low, peak
                        for _ in range(12):
                            middle = (from_low + from_high) * 0.5
                            short = tl.sum(tl.where(sample < middle, sample_weight, 0.0)) < below * 0.9
                            from_low = tl.where(short, middle, from_low)
                            from_high = tl.where(short, from_high, middle)
                            middle = (to_low + to_high) * 0.5
                            short = tl.sum(tl.where(sample < middle, sample_weight, 0.0)) < below * 1.1
                            to_low = tl.where(short, middle, to_low)
                            to_high = tl.where(short, to_high, middle)
                        from_key = tl.minimum(tl.maximum(_key(from_low), low), high - 1)
                        to_key = tl.maximum(tl.minimum(_key(to_high) + 1, high), from_key + 1)
                guess = tl.full((), 0, tl.int32)

                # Bins of 2**shift keys cover the bracket. Widths are unsigned: they may exceed 2**31.
                width = to_key.to(tl.uint32, bitcast=True) - from_key.to(tl.uint32, bitcast=True)
                shift = tl.full((), 0, tl.int32)
                while (width >> shift.to(tl.uint32)) >= BINS:
                    shift += 1
                # Inside the bracket the largest weight is 2**30 units; one more bit might not be finite.
                unit_bits = 30 + tl.minimum(tl.maximum((peak - _number(to_key)) * scale, 0.0), 97.0)
                units = tl.exp2(tl.where(counting, 0.0, unit_bits))

                wanted = top_keys >= from_key
                count = wanted.to(tl.int32)
                tl.store(tiles + tl.cumsum(count, 0) - 1, t, mask=wanted)
                tl.store(bins + bin_ids, tl.zeros((BINS,), tl.int64))
                tl.debug_barrier()
                num_wanted = tl.sum(count, 0)
                above = tl.zeros((CHUNK,), tl.float64)
                for first in range(0, num_wanted, CHUNK):
                    i = first + tl.arange(0, CHUNK)
                    tile = tl.load(tiles + i, mask=i < num_wanted, other=num_tiles)
                    column = tile[:, None] * TILE_SIZE + within[None, :]
                    x = load_logits(logits, scratch, column, column < size, ruled, HAS_RULES)
                    weight = _weight(x, peak, scale, counting)
                    key = _key(x)
                    above += tl.sum(tl.where(key >= to_key, weight, 0.0), 1).to(tl.float64)
                    offset = key.to(tl.uint32, bitcast=True) - from_key.to(tl.uint32, bitcast=True)
                    _add_to_bins(bins, offset >> shift.to(tl.uint32), weight * units, offset < width, COMPILED)
                tl.debug_barrier()

                sure = tl.sum(above, 0)
                if phase == _WEIGHING:
                    total = sure
                    target = total * fraction
                    phase = tl.full((), _CUTTING, tl.int32)
                    guess = tl.full((), 1, tl.int32)
                else:
                    counts = tl.load(bins + bin_ids, cache_modifier=".cg")
                    at_least = sure + tl.cumsum(counts, 0, reverse=True).to(tl.float64) / units.to(tl.float64)
                    last = tl.sum((at_least >= target).to(tl.int32), 0) - 1
                    if sure >= target:
                        low = to_key
                    elif last < 0:
                        high = from_key
                    else:
                        low = (from_key.to(tl.uint32, bitcast=True) + (last.to(tl.uint32) << shift.to(tl.uint32))).to(
                            tl.int32, bitcast=True
                        )
                        left = to_key.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)
                        bin_width = tl.full((), 1, tl.uint32) << shift.to(tl.uint32)
                        high = (low.to(tl.uint32, bitcast=True) + tl.minimum(left, bin_width)).to(
                            tl.int32, bitcast=True
                        )
                        if shift <= enough_bits:
                            high = low
                    if high.to(tl.int64) - low.to(tl.int64) <= 1:  # found: the next round is the next filter's
                        threshold = tl.maximum(threshold, _number(low))
                        phase = tl.where(counting & (top_p < 1), _WEIGHING, _DONE)
                        low, high = _key(threshold), _key(peak) + 1
    tl.store(threshold_S + s, threshold)


def _threshold_triton(
    rows: RowLogits, max_SN: Tensor, mass_SN: Tensor, chunk: int = 64, sampled: int = 32, num_warps: int = 16
) -> Tensor:
    num_rows, size = rows.logits_SV.shape
    num_tiles = max_SN.shape[1]
    all_tiles = max(power_of_2(num_tiles), TILE)
    threshold_S = max_SN.new_empty(num_rows)
    tiles_SN = max_SN.new_empty(num_rows, all_tiles, dtype=torch.int32)
    bins_SB = max_SN.new_empty(num_rows, 2048, dtype=torch.int64)
    if num_rows:
        _threshold_kernel[(num_rows,)](
            threshold_S,
            tiles_SN,
            bins_SB,
            max_SN,
            mass_SN,
            rows.logits_SV if rows.scratch_SV is None else rows.scratch_SV,
            rows.logits_SV,
            rows.rows_S,
            rows.state.params_RP,
            size,
            rows.logits_SV.stride(0),
            num_tiles,
            HAS_RULES=rows.has_rules,
            ALL_TILES=all_tiles,
            CHUNK=chunk,
            SAMPLED=sampled,
            BINS=bins_SB.shape[1],
            UNUSED_BITS=_UNUSED_BITS.get(rows.logits_SV.dtype, 0),
            COMPILED=isinstance(_threshold_kernel, triton.JITFunction),
            num_warps=num_warps,
            **overlap(max_SN.device),
        )
    return threshold_S


def threshold(rows: RowLogits, max_SN: Tensor, mass_SN: Tensor) -> Tensor:
    """The smallest logit (with the rules applied) that each row's filters keep: float32 [S], -inf without filters.

    max_SN, mass_SN: of tile_stats, of the same rows. Rows without filters, and of temperature 0, leave at once.
    """
    if runs_triton(rows.logits_SV):
        return _threshold_triton(rows, max_SN, mass_SN)
    return threshold_reference(rows)
