"""min_p, top_k and top_p as one number a row: the smallest logit that is kept.

In vLLM's order: min_p keeps tokens of at least min_p × the largest probability; of those top_k keeps the k largest;
of those top_p keeps the smallest set of largest ones that has top_p of their mass. Each keeps a token if its logit is
large enough, so together they are a threshold. Ties are kept or dropped together: all tokens that equal the k-th
largest stay, and a token stays iff what is strictly larger has less mass than top_p, to within 1e-6, which is what
float32 sums are good for. The largest logit always stays.

On a GPU nothing is sorted. The answer is the largest threshold at or above which there is enough: k tokens, or enough
mass. It is looked for among the keys of kernels.histogram, in the first of these ways that does:

1. What kernels.tile_stats counted tells in which bin it lies; for bfloat16 that is one value.
2. If few tiles reach what is left (where nothing was counted, what the tiles' maxima leave), they fit the registers of
   one program, which halves the range of keys until one is left.
3. One program a row passes over the tiles, and a pass leaves a quarter of the keys: slow, so for what is left, such as
   rows of float32, or with rules, whose bins hold many values. The draw, a program a row too, does this.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanollm.kernels.backend import gdc_launch_dependents, gdc_wait, overlap, power_of_2, runs_triton, tl, triton
from nanollm.kernels.histogram import BIN, FARTHEST, NEAREST, NUM_BINS, first_key, key_of, number_of
from nanollm.kernels.tile_stats import LOG2_E, TILE, TILE_SIZE
from nanollm.kernels.token_rules import (
    RowLogits,
    changes_logits,
    float_param,
    int_param,
    load_logits,
    load_stored,
    source_of,
)
from nanollm.sampling_params import MIN_P, TEMPERATURE, TOP_K, TOP_P

SLACK = 1e-6  # masses this close to top_p count as equal to it
_SLACK = tl.constexpr(SLACK)
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = (tl.constexpr(column) for column in (TEMPERATURE, TOP_K, TOP_P, MIN_P))
FEW = 64  # tiles that fit the registers of a program
_FEW, _GROUP, _BEYOND = tl.constexpr(FEW), tl.constexpr(16), tl.constexpr(1 << 23)  # a tile that isn't there
# What is known of a row that the draw must settle, int32 words: whether it is one (1, or 2 if the total is known), the
# least key of the tiles that matter, the keys [LOW, STOP) of the k-th largest and [FROM, TO) of top_p's answer, and the
# bits of the largest logit and of the total mass.
STATE_WORDS = 8
_OPEN, _WANTED, _LOW, _STOP, _FROM, _TO, _PEAK, _TOTAL = (tl.constexpr(i) for i in range(STATE_WORDS))
STATE_SIZE = tl.constexpr(STATE_WORDS)


@dataclass
class Limits:
    """threshold_S: float32, the smallest logit that each row's filters keep; of some rows only once draw has been
    given these limits. state_SW: int32, for draw."""

    threshold_S: Tensor
    state_SW: Tensor | None = None


def cell_bits(rows: RowLogits) -> int:
    """Keys of logits that no rule changed are multiples of 2 to this power."""
    return {torch.bfloat16: 16, torch.float16: 13}.get(rows.raw_dtype or rows.logits_SV.dtype, 0)


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
def _key_up(x, cell):
    """The first multiple of cell that is no smaller than the key of x."""
    return (key_of(x) + (cell - 1)) & -cell


@triton.jit
def _is_wider(low, high, width):
    """Whether the keys from low to below high are more than this."""
    return high.to(tl.int64) - low > width


@triton.jit
def _bisect(x, weight, target, low, high, cell):
    """The largest key at or above which the weights of x are enough, of low, low + cell, … below high; low if none."""
    while _is_wider(low, high, cell):
        middle = low + (((high - low).to(tl.uint32, bitcast=True) >> 1).to(tl.int32) & -cell)
        enough = tl.sum(tl.where(x >= number_of(middle), weight, 0.0)) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _bins():
    """The bins' numbers [groups, 16]: a group is one thread's, or its neighbours' too."""
    return tl.arange(0, NUM_BINS // _GROUP)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]


@triton.jit
def _counted(counts, num_parts):
    """Tokens in each bin of a row, float32."""
    count = tl.zeros((NUM_BINS // _GROUP, _GROUP), tl.int32)
    for part in tl.range(num_parts, loop_unroll_factor=4):
        count += tl.load(counts + part * NUM_BINS + _bins())
    return count.to(tl.float32)


@triton.jit
def _num_enough(weight, target):
    """How many of the bins, from the lowest on, have enough at or above them: first of the groups, then of one."""
    at_least = tl.cumsum(tl.sum(weight, 1).to(tl.float64), 0, reverse=True)
    num_groups = tl.sum((at_least >= target).to(tl.int32), 0)
    above = tl.max(tl.where(at_least >= target, 0.0, at_least), 0)
    last = tl.sum(tl.where(_bins() // _GROUP == num_groups - 1, weight, 0.0), 0)
    num_in_last = tl.sum((tl.cumsum(last.to(tl.float64), 0, reverse=True) + above >= target).to(tl.int32), 0)
    return tl.where(num_groups > 0, (num_groups - 1) * _GROUP + tl.maximum(num_in_last, 1), 0)


@triton.jit
def _by_bins(count, is_exact, peak, scale, target, low, high, cell):
    """low and high as near as the bins tell: a token may be any number of its bin. Of the lowest they tell nothing."""
    bin = _bins()
    lightest = tl.where((count > 0) & (bin > 0), count * tl.exp2((number_of(first_key(bin)) - peak) * scale), 0.0)
    num_sure = _num_enough(lightest, target)
    num_maybe = num_sure
    if not is_exact:
        heaviest = tl.exp2((number_of(first_key(bin + 1) - cell) - peak) * scale)
        num_maybe = _num_enough(tl.where(count > 0, count * heaviest, 0.0), target)
    low = tl.where(num_sure > 0, tl.maximum(low, first_key(num_sure - 1)), low)
    return low, tl.minimum(high, first_key(tl.maximum(num_maybe, 1)))


@triton.jit
def _few(tiles, first, num_wanted):
    """The columns of FEW of the wanted tiles, [FEW, 128]; beyond the vocabulary for tiles that aren't there."""
    i = first + tl.arange(0, _FEW)
    tile = tl.load(tiles + i, mask=i < num_wanted, other=_BEYOND).to(tl.int32)
    return tile[:, None] * TILE_SIZE + tl.arange(0, TILE_SIZE)[None, :]


@triton.jit
def _sum_fours(x):
    """Sums of four neighbours, which are one thread's."""
    return tl.sum(x.reshape(_FEW, TILE_SIZE // 4, 4), 2)


@triton.jit
def _sums_from(a, b, c, tiles, num_wanted, source, peak, scale):
    """What all logits of the wanted tiles weigh that are at least a, b and c, which ascend."""
    from_a = tl.zeros((_FEW, TILE_SIZE // 4), tl.float32)
    from_b, from_c = from_a, from_a
    for first in range(0, num_wanted, _FEW):
        x = load_stored(source, _few(tiles, first, num_wanted))
        weight = tl.where(x >= a, tl.exp2((x - peak) * scale), 0.0)
        from_a += _sum_fours(weight)
        from_b += _sum_fours(tl.where(x >= b, weight, 0.0))
        from_c += _sum_fours(tl.where(x >= c, weight, 0.0))
    return tl.sum(from_a), tl.sum(from_b), tl.sum(from_c)


@triton.jit
def _find(found, a, b, tiles, num_wanted, source, peak, scale, ROOM: tl.constexpr):
    """Leaves the logits of the wanted tiles from a to below b in found, if they are no more than ROOM. Returns how many
    they are, and what all that are at least b weigh."""
    count, from_b = tl.full((), 0, tl.int32), tl.zeros((_FEW, TILE_SIZE // 4), tl.float32)
    tl.debug_barrier()
    for first in range(0, num_wanted, _FEW):
        x = load_stored(source, _few(tiles, first, num_wanted))
        from_b += _sum_fours(tl.where(x >= b, tl.exp2((x - peak) * scale), 0.0))
        inside = ((x >= a) & (x < b)).to(tl.int32)
        in_tile = tl.sum(inside, 1)  # places are in the order of the tokens, so that sums are the same every time
        place = count + (tl.cumsum(in_tile, 0) - in_tile)[:, None] + tl.cumsum(inside, 1) - 1
        place = tl.where((inside > 0) & (place < ROOM), place, ROOM).to(tl.int64)
        # As one number in any order, so that nothing moves between threads.
        both = place << 32 | x.to(tl.uint32, bitcast=True)
        both = tl.reshape(both, (_FEW * TILE_SIZE,), can_reorder=True)
        tl.store(found + (both >> 32), both.to(tl.int32).to(tl.float32, bitcast=True), mask=(both >> 32) < ROOM)
        count += tl.sum(in_tile, 0)
    tl.debug_barrier()
    return count, tl.sum(from_b)


@triton.jit
def _search(low, high, cell, target, found, tiles, num_wanted, source, peak, scale, ROOM: tl.constexpr):
    """As _bisect, over the wanted tiles in memory."""
    count = tl.where(_is_wider(low, high, BIN), ROOM + 1, 0)  # of more than a bin, many
    while _is_wider(low, high, cell):
        if count > ROOM:
            step = tl.maximum(((high.to(tl.int64) - low) >> 2).to(tl.int32) & -cell, cell)
            a, b, c = low + step, low + 2 * step, low + 3 * step  # the last may be beyond high: there is not enough
            from_a, from_b, from_c = _sums_from(
                number_of(a), number_of(b), number_of(c), tiles, num_wanted, source, peak, scale
            )
            if from_b >= target:
                low = tl.where(from_c >= target, c, b)
                high = tl.where(from_c >= target, high, tl.minimum(c, high))
            else:
                high = tl.where(from_a >= target, tl.minimum(b, high), a)
                low = tl.where(from_a >= target, a, low)
        if _is_wider(low, high, cell):
            count, from_high = _find(
                found, number_of(low), number_of(high), tiles, num_wanted, source, peak, scale, ROOM
            )
            if count <= ROOM:
                i = tl.arange(0, ROOM)
                x = tl.load(found + i, mask=i < count, other=float("-inf"))
                low = _bisect(x, tl.exp2((x - peak) * scale), target - from_high, low, high, cell)
                high = low + cell
    return low


@triton.jit
def _list_wanted(tiles, top, low, num_tiles):
    """Writes down the tiles that reach low, and returns how many they are."""
    t = tl.arange(0, top.shape[0])
    wanted = ((top >= number_of(low)) & (top > float("-inf")) & (t < num_tiles)).to(tl.int32)
    tl.debug_barrier()
    tl.store(tiles + tl.cumsum(wanted, 0) - 1, t, mask=wanted > 0)
    tl.debug_barrier()
    return tl.sum(wanted, 0)


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=["threshold_S", "rows_S"])
def _threshold_kernel(
    threshold_S, state_SW, tiles_SN, max_SN, mass_SN, counts_SPB, scratch_SV, logits_SV, rows_S, params_RP,
    masks_RW, size, row_stride, masks_stride, num_tiles, num_parts,
    HAS_RULES: tl.constexpr, ALL_TILES: tl.constexpr, CELL_BITS: tl.constexpr, COUNTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_S + s)
    temperature, top_k = float_param(params_RP, row, _TEMPERATURE), int_param(params_RP, row, _TOP_K)
    top_p, min_p = float_param(params_RP, row, _TOP_P), float_param(params_RP, row, _MIN_P)
    source = source_of(s, row, size, logits_SV, row_stride, scratch_SV, masks_RW, masks_stride, params_RP, HAS_RULES)
    tiles, state = tiles_SN + s * ALL_TILES, state_SW + s * STATE_SIZE
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    threshold, open = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        # All at once: one wait for memory.
        t, counting = tl.arange(0, ALL_TILES), (top_k > 0) & (top_k < size)
        top = tl.load(max_SN + s * num_tiles + t, mask=t < num_tiles, other=float("-inf"))
        mass = tl.load(mass_SN + s * num_tiles + t, mask=t < num_tiles, other=0.0)
        if COUNTS:
            count = _counted(
                counts_SPB + s * num_parts * NUM_BINS, tl.where(counting | (top_p < 1), num_parts, 0)
            )  # fmt: skip
        peak = tl.max(top, 0)
        threshold = peak
        if (peak > float("-inf")) & (peak < float("inf")):
            threshold = peak + temperature * tl.log(min_p)
            if counting | (top_p < 1):
                scale, fraction = LOG2_E / temperature, tl.maximum(top_p - _SLACK, _SLACK / 10)
                total = tl.sum(tl.where(top > float("-inf"), mass * tl.exp2((top - peak) * scale), 0.0), 0)
                total_is_known = (threshold == float("-inf")) & (not counting)
                cell = tl.where(changes_logits(params_RP, row), 1, 1 << CELL_BITS)
                low, high = _key_up(threshold, cell), key_of(peak) + cell
                stop = tl.where(counting, high, low + cell)  # of the k-th largest; without top_k it is found
                start, end = low, high  # of top_p's answer
                if COUNTS and (tl.abs(peak) < FARTHEST):
                    is_exact = (cell == BIN) & (scale < 8)  # if so, what differs within 2**-24 of zero weighs the same
                    if counting:
                        low, stop = _by_bins(count, is_exact, peak, 0.0, top_k.to(tl.float32), low, stop, cell)
                    if top_p < 1:
                        # Where low is the first key of a bin of one value:
                        is_first = (tl.abs(number_of(low)) > NEAREST) & (tl.abs(number_of(low)) < FARTHEST)
                        if is_exact & is_first & (not total_is_known) & (not _is_wider(low, stop, cell)):
                            weight = tl.exp2((number_of(first_key(_bins())) - peak) * scale)
                            total = tl.sum(tl.where((count > 0) & (first_key(_bins()) >= low), count * weight, 0.0))
                            total_is_known = is_exact
                        if total_is_known:
                            start, end = _by_bins(count, is_exact, peak, scale, total * fraction, low, end, cell)
                elif counting & (top_k <= _FEW):  # what one of each tile is enough for; of many it leaves many tiles
                    one, lowest = tl.where(top > float("-inf"), 1.0, 0.0), tl.where(top > float("-inf"), top, peak)
                    if tl.sum(one, 0) >= top_k:
                        low = tl.maximum(low, _bisect(top, one, top_k, key_of(tl.min(lowest, 0)), high, cell))
                if _is_wider(low, stop, cell) | ((top_p < 1) & _is_wider(start, end, cell)):
                    # Of what top_p is to cut, all matters as long as it isn't known what that weighs.
                    from_key = tl.where(total_is_known, tl.maximum(low, start), low)
                    num_wanted = _list_wanted(tiles, top, from_key, num_tiles)
                    if num_wanted <= _FEW:
                        x = load_logits(source, _few(tiles, 0, num_wanted))
                        low = _bisect(x, tl.where(x > float("-inf"), 1.0, 0.0), top_k, low, stop, cell)
                        if top_p < 1:
                            weight = tl.where(x >= number_of(low), tl.exp2((x - peak) * scale), 0.0)
                            enough = tl.where(total_is_known, total, tl.sum(weight)) * fraction
                            start = _bisect(x, weight, enough, tl.maximum(low, start), end, cell)
                    else:
                        open = tl.where(total_is_known, 2, 1)
                        tl.store(state + _WANTED, from_key)
                        tl.store(state + _LOW, low)
                        tl.store(state + _STOP, stop)
                        tl.store(state + _FROM, start)
                        tl.store(state + _TO, end)
                        tl.store(state + _PEAK, peak.to(tl.int32, bitcast=True))
                        tl.store(state + _TOTAL, total.to(tl.int32, bitcast=True))
                threshold = tl.maximum(threshold, number_of(tl.where(top_p < 1, tl.maximum(low, start), low)))
    tl.store(state + _OPEN, open)
    tl.store(threshold_S + s, threshold)


@triton.jit
def settled(threshold, tiles, state, top, source, params_RP, row, num_tiles, CELL_BITS: tl.constexpr):
    """A row's threshold, after more passes over its logits if it was left open. Pointers are to what the row has; tiles
    to room for two int32 for each element of top."""
    open = tl.load(state + _OPEN)
    if open > 0:
        found = (tiles + top.shape[0]).to(tl.pointer_type(tl.float32), bitcast=True)
        temperature, top_k = float_param(params_RP, row, _TEMPERATURE), int_param(params_RP, row, _TOP_K)
        top_p, cell = float_param(params_RP, row, _TOP_P), tl.where(changes_logits(params_RP, row), 1, 1 << CELL_BITS)
        peak = tl.load(state + _PEAK).to(tl.float32, bitcast=True)
        total = tl.load(state + _TOTAL).to(tl.float32, bitcast=True)
        num_wanted = _list_wanted(tiles, top, tl.load(state + _WANTED), num_tiles)
        logits, scratch, masks, in_scratch, is_masked, size = source
        if is_masked:  # once for all passes
            for first in range(0, num_wanted, _FEW):
                column = _few(tiles, first, num_wanted)
                tl.store(scratch + column, load_logits(source, column), mask=column < size)
            tl.debug_barrier()
        source = logits, scratch, masks, in_scratch | is_masked, is_masked, size
        low = _search(
            tl.load(state + _LOW), tl.load(state + _STOP), cell, top_k.to(tl.float32), found, tiles, num_wanted, source,
            peak, 0.0, top.shape[0],
        )  # fmt: skip
        if top_p < 1:
            scale = LOG2_E / temperature
            if open == 1:
                least = number_of(low)
                total, _, _ = _sums_from(least, float("inf"), float("inf"), tiles, num_wanted, source, peak, scale)
            low, target = tl.maximum(low, tl.load(state + _FROM)), total * tl.maximum(top_p - _SLACK, _SLACK / 10)
            low = _search(
                low, tl.load(state + _TO), cell, target, found, tiles, num_wanted, source, peak, scale, top.shape[0]
            )  # fmt: skip
        threshold = peak + temperature * tl.log(float_param(params_RP, row, _MIN_P))  # not what an earlier draw left
        threshold = tl.maximum(threshold, number_of(low))
    return threshold


def _threshold_triton(rows: RowLogits, max_SN: Tensor, mass_SN: Tensor, num_warps: int = 0) -> Limits:
    num_rows, size = rows.logits_SV.shape
    num_tiles = max_SN.shape[1]
    ints, counts = rows.state.params_RP.new_empty, rows.counts_SPB
    limits = Limits(max_SN.new_empty(num_rows), ints(num_rows, STATE_WORDS))
    all_tiles = max(power_of_2(num_tiles), TILE)
    num_warps = num_warps or (16 if counts is None else 8)
    if num_rows:
        _threshold_kernel[(num_rows,)](
            limits.threshold_S,
            limits.state_SW,
            ints(num_rows, all_tiles),
            max_SN,
            mass_SN,
            max_SN if counts is None else counts,
            rows.logits_SV if rows.scratch_SV is None else rows.scratch_SV,
            rows.logits_SV,
            rows.rows_S,
            rows.state.params_RP,
            rows.state.masks_RW,
            size,
            rows.logits_SV.stride(0),
            rows.state.masks_RW.stride(0),
            num_tiles,
            0 if counts is None else counts.shape[1],
            HAS_RULES=rows.has_rules,
            ALL_TILES=all_tiles,
            CELL_BITS=cell_bits(rows),
            COUNTS=counts is not None,
            num_warps=num_warps,
            maxnreg=1024 // num_warps,  # two programs fit a multiprocessor, so 256 rows an H200
            **overlap(max_SN.device),
        )
    return limits


def threshold(rows: RowLogits, max_SN: Tensor, mass_SN: Tensor) -> Limits:
    """Returns Limits: the smallest logit (with the rules applied) that each row's filters keep, -inf without filters.

    max_SN, mass_SN: of tile_stats, of the same rows; it's quick where that has left counts, or few tiles matter. Rows
    without filters, and of temperature 0, leave at once.
    """
    if runs_triton(rows.logits_SV):
        return _threshold_triton(rows, max_SN, mass_SN)
    return Limits(threshold_reference(rows))
