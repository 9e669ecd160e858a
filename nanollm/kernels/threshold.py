"""min_p, top_k and top_p as one number a row: the smallest logit that is kept.

In vLLM's order: min_p keeps tokens of at least min_p × the largest probability; of those top_k keeps the k largest;
of those top_p keeps the smallest set of largest ones that has top_p of their mass. Each keeps a token if its logit is
large enough, so together they are a threshold. Ties are kept or dropped together: all tokens that equal the k-th
largest stay, and a token stays iff what is strictly larger has less mass than top_p, to within 1e-6, which is what
float32 sums are good for. The largest logit always stays.

On a GPU nothing is sorted. The answer is the largest threshold at or above which there is enough: k tokens, or enough
mass. It is looked for among integer keys that order as the floats do, in the first of these ways that does:

1. Where the tiles' maxima are enough by themselves, the answer is no lower. If few tiles reach what is left, they fit
   the registers of one program, which halves the range of keys until one is left.
2. Before the logits are read, a sample of them tells a bracket in which the answer likely lies, and tile_stats counts
   what is inside: in bins of 2**16 keys, which for bfloat16 is one value each. So the bins are the answer, or of
   other types which bin it is in. Counts are integers: their order doesn't matter, and a row is cut at the same place
   every time.
3. One program a row passes over the tiles, and a pass leaves a quarter of the keys: slow, but for few rows.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import replace

import torch
from torch import Tensor

from nanollm.kernels.backend import gdc_launch_dependents, gdc_wait, overlap, power_of_2, runs_triton, tl, triton
from nanollm.kernels.tile_stats import BIN, LOG2_E, TILE, TILE_SIZE, Guess, number_of
from nanollm.kernels.token_rules import RowLogits, as_logits, float_param, has_rules, int_param, load_logits
from nanollm.sampling_params import MIN_P, TEMPERATURE, TOP_K, TOP_P

SLACK = 1e-6  # masses this close to top_p count as equal to it
_SLACK = tl.constexpr(SLACK)
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = (tl.constexpr(column) for column in (TEMPERATURE, TOP_K, TOP_P, MIN_P))
# Keys of numbers that were converted from this type are multiples of 2 to this power.
_CELL_BITS = {torch.bfloat16: 16, torch.float16: 13}
BINS = 512
_BINS, _BIN, _RANGE = (tl.constexpr(value) for value in (BINS, BIN, BINS * BIN))
FEW = 64  # tiles that fit the registers of a program
_FEW = tl.constexpr(FEW)
_ERRORS = tl.constexpr(4.0)  # standard errors of a sample that a bracket allows for


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
    """int32 that order as the float32 numbers do; of both zeros 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def _key_up(x, cell):
    """The first multiple of cell that is no smaller than the key of x."""
    return (_key(x) + (cell - 1)) & -cell


