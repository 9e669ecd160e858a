"""min_p, top_k and top_p as one number a row: the smallest logit that is kept.

In vLLM's order: min_p keeps tokens of at least min_p × the largest probability; of those top_k keeps the k largest;
of those top_p keeps the smallest set of largest ones that has top_p of their mass. Each keeps a token if its logit is
large enough, so together they are a threshold. Ties are kept or dropped together: all tokens that equal the k-th
largest stay, and a token stays iff what is strictly larger has less mass than top_p, to within 1e-6, which is what
float32 sums are good for. The largest logit always stays.

On a GPU nothing is sorted. The answer is the largest threshold at or above which there is enough: k tokens, or enough
mass. One program a row searches for it in a bracket of float32 bit patterns, which order as the numbers do:
each pass over the logits sums what is above the bracket, spreads what is inside over 2,048 bins, and the answer
lies in one bin. Two or three passes are enough for any float32 values, and one if the bracket holds few values of
a 16-bit type. A pass looks only at tiles whose largest logit reaches the bracket, and the search starts from a good
bracket: if the tiles' maxima are enough by themselves, it begins there; else a sample of the tiles says where to look.
A first pass that is long all the same is made by many programs a row, between two runs of the search.
Sums in bins are integers, so their order doesn't matter and a row is cut at the same place every time.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import replace

import torch
from torch import Tensor

from nanollm.kernels.backend import gdc_launch_dependents, gdc_wait, overlap, power_of_2, runs_triton, tl, triton
from nanollm.kernels.tile_stats import LARGEST, TILE, TILE_SIZE
from nanollm.kernels.token_rules import RowLogits, float_param, has_rules, int_param, load_logits
from nanollm.sampling_params import MIN_P, TEMPERATURE, TOP_K, TOP_P

SLACK = 1e-6  # masses this close to top_p count as equal to it
_LARGEST = tl.constexpr(LARGEST)
_SLACK, _LOG2_E = tl.constexpr(SLACK), tl.constexpr(1.4426950408889634)
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = (tl.constexpr(column) for column in (TEMPERATURE, TOP_K, TOP_P, MIN_P))
# float32 bits that are 0, or for negative numbers the same in all, in numbers that were converted from this type.
_UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13}
_COUNTING, _WEIGHING, _CUTTING, _DONE = (tl.constexpr(phase) for phase in range(4))
BINS = 2048
_BINS = tl.constexpr(BINS)
_MARGIN = tl.constexpr(0.09)  # how far a sample of 64 tiles may be off, relatively: 5 standard deviations if normal
# What a search that is interrupted for a long pass remembers, int64 words.
STATE_WORDS = 9
_POSTPONED, _ABOVE, _TOTAL, _PHASE, _LOW, _HIGH, _FROM, _TO, _PEAK = (tl.constexpr(i) for i in range(STATE_WORDS))
_STATE_WORDS = tl.constexpr(STATE_WORDS)


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
def _binning(from_key, to_key, peak, scale):
    """Bins of 2**shift keys cover [from_key, to_key): its width, shift, and into how many units a weight is cut."""
    # Widths are unsigned: they may exceed 2**31.
    width = to_key.to(tl.uint32, bitcast=True) - from_key.to(tl.uint32, bitcast=True)
    shift = tl.full((), 0, tl.uint32)
    while (width >> shift) >= _BINS:
        shift += 1
    # Inside the bracket the largest weight is 2**30 units; one more bit might not be finite.
    unit_bits = 30 + tl.minimum(tl.maximum((peak - _number(to_key)) * scale, 0.0), 97.0)
    return width, shift, tl.exp2(unit_bits)


@triton.jit
def _sum_and_bin(x, bins, from_key, to_key, shift, units, peak, scale, COMPILED: tl.constexpr):
    """Adds the weights of the x inside [from_key, to_key) to the bins; returns those of the larger x, 0 for the others.

    A weight is the token's probability relative to the largest; with a scale of 0 it is 1. -inf never counts.
    """
    weight = tl.exp2((x - peak) * scale)
    low, high = tl.maximum(_number(from_key), -_LARGEST), _number(to_key)
    if COMPILED:
        # Few are inside, and most warps jump over this. (tl.atomic_add would move everything through shared memory, to
        # a layout that it has no use for here.)
        tl.inline_asm_elementwise(
            """{
            .reg .pred %inside;
            .reg .b32 %key, %sign;
            .reg .f32 %share;
            .reg .b64 %at, %amount;
            setp.lt.f32 %inside, $1, $4;
            setp.ge.and.f32 %inside, $1, $3, %inside;
            @!%inside bra DONE;
            add.f32 %share, $1, 0f00000000;
            mov.b32 %key, %share;
            shr.s32 %sign, %key, 31;
            and.b32 %sign, %sign, 0x7FFFFFFF;
            xor.b32 %key, %key, %sign;
            sub.u32 %key, %key, $5;
            shr.u32 %key, %key, $6;
            mad.wide.u32 %at, %key, 8, $7;
            mul.f32 %share, $2, $8;
            cvt.rni.u64.f32 %amount, %share;
            red.relaxed.gpu.global.add.u64 [%at], %amount;
            DONE:
            mov.b32 $0, 0;
            }""",
            "=r,f,f,f,f,r,r,l,f",
            [x, weight, low, high, from_key, shift, bins.to(tl.int64), units],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        inside = (x >= low) & (x < high)
        offset = _key(x).to(tl.uint32, bitcast=True) - from_key.to(tl.uint32, bitcast=True)
        amount = (tl.where(inside, weight, 0.0) * units + 0.5).to(tl.int64)
        tl.atomic_add(bins + (offset >> shift), amount, mask=inside, sem="relaxed")
    return tl.where(x >= high, weight, 0.0)


@triton.jit(do_not_specialize_on_alignment=["threshold_S", "rows_S"])
def _threshold_kernel(
    threshold_S,
    state_SW,
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
    RESUMES: tl.constexpr,
    HAS_RULES: tl.constexpr,
    ALL_TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    SAMPLED: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, state = tl.load(rows_S + s), state_SW + s * _STATE_WORDS
    temperature = float_param(params_RP, row, _TEMPERATURE)
    top_k = int_param(params_RP, row, _TOP_K)
    top_p = float_param(params_RP, row, _TOP_P)
    min_p = float_param(params_RP, row, _MIN_P)
    has_filter = (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    threshold = tl.full((), float("-inf"), tl.float32)
    postponed = tl.full((), 0, tl.int32)
    if RESUMES:
        has_filter = tl.load(state + _POSTPONED) != 0
    if has_filter:
        t = tl.arange(0, ALL_TILES)
        top = tl.load(max_SN + s * num_tiles + t, mask=t < num_tiles, other=float("-inf"))
        peak = tl.max(top, 0)
        threshold = peak
        if (peak > float("-inf")) & (peak < float("inf")):
            tiles, bins, bin_ids = tiles_SN + s * ALL_TILES, bins_SB + s * _BINS, tl.arange(0, _BINS)
            within = tl.arange(0, TILE_SIZE)
            logits, scratch = logits_SV + s * row_stride, scratch_SV + s * size
            top_keys = _key(top)
            fraction = tl.maximum(top_p - _SLACK, _SLACK / 10).to(tl.float64)
            # Bits that a converted logit doesn't have need not be searched, unless rules changed it.
            ruled = has_rules(params_RP, row, HAS_RULES)
            enough_bits = tl.where(ruled, 0, UNUSED_BITS)
            guess = tl.full((), 1, tl.int32)
            if RESUMES:
                threshold = tl.load(threshold_S + s)
                total = tl.load(state + _TOTAL).to(tl.float64, bitcast=True)
                phase = tl.load(state + _PHASE).to(tl.int32)
                low, high = tl.load(state + _LOW).to(tl.int32), tl.load(state + _HIGH).to(tl.int32)
                from_key, to_key = tl.load(state + _FROM).to(tl.int32), tl.load(state + _TO).to(tl.int32)
                target = tl.where(phase == _COUNTING, top_k.to(tl.float64), total * fraction)
            else:
                threshold = peak + temperature * tl.log(min_p)
                mass = tl.load(mass_SN + s * num_tiles + t, mask=t < num_tiles, other=0.0)
                total = tl.sum(mass * tl.exp2((top - peak) * (_LOG2_E / temperature)), 0).to(tl.float64)
                phase = tl.full((), _DONE, tl.int32)
                if top_p < 1:
                    phase = tl.where(threshold > float("-inf"), _WEIGHING, _CUTTING)
                target = total * fraction
                # The answer lies in [low, high) of keys.
                low, high = _key(threshold), _key(peak) + 1
                if (top_k > 0) & (top_k < size):
                    phase = tl.full((), _COUNTING, tl.int32)
                    target = top_k.to(tl.float64)
                from_key, to_key = low, high
            resumed = tl.full((), RESUMES, tl.int32)

            while (phase != _DONE) & (postponed == 0):
                counting = phase == _COUNTING
                scale = tl.where(counting, 0.0, _LOG2_E / temperature)
                num_wanted = tl.full((), 0, tl.int32)
                if resumed == 0:
                    floor = tl.where(counting, -_LARGEST, threshold)
                    weight_of_top = tl.where(top >= floor, tl.exp2((top - peak) * scale), 0.0)
                    maxima_do = tl.sum(weight_of_top, 0) >= target
                    if (guess != 0) & (phase != _WEIGHING) & maxima_do:
                        # At or above `bound` the maxima alone are enough. Its upper 16 bits, rounded down.
                        bound = tl.full((), -(2**31), tl.int32)
                        step = tl.full((), 1 << 30, tl.int32)
                        if tl.sum(tl.where(top_keys >= 0, weight_of_top, 0.0), 0) >= target:
                            bound = tl.full((), 0, tl.int32)
                        while step >= 1 << 16:
                            if tl.sum(tl.where(top_keys >= bound + step, weight_of_top, 0.0), 0) >= target:
                                bound += step
                            step = step >> 1
                        low = tl.maximum(low, bound)
                        guess = tl.full((), 0, tl.int32)
                    # This pass looks at [from_key, to_key): the bracket, or a part that likely has the answer.
                    from_key, to_key = low, high
                    if phase == _WEIGHING:
                        to_key = low
                    elif (guess != 0) & (tl.sum((top_keys >= low).to(tl.int32), 0) > 4 * SAMPLED):
                        picked = tl.arange(0, SAMPLED) * (num_tiles // SAMPLED)
                        column = picked[:, None] * TILE_SIZE + within[None, :]
                        sample = load_logits(logits, scratch, column, column < size, ruled, HAS_RULES)
                        weight = tl.exp2((sample - peak) * scale)
                        weight = tl.where(sample >= floor, weight, 0.0)
                        # Of what is small a sample tells the mass best, and all but that is above the answer.
                        below = tl.where(counting, size + 0.0, total.to(tl.float32)) - target.to(tl.float32)
                        below = below * SAMPLED / num_tiles
                        from_low = tl.min(tl.where(sample > float("-inf"), sample, peak))
                        from_low = tl.maximum(from_low, _number(low))
                        from_low = tl.where(counting, from_low, tl.maximum(from_low, peak - 40 * temperature))
                        from_high, to_low, to_high = peak, from_low, peak
                        for _ in range(10):
                            middle = (from_low + from_high) * 0.5
                            short = tl.sum(tl.where(sample < middle, weight, 0.0)) < below * (1 - _MARGIN)
                            from_low = tl.where(short, middle, from_low)
                            from_high = tl.where(short, from_high, middle)
                            middle = (to_low + to_high) * 0.5
                            short = tl.sum(tl.where(sample < middle, weight, 0.0)) < below * (1 + _MARGIN)
                            to_low = tl.where(short, middle, to_low)
                            to_high = tl.where(short, to_high, middle)
                        from_key = tl.minimum(tl.maximum(_key(from_low), low), high - 1)
                        to_key = tl.maximum(tl.minimum(_key(to_high) + 1, high), from_key + 1)
                    guess = tl.full((), 0, tl.int32)
                    tl.store(bins + bin_ids, tl.zeros((_BINS,), tl.int64))
                    wanted = (top_keys >= from_key).to(tl.int32)
                    num_wanted = tl.sum(wanted, 0)
                    tl.store(tiles + tl.cumsum(wanted, 0) - 1, t, mask=wanted != 0)
                    tl.debug_barrier()
                    if not RESUMES:
                        postponed = (num_wanted > 2 * CHUNK).to(tl.int32)
                if postponed == 0:
                    width, shift, units = _binning(from_key, to_key, peak, scale)
                    if resumed != 0:
                        sure = tl.load(state + _ABOVE).to(tl.float64) / (1 << 40)
                    else:
                        above = tl.zeros((CHUNK,), tl.float64)
                        for first in range(0, num_wanted, CHUNK):
                            i = first + tl.arange(0, CHUNK)
                            tile = tl.load(tiles + i, mask=i < num_wanted, other=num_tiles)
                            column = tile[:, None] * TILE_SIZE + within[None, :]
                            x = load_logits(logits, scratch, column, column < size, ruled, HAS_RULES)
                            larger = _sum_and_bin(x, bins, from_key, to_key, shift, units, peak, scale, COMPILED)
                            above += tl.sum(larger, 1).to(tl.float64)
                        tl.debug_barrier()
                        sure = tl.sum(above, 0)
                    resumed = tl.full((), 0, tl.int32)
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
                            start = last.to(tl.uint32) << shift
                            high_by = tl.minimum(width - start, tl.full((), 1, tl.uint32) << shift)
                            low = from_key + start.to(tl.int32, bitcast=True)
                            high = low + high_by.to(tl.int32, bitcast=True)
                            if shift.to(tl.int32) <= enough_bits:
                                high = low
                        if high.to(tl.int64) - low.to(tl.int64) <= 1:  # found: what follows is the next filter's
                            threshold = tl.maximum(threshold, _number(low))
                            phase = tl.where(counting & (top_p < 1), _WEIGHING, _DONE)
                            low, high = _key(threshold), _key(peak) + 1
                    # This pass has read the bins: only now may the next one clear them.
                    tl.debug_barrier()
            if postponed != 0:
                tl.store(state + _ABOVE, tl.full((), 0, tl.int64))
                tl.store(state + _TOTAL, total.to(tl.int64, bitcast=True))
                tl.store(state + _PHASE, phase.to(tl.int64))
                tl.store(state + _LOW, low.to(tl.int64))
                tl.store(state + _HIGH, high.to(tl.int64))
                tl.store(state + _FROM, from_key.to(tl.int64))
                tl.store(state + _TO, to_key.to(tl.int64))
                tl.store(state + _PEAK, peak.to(tl.int32, bitcast=True).to(tl.int64))
    if RESUMES:
        if has_filter:
            tl.store(threshold_S + s, threshold)
    else:
        tl.store(state + _POSTPONED, postponed.to(tl.int64))
        tl.store(threshold_S + s, threshold)


@triton.jit(do_not_specialize_on_alignment=["rows_S"])
def _long_pass_kernel(
    state_SW,
    bins_SB,
    max_SN,
    scratch_SV,
    logits_SV,
    rows_S,
    params_RP,
    size,
    row_stride,
    num_tiles,
    HAS_RULES: tl.constexpr,
    TILES: tl.constexpr,
    COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):
    s, part, num_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    state = state_SW + s * _STATE_WORDS
    if tl.load(state + _POSTPONED) != 0:
        row = tl.load(rows_S + s)
        scale = _LOG2_E / float_param(params_RP, row, _TEMPERATURE)
        scale = tl.where(tl.load(state + _PHASE) == _COUNTING, 0.0, scale)
        from_key, to_key = tl.load(state + _FROM).to(tl.int32), tl.load(state + _TO).to(tl.int32)
        peak = tl.load(state + _PEAK).to(tl.int32).to(tl.float32, bitcast=True)
        _, shift, units = _binning(from_key, to_key, peak, scale)
        ruled = has_rules(params_RP, row, HAS_RULES)
        logits, scratch = logits_SV + s * row_stride, scratch_SV + s * size
        above = tl.zeros((TILES,), tl.float32)
        for first in range(part * TILES, num_tiles, num_parts * TILES):
            # Last tiles first: of what tile_stats read, those are still in the cache.
            tile = num_tiles - 1 - first - tl.arange(0, TILES)
            top = tl.load(max_SN + s * num_tiles + tile, mask=tile >= 0, other=float("-inf"))
            column = tile[:, None] * TILE_SIZE + tl.arange(0, TILE_SIZE)[None, :]
            mask = (column < size) & (_key(top) >= from_key)[:, None] & (tile >= 0)[:, None]
            x = load_logits(logits, scratch, column, mask, ruled, HAS_RULES)
            above += tl.sum(
                _sum_and_bin(x, bins_SB + s * _BINS, from_key, to_key, shift, units, peak, scale, COMPILED), 1
            )
        tl.atomic_add(state + _ABOVE, (tl.sum(above) * float(1 << 40)).to(tl.int64), sem="relaxed")


def _threshold_triton(
    rows: RowLogits,
    max_SN: Tensor,
    mass_SN: Tensor,
    chunk: int = 32,
    sampled: int = 64,
    tiles: int = 32,
    parts: int = 8,
    num_warps: int = 8,
) -> Tensor:
    num_rows, size = rows.logits_SV.shape
    num_tiles = max_SN.shape[1]
    all_tiles = max(power_of_2(num_tiles), TILE)
    threshold_S = max_SN.new_empty(num_rows)
    state_SW = max_SN.new_empty(num_rows, STATE_WORDS, dtype=torch.int64)
    tiles_SN = max_SN.new_empty(num_rows, all_tiles, dtype=torch.int32)
    bins_SB = max_SN.new_empty(num_rows, BINS, dtype=torch.int64)
    scratch_SV = rows.logits_SV if rows.scratch_SV is None else rows.scratch_SV
    logits = (scratch_SV, rows.logits_SV, rows.rows_S, rows.state.params_RP, size, rows.logits_SV.stride(0), num_tiles)
    common = {
        "HAS_RULES": rows.has_rules,
        "COMPILED": isinstance(_threshold_kernel, triton.JITFunction),
        **overlap(max_SN.device),
    }

    def search(*, resumes: bool) -> None:
        _threshold_kernel[(num_rows,)](
            threshold_S,
            state_SW,
            tiles_SN,
            bins_SB,
            max_SN,
            mass_SN,
            *logits,
            RESUMES=resumes,
            ALL_TILES=all_tiles,
            CHUNK=chunk,
            SAMPLED=sampled,
            UNUSED_BITS=_UNUSED_BITS.get(rows.logits_SV.dtype, 0),
            num_warps=num_warps,
            maxnreg=65536
            // 2
            // (32 * num_warps),  # two programs fit a multiprocessor: so 256 rows fit an H200 at once
            **common,
        )

    if num_rows:
        search(resumes=False)
        _long_pass_kernel[(num_rows, parts)](state_SW, bins_SB, max_SN, *logits, TILES=tiles, num_warps=4, **common)
        search(resumes=True)
    return threshold_S


def threshold(rows: RowLogits, max_SN: Tensor, mass_SN: Tensor) -> Tensor:
    """The smallest logit (with the rules applied) that each row's filters keep: float32 [S], -inf without filters.

    max_SN, mass_SN: of tile_stats, of the same rows. Rows without filters, and of temperature 0, leave at once.
    """
    if runs_triton(rows.logits_SV):
        return _threshold_triton(rows, max_SN, mass_SN)
    return threshold_reference(rows)