@triton.jit(do_not_specialize_on_alignment=["bracket_2S", "rows_S"])
def _guess_kernel(
    bracket_2S, bins_BS, logits_SV, rows_S, params_RP, size, row_stride, num_tiles,
    SAMPLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    s, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(rows_S + s)
    temperature, top_k = float_param(params_RP, row, _TEMPERATURE), int_param(params_RP, row, _TOP_K)
    top_p = float_param(params_RP, row, _TOP_P)
    counting = (top_k > 0) & (top_k < size)
    from_key, to_key = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    if (temperature > 0) & tl.where(counting, top_k > _FEW, top_p < 1):
        # The whole sample tells the mass of all tokens; every fourth of its tiles is enough to tell where it lies.
        i = tl.arange(0, SAMPLED * TILE_SIZE)
        step = num_tiles // SAMPLED * TILE_SIZE
        column = i // TILE_SIZE * step + i % TILE_SIZE
        logits = logits_SV + s * row_stride
        all = as_logits(tl.load(logits + column, mask=column < size, other=float("-inf")))
        j = tl.arange(0, SAMPLED // 4 * TILE_SIZE)
        column = j // TILE_SIZE * (4 * step) + j % TILE_SIZE
        some = as_logits(tl.load(logits + column, mask=column < size, other=float("-inf")))
        peak, least = tl.max(all, 0), tl.min(tl.where(some > float("-inf"), some, float("inf")), 0)
        if (least < peak) & (peak < float("inf")):
            scale = tl.where(counting, 0.0, LOG2_E / temperature)
            weight = tl.where(all > float("-inf"), tl.exp2((all - peak) * scale), 0.0)
            mass = tl.sum(weight, 0) * 0.25
            error = _ERRORS * tl.sqrt(tl.sum(weight * weight, 0)) * 0.25 / mass
            above = top_k * (SAMPLED // 4 * TILE_SIZE / size)
            below = (1 - top_p) * mass / (1 + error)
            below = tl.where(counting, mass - above - _ERRORS * tl.sqrt(above) - 4, below)
            # Where few tokens have most of the mass, a sample rather misses them: more than twice the error.
            most_below = below * (1 + error) * (1 + error) * (1 + error * error)
            # At the answer all tokens together would weigh more than those below it do.
            bound = peak + tl.log2(below / (SAMPLED // 4 * TILE_SIZE)) / scale
            least = tl.where(counting, least, tl.maximum(bound, least))
            from_x, to_x, step_x = least, least, peak - least
            weight = tl.where(some > float("-inf"), tl.exp2((some - peak) * scale), 0.0)
            for _ in range(8):
                step_x *= 0.5
                less = tl.where(some < from_x + step_x, weight, 0.0)
                more = tl.where(some < to_x + step_x, weight, 0.0)
                less, more = tl.split(tl.sum(tl.join(less, more), 0))  # together: one barrier for both
                from_x += tl.where(less < below, step_x, 0.0)
                to_x += tl.where(more < most_below, step_x, 0.0)
            from_key, to_key = _key(from_x) & -_BIN, _key_up(to_x + step_x, _BIN) + _BIN
            # Of one sign: positive numbers, or if there are none, negative ones. And no more than the bins hold.
            from_key = tl.where((from_key <= 0) & (to_key > _BIN), _BIN, from_key)
            most = tl.minimum(from_key.to(tl.int64) + _RANGE, 0x7F800000).to(tl.int32)
            to_key = tl.where(counting, most, tl.minimum(to_key, most))
            to_key = tl.where((from_key <= 0) & (to_key > 0), 0, to_key)
            to_key = tl.maximum(from_key, to_key)
            bin = tl.arange(0, _BINS)
            tl.store(bins_BS + bin * num_rows + s, tl.zeros((_BINS,), tl.int32))
    tl.store(bracket_2S + s, from_key)
    tl.store(bracket_2S + num_rows + s, to_key)


@triton.jit
def _bisect(x, weight, target, low, high, cell):
    """The largest key at or above which the weights of x are enough, of low, low + cell, … below high; low if none."""
    while high.to(tl.int64) - low > cell:
        middle = low + (((high - low).to(tl.uint32, bitcast=True) >> 1).to(tl.int32) & -cell)
        enough = tl.sum(tl.where(x >= number_of(middle), weight, 0.0)) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _by_bins(from_key, to_key, count, above, peak, scale, target, low, high, cell):
    """low and high as near as the bins tell: a token may be any number of its bin. above: what larger ones weigh."""
    bin = tl.arange(0, _BINS)
    start = from_key + bin * _BIN
    inside = (start < to_key) & (count > 0)
    lightest = tl.exp2((number_of(start) - peak) * scale)
    heaviest = tl.exp2((number_of(start + (_BIN - cell)) - peak) * scale)
    at_least = above + tl.cumsum(tl.where(inside, count * lightest, 0.0).to(tl.float64), 0, reverse=True)
    at_most = above + tl.cumsum(tl.where(inside, count * heaviest, 0.0).to(tl.float64), 0, reverse=True)
    num_sure = tl.sum((at_least >= target).to(tl.int32), 0)
    num_maybe = tl.sum((at_most >= target).to(tl.int32), 0)
    if above >= target:
        low = tl.maximum(low, to_key)
    else:
        low = tl.where(num_sure > 0, tl.maximum(low, from_key + (num_sure - 1) * _BIN), low)
        high = tl.minimum(high, from_key + num_maybe * _BIN)
    return low, high


@triton.jit
def _load_few(tiles, first, num_wanted, logits, scratch, size, ruled, HAS_RULES: tl.constexpr):
    """The logits of FEW of the wanted tiles, [FEW, 128]; -inf for tiles that aren't there."""
    i = first + tl.arange(0, _FEW)
    tile = tl.load(tiles + i, mask=i < num_wanted, other=tl.cdiv(size, TILE_SIZE))
    column = tile[:, None] * TILE_SIZE + tl.arange(0, TILE_SIZE)[None, :]
    return load_logits(logits, scratch, column, column < size, ruled, HAS_RULES)


@triton.jit
def _sum_fours(x):
    """Sums of four neighbours, which are one thread's."""
    return tl.sum(x.reshape(_FEW, TILE_SIZE // 4, 4), 2)


@triton.jit
def _sums_from(
    a, b, c, tiles, num_wanted, logits, scratch, size, peak, scale, ruled, HAS_RULES: tl.constexpr
):  # fmt: skip
    """What all logits of the wanted tiles weigh that are at least a, b and c, which ascend."""
    from_a = tl.zeros((_FEW, TILE_SIZE // 4), tl.float32)
    from_b, from_c = from_a, from_a
    for first in range(0, num_wanted, _FEW):
        x = _load_few(tiles, first, num_wanted, logits, scratch, size, ruled, HAS_RULES)
        weight = tl.where(x >= a, tl.exp2((x - peak) * scale), 0.0)
        from_a += _sum_fours(weight)
        from_b += _sum_fours(tl.where(x >= b, weight, 0.0))
        from_c += _sum_fours(tl.where(x >= c, weight, 0.0))
    return tl.sum(from_a), tl.sum(from_b), tl.sum(from_c)


@triton.jit
def _search(
    low, high, cell, target, tiles, num_wanted, logits, scratch, size, peak, scale, ruled, HAS_RULES: tl.constexpr
):  # fmt: skip
    """As _bisect, over the wanted tiles in memory."""
    while high.to(tl.int64) - low > cell:
        step = tl.maximum(((high.to(tl.int64) - low) >> 2).to(tl.int32) & -cell, cell)
        a, b, c = low + step, low + 2 * step, low + 3 * step  # the last may be beyond high: there is not enough
        from_a, from_b, from_c = _sums_from(
            number_of(a), number_of(b), number_of(c), tiles, num_wanted, logits, scratch, size, peak, scale, ruled,
            HAS_RULES,
        )  # fmt: skip
        if from_b >= target:
            low = tl.where(from_c >= target, c, b)
            high = tl.where(from_c >= target, high, tl.minimum(c, high))
        else:
            high = tl.where(from_a >= target, tl.minimum(b, high), a)
            low = tl.where(from_a >= target, a, low)
    return low


@triton.jit(do_not_specialize_on_alignment=["threshold_S", "rows_S", "bracket_2S"])
def _threshold_kernel(
    threshold_S, tiles_SN, max_SN, mass_SN, above_SN, bins_BS, bracket_2S, scratch_SV, logits_SV, rows_S, params_RP,
    size, row_stride, num_tiles,
    HAS_RULES: tl.constexpr, GUESSES: tl.constexpr, ALL_TILES: tl.constexpr, CELL_BITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    s, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    row = tl.load(rows_S + s)
    temperature, top_k = float_param(params_RP, row, _TEMPERATURE), int_param(params_RP, row, _TOP_K)
    top_p, min_p = float_param(params_RP, row, _TOP_P), float_param(params_RP, row, _MIN_P)
    ruled = has_rules(params_RP, row, HAS_RULES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    threshold = tl.full((), float("-inf"), tl.float32)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        t = tl.arange(0, ALL_TILES)
        top = tl.load(max_SN + s * num_tiles + t, mask=t < num_tiles, other=float("-inf"))
        mass = tl.load(mass_SN + s * num_tiles + t, mask=t < num_tiles, other=0.0)
        peak = tl.max(top, 0)
        threshold = peak
        counting = (top_k > 0) & (top_k < size)
        if (peak > float("-inf")) & (peak < float("inf")):
            threshold = peak + temperature * tl.log(min_p)
        if (peak > float("-inf")) & (peak < float("inf")) & (counting | (top_p < 1)):
            logits, scratch, tiles = logits_SV + s * row_stride, scratch_SV + s * size, tiles_SN + s * ALL_TILES
            fraction = tl.maximum(top_p - _SLACK, _SLACK / 10)
            scale = LOG2_E / temperature
            total = tl.sum(mass * tl.exp2((top - peak) * scale), 0)
            cell = tl.where(ruled, 1, 1 << CELL_BITS)
            low, high = _key_up(threshold, cell), _key(peak) + cell
            total_is_known = threshold == float("-inf")
            # What one of each tile is enough for
            lowest = tl.min(tl.where(top > float("-inf"), top, peak), 0)
            weight = tl.exp2((tl.maximum(top, lowest) - peak) * tl.where(counting, 0.0, scale))
            weight = tl.where(top > float("-inf"), weight, 0.0)
            target = tl.where(counting, top_k.to(tl.float32), total * fraction)
            if (counting | total_is_known) & (tl.sum(weight, 0) >= target):
                low = tl.maximum(low, _bisect(top, weight, target, _key(lowest), high, cell))
            wanted = (top >= number_of(low)) & (t < num_tiles)
            num_wanted = tl.sum(wanted.to(tl.int32), 0)
            tl.store(tiles + tl.cumsum(wanted.to(tl.int32), 0) - 1, t, mask=wanted)
            tl.debug_barrier()
            if num_wanted <= _FEW:
                x = _load_few(tiles, 0, num_wanted, logits, scratch, size, ruled, HAS_RULES)
                if counting:
                    one = tl.where(x >= number_of(low), 1.0, 0.0)
                    low = _bisect(x, one, target, low, high, cell)
                    threshold = tl.maximum(threshold, number_of(low))
                if top_p < 1:
                    kept = tl.where(x >= threshold, tl.exp2((x - peak) * scale), 0.0)
                    known = total_is_known & (not counting)
                    enough = tl.where(known, total, tl.sum(kept)) * fraction
                    threshold = tl.maximum(threshold, number_of(_bisect(x, kept, enough, low, high, cell)))
            else:
                from_key, to_key = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
                count, above = tl.zeros((_BINS,), tl.float32), tl.full((), 0.0, tl.float64)
                if GUESSES:
                    from_key, to_key = tl.load(bracket_2S + s), tl.load(bracket_2S + num_rows + s)
                if to_key > from_key:
                    count = tl.load(bins_BS + tl.arange(0, _BINS) * num_rows + s).to(tl.float32)
                    above = tl.load(above_SN + s * num_tiles + t, mask=t < num_tiles, other=0.0)
                    above = tl.sum(above * tl.exp2((top - peak) * scale), 0).to(tl.float64)
                all_in_bins = (to_key > _key(peak)) & (from_key < to_key)
                if counting:
                    stop = high
                    if all_in_bins:
                        low, stop = _by_bins(from_key, to_key, count, 0.0, peak, 0.0, target, low, high, cell)
                    low = _search(
                        low, stop, cell, target, tiles, num_wanted, logits, scratch, size, peak, 0.0, ruled, HAS_RULES
                    )  # fmt: skip
                    threshold = tl.maximum(threshold, number_of(low))
                if top_p < 1:
                    if counting | (not total_is_known):
                        total, _, _ = _sums_from(
                            threshold, threshold, threshold, tiles, num_wanted, logits, scratch, size, peak, scale,
                            ruled, HAS_RULES,
                        )  # fmt: skip
                    enough = total * fraction
                    if to_key > from_key:
                        low, high = _by_bins(from_key, to_key, count, above, peak, scale, enough, low, high, cell)
                    low = _search(
                        low, high, cell, enough, tiles, num_wanted, logits, scratch, size, peak, scale, ruled, HAS_RULES
                    )  # fmt: skip
                    threshold = tl.maximum(threshold, number_of(low))
    tl.store(threshold_S + s, threshold)


def _guess_triton(rows: RowLogits, sampled: int = 128, num_warps: int = 8) -> Guess | None:
    num_rows, size = rows.logits_SV.shape
    num_tiles = -(-size // TILE)
    if num_tiles < 2 * sampled or not num_rows:
        return None
    bracket_2S, bins_BS = (rows.state.params_RP.new_empty(n, num_rows) for n in (2, BINS))
    _guess_kernel[(num_rows,)](
        bracket_2S,
        bins_BS,
        rows.logits_SV,
        rows.rows_S,
        rows.state.params_RP,
        size,
        rows.logits_SV.stride(0),
        num_tiles,
        SAMPLED=sampled,
        num_warps=num_warps,
        **overlap(bins_BS.device),
    )
    return Guess(bracket_2S, bins_BS, rows.logits_SV.new_empty(num_rows, num_tiles, dtype=torch.float32))


def guess_cuts(rows: RowLogits) -> Guess | None:
    """What makes tile_stats find more, which makes threshold quick; None where that isn't worth it."""
    return _guess_triton(rows) if runs_triton(rows.logits_SV) else None


def _threshold_triton(
    rows: RowLogits, max_SN: Tensor, mass_SN: Tensor, guess: Guess | None = None, num_warps: int = 16
) -> Tensor:
    num_rows, size = rows.logits_SV.shape
    num_tiles = max_SN.shape[1]
    all_tiles = max(power_of_2(num_tiles), TILE)
    threshold_S = max_SN.new_empty(num_rows)
    found = (max_SN, max_SN, rows.rows_S) if guess is None else (guess.above_SN, guess.bins_BS, guess.bracket_2S)
    if num_rows:
        _threshold_kernel[(num_rows,)](
            threshold_S,
            max_SN.new_empty(num_rows, all_tiles, dtype=torch.int32),
            max_SN,
            mass_SN,
            *found,
            rows.logits_SV if rows.scratch_SV is None else rows.scratch_SV,
            rows.logits_SV,
            rows.rows_S,
            rows.state.params_RP,
            size,
            rows.logits_SV.stride(0),
            num_tiles,
            HAS_RULES=rows.has_rules,
            GUESSES=guess is not None,
            ALL_TILES=all_tiles,
            CELL_BITS=_CELL_BITS.get(rows.logits_SV.dtype, 0),
            num_warps=num_warps,
            maxnreg=1024 // num_warps,  # two programs fit a multiprocessor, so 256 rows an H200
            **overlap(max_SN.device),
        )
    return threshold_S


def threshold(rows: RowLogits, max_SN: Tensor, mass_SN: Tensor, guess: Guess | None = None) -> Tensor:
    """The smallest logit (with the rules applied) that each row's filters keep: float32 [S], -inf without filters.

    max_SN, mass_SN: of tile_stats, of the same rows, and what it found of a guess. Rows without filters, and of
    temperature 0, leave at once. A guess changes nothing but the time it takes.
    """
    if runs_triton(rows.logits_SV):
        return _threshold_triton(rows, max_SN, mass_SN, guess)
    return threshold_reference(rows)
