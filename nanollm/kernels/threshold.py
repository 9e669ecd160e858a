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
2. The tiles' masses tell what all weigh, and a sample of the logits where about the right part of that lies: in a
   bracket with about one logit in a hundred. A second pass over the logits sums what is above the bracket and counts
   what is inside, in bins of 2**16 keys, which for bfloat16 is one value each. Counts are integers: their order
   doesn't matter, and a row is cut at the same place every time.
3. One program a row passes over the tiles, and a pass leaves a quarter of the keys: slow, so for what is left: rows
   whose bracket missed, that have min_p and top_p, or whose bins hold many values (of float32, or with rules).

The draw, a program a row too, does what is left to do after the second pass.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanollm.kernels.backend import gdc_launch_dependents, gdc_wait, overlap, power_of_2, runs_triton, tl, triton
from nanollm.kernels.tile_stats import LOG2_E, TILE, TILE_SIZE
from nanollm.kernels.token_rules import RowLogits, as_float, float_param, has_rules, int_param, load_logits
from nanollm.sampling_params import MIN_P, TEMPERATURE, TOP_K, TOP_P

SLACK = 1e-6  # masses this close to top_p count as equal to it
_SLACK = tl.constexpr(SLACK)
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = (tl.constexpr(column) for column in (TEMPERATURE, TOP_K, TOP_P, MIN_P))
# Keys of numbers that were converted from this type are multiples of 2 to this power.
CELL_BITS = {torch.bfloat16: 16, torch.float16: 13}
BINS, BIN_BITS = 256, 16  # a bin holds two to this power of keys
NUM_BINS, _BIN_BITS, _BIN = (tl.constexpr(value) for value in (BINS, BIN_BITS, 1 << BIN_BITS))
FEW = 64  # tiles that fit the registers of a program
_FEW = tl.constexpr(FEW)
PIECE = 32  # neighbours that a sample takes together
_PIECE, _RATIO = tl.constexpr(PIECE), tl.constexpr(4)
_ERRORS = tl.constexpr(4.5)  # standard errors of a sample that a bracket allows for
# What is known of a row that the draw must settle, int32 words: whether it is one, the bracket [FROM, TO) if TO is
# more, the least key that the answer may have, and the bits of the largest logit, of the total mass, and of what makes
# logits powers of two (0 where tokens are counted, which weigh 1); and whether the row has rules.
STATE_WORDS = 8
_OPEN, _FROM, _TO, _LOW, _PEAK, _TOTAL, _SCALE, _RULED = (tl.constexpr(i) for i in range(STATE_WORDS))
STATE_SIZE = tl.constexpr(STATE_WORDS)


@dataclass
class Limits:
    """threshold_S: float32, the smallest logit that each row's filters keep; of some rows only once draw has been
    given these limits. state_SW, bins_SB (int32), above_SP (float32, a part's mass above the bracket): for draw."""

    threshold_S: Tensor
    state_SW: Tensor | None = None
    bins_SB: Tensor | None = None
    above_SP: Tensor | None = None


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
def _number_of(key):
    """The inverse of _key."""
    magnitude = tl.where(key < 0, -key, key)
    return (magnitude | (key & -(2**31))).to(tl.float32, bitcast=True)


@triton.jit
def _key_up(x, cell):
    """The first multiple of cell that is no smaller than the key of x."""
    return (_key(x) + (cell - 1)) & -cell


@triton.jit
def _sample(logits, scratch, size, ruled, PIECES: tl.constexpr, HAS_RULES: tl.constexpr):
    """PIECES * PIECE of the row's logits, from all over it."""
    i = tl.arange(0, PIECES * _PIECE)
    column = i // _PIECE * (size // _PIECE) // PIECES * _PIECE + i % _PIECE
    return load_logits(logits, scratch, column, column < size, ruled, HAS_RULES)


@triton.jit
def _samples(logits, scratch, size, ruled, PIECES: tl.constexpr, HAS_RULES: tl.constexpr):
    """A sample and a smaller one; of that how many are not -inf, the least and the largest."""
    all = _sample(logits, scratch, size, ruled, PIECES, HAS_RULES)
    some = _sample(logits, scratch, size, ruled, PIECES // _RATIO, HAS_RULES)
    is_finite = some > float("-inf")
    least = tl.min(tl.where(is_finite, some, float("inf")), 0)
    return all, some, tl.sum(is_finite.to(tl.float32), 0), least, tl.max(some, 0)


@triton.jit
def _sum_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _bracket(all, some, num_finite, least, highest, peak, total, scale, counting, top_k, top_p, size):
    """[from_key, to_key) in which the samples say that the answer lies."""
    # What is small tells least of the mass, so the mass below the answer is known best; and of tokens, the few above.
    weight = tl.where(some > float("-inf"), tl.exp2(tl.fma(some, scale, -peak * scale)), 0.0)
    share = some.shape[0] / size
    above = top_k * share
    middle = tl.where(counting, num_finite - above, (1 - top_p) * total * share)
    off = tl.where(counting, _ERRORS * tl.sqrt(above) + _ERRORS, 0.12 * middle)
    # Where all tokens together would weigh no more than what is below the answer, the answer isn't.
    bound = peak + tl.log2(tl.maximum(1 - top_p, 1e-6) * total / size) / scale
    least = tl.minimum(tl.where(counting, least, tl.maximum(bound, least)), highest)
    from_x, to_x, step = least, least, highest - least
    for _ in range(7):
        step *= 0.5
        less = tl.where(some < from_x + step, weight, 0.0)
        more = tl.where(some < to_x + step, weight, 0.0)
        less, more = tl.split(tl.sum(tl.join(less, more), 0))  # together: one barrier for both
        from_x += tl.where(less < middle - off, step, 0.0)
        to_x += tl.where(more < middle + off, step, 0.0)
    to_x += step
    if not counting:
        # All of the sample, at these two; and in between the mass is nearly a straight line.
        each = tl.where(all < to_x, tl.exp2(tl.fma(all, scale, -peak * scale)), 0.0)
        less, more, squares = tl.reduce((tl.where(all < from_x, each, 0.0), each, each * each), 0, _sum_three)
        # By how much a sum over as many, taken from so many without putting back, is off.
        variance = squares - more * more / all.shape[0] - squares * (all.shape[0] / size)
        off = _ERRORS * tl.sqrt(tl.maximum(variance, 0.0)) + 0.005 * _RATIO * middle
        if more > less:
            slope = (to_x - from_x) / (more - less)
            to_x = from_x + (_RATIO * middle + off - less) * slope
            from_x += (_RATIO * middle - off - less) * slope
    from_key, to_key = _key(from_x) & -_BIN, _key_up(to_x, _BIN) + _BIN
    # Of one sign: positive numbers, or if there are none, negative ones. And no more than the bins hold.
    from_key = tl.where((from_key <= 0) & (to_key > _BIN), _BIN, from_key)
    most = tl.minimum(from_key.to(tl.int64) + NUM_BINS * _BIN, 0x7F800000).to(tl.int32)
    to_key = tl.where(counting, most, tl.minimum(to_key, most))
    to_key = tl.where((from_key <= 0) & (to_key > 0), 0, to_key)
    return from_key, tl.maximum(from_key, to_key)


@triton.jit
def _bisect(x, weight, target, low, high, cell):
    """The largest key at or above which the weights of x are enough, of low, low + cell, … below high; low if none."""
    while high.to(tl.int64) - low > cell:
        middle = low + (((high - low).to(tl.uint32, bitcast=True) >> 1).to(tl.int32) & -cell)
        enough = tl.sum(tl.where(x >= _number_of(middle), weight, 0.0)) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _by_bins(from_key, to_key, count, above, peak, scale, target, low, high, cell):
    """low and high as near as the bins tell: a token may be any number of its bin. above: what larger ones weigh."""
    start = from_key + tl.arange(0, NUM_BINS) * _BIN
    lightest = tl.where(count > 0, count * tl.exp2((_number_of(start) - peak) * scale), 0.0)
    at_least = above + tl.cumsum(lightest.to(tl.float64), 0, reverse=True)
    num_sure = tl.sum((at_least >= target).to(tl.int32), 0)
    num_maybe = num_sure
    if cell < _BIN:
        heaviest = tl.exp2((_number_of(start + (_BIN - cell)) - peak) * scale)
        at_most = above + tl.cumsum(tl.where(count > 0, count * heaviest, 0.0).to(tl.float64), 0, reverse=True)
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
    tile = tl.load(tiles + i, mask=i < num_wanted, other=tl.cdiv(size, TILE_SIZE)).to(tl.int32)
    column = tile[:, None] * TILE_SIZE + tl.arange(0, TILE_SIZE)[None, :]
    return load_logits(logits, scratch, column, column < size, ruled, HAS_RULES)


@triton.jit
def _sum_fours(x):
    """Sums of four neighbours, which are one thread's."""
    return tl.sum(x.reshape(_FEW, TILE_SIZE // 4, 4), 2)


@triton.jit
def _sums_from(a, b, c, tiles, num_wanted, logits, scratch, size, peak, scale, ruled, HAS_RULES: tl.constexpr):
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
            _number_of(a), _number_of(b), _number_of(c), tiles, num_wanted, logits, scratch, size, peak, scale, ruled,
            HAS_RULES,
        )  # fmt: skip
        if from_b >= target:
            low = tl.where(from_c >= target, c, b)
            high = tl.where(from_c >= target, high, tl.minimum(c, high))
        else:
            high = tl.where(from_a >= target, tl.minimum(b, high), a)
            low = tl.where(from_a >= target, a, low)
    return low


@triton.jit
def _list_wanted(tiles, max_N, low, num_tiles, ALL_TILES: tl.constexpr):
    """Writes down the tiles that reach low, and returns how many they are."""
    t = tl.arange(0, ALL_TILES)
    top = tl.load(max_N + t, mask=t < num_tiles, other=float("-inf"))
    wanted = ((top >= _number_of(low)) & (t < num_tiles)).to(tl.int32)
    tl.debug_barrier()
    tl.store(tiles + tl.cumsum(wanted, 0) - 1, t, mask=wanted > 0)
    tl.debug_barrier()
    return tl.sum(wanted, 0)


@triton.jit(do_not_specialize_on_alignment=["threshold_S", "rows_S"])
def _threshold_kernel(
    threshold_S, state_SW, bins_SB, tiles_SN, max_SN, mass_SN, scratch_SV, logits_SV, rows_S, params_RP, size,
    row_stride, num_tiles,
    HAS_RULES: tl.constexpr, ALL_TILES: tl.constexpr, CELL_BITS: tl.constexpr, PIECES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_S + s)
    temperature, top_k = float_param(params_RP, row, _TEMPERATURE), int_param(params_RP, row, _TOP_K)
    top_p, min_p = float_param(params_RP, row, _TOP_P), float_param(params_RP, row, _MIN_P)
    ruled = has_rules(params_RP, row, HAS_RULES)
    logits, scratch, tiles = logits_SV + s * row_stride, scratch_SV + s * size, tiles_SN + s * ALL_TILES
    state = state_SW + s * STATE_SIZE
    if PIECES:
        # Whether the row may have to be read a second time.
        samples = (temperature > 0) & tl.where((top_k > 0) & (top_k < size), top_k > _FEW, top_p < 1)
        all = tl.full((PIECES * _PIECE,), float("-inf"), tl.float32)
        some = tl.full((PIECES * _PIECE // _RATIO,), float("-inf"), tl.float32)
        num_finite = tl.full((), 0.0, tl.float32)
        least, highest = num_finite, num_finite
        if samples & (not ruled):  # already: they are older than what the kernel before this one writes
            all, some, num_finite, least, highest = _samples(logits, scratch, size, False, PIECES, False)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    threshold, open = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        t = tl.arange(0, ALL_TILES)
        top = tl.load(max_SN + s * num_tiles + t, mask=t < num_tiles, other=float("-inf"))
        mass = tl.load(mass_SN + s * num_tiles + t, mask=t < num_tiles, other=0.0)
        peak = tl.max(top, 0)
        threshold = peak
        counting = (top_k > 0) & (top_k < size)
        if (peak > float("-inf")) & (peak < float("inf")):
            threshold = peak + temperature * tl.log(min_p)
            if counting | (top_p < 1):
                scale = LOG2_E / temperature
                each = tl.where(top > float("-inf"), tl.exp2((top - peak) * tl.where(counting, 0.0, scale)), 0.0)
                weight, total = tl.split(tl.sum(tl.join(each, mass * tl.exp2((top - peak) * scale)), 0))
                fraction = tl.maximum(top_p - _SLACK, _SLACK / 10)
                cell = tl.where(ruled, 1, 1 << CELL_BITS)
                low, high = _key_up(threshold, cell), _key(peak) + cell
                total_is_known = (threshold == float("-inf")) & (not counting)
                target = tl.where(counting, top_k.to(tl.float32), total * fraction)
                # What one of each tile is enough for. Of many tokens it doesn't leave few tiles.
                if tl.where(counting, top_k <= _FEW, total_is_known) & (weight >= target):
                    lowest = tl.min(tl.where(top > float("-inf"), top, peak), 0)
                    low = tl.maximum(low, _bisect(top, each, target, _key(lowest), high, cell))
                wanted = ((top >= _number_of(low)) & (t < num_tiles)).to(tl.int32)
                num_wanted = tl.sum(wanted, 0)
                if num_wanted <= _FEW:
                    tl.store(tiles + tl.cumsum(wanted, 0) - 1, t, mask=wanted > 0)
                    tl.debug_barrier()
                    x = _load_few(tiles, 0, num_wanted, logits, scratch, size, ruled, HAS_RULES)
                    if counting:
                        one = tl.where(x >= _number_of(low), 1.0, 0.0)
                        low = _bisect(x, one, target, low, high, cell)
                        threshold = tl.maximum(threshold, _number_of(low))
                    if top_p < 1:
                        kept = tl.where(x >= threshold, tl.exp2((x - peak) * scale), 0.0)
                        enough = tl.where(total_is_known, total, tl.sum(kept)) * fraction
                        threshold = tl.maximum(threshold, _number_of(_bisect(x, kept, enough, low, high, cell)))
                else:
                    open = tl.full((), 1, tl.int32)
                    by = tl.where(counting, 0.0, scale)
                    from_key, to_key = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
                    if PIECES:  # noqa: SIM102
                        # Weights in the second pass are 2 to a product less a rounded one: made good if not too large.
                        if samples & (counting | total_is_known) & (tl.abs(peak) * scale < 1e5):
                            if ruled:
                                all, some, num_finite, least, highest = _samples(
                                    logits, scratch, size, True, PIECES, HAS_RULES
                                )  # fmt: skip
                            from_key, to_key = _bracket(
                                all, some, num_finite, least, highest, peak, total, by,
                                counting, top_k, top_p, size,
                            )  # fmt: skip
                            tl.store(bins_SB + s * NUM_BINS + tl.arange(0, NUM_BINS), tl.zeros((NUM_BINS,), tl.int32))
                    tl.store(state + _FROM, from_key)
                    tl.store(state + _TO, to_key)
                    tl.store(state + _LOW, low)
                    tl.store(state + _PEAK, peak.to(tl.int32, bitcast=True))
                    tl.store(state + _TOTAL, total.to(tl.int32, bitcast=True))
                    tl.store(state + _SCALE, by.to(tl.int32, bitcast=True))
                    tl.store(state + _RULED, ruled.to(tl.int32))
    tl.store(state + _OPEN, open)
    tl.store(threshold_S + s, threshold)


@triton.jit
def _three_least(x, ROWS: tl.constexpr):
    """The three least of each eight neighbours of x [ROWS, 128], uint32: three [ROWS, 16]."""
    a, b = tl.split(x.reshape(ROWS, TILE_SIZE // 2, 2))
    least, second = tl.minimum(a, b), tl.maximum(a, b)
    a, b = tl.split(least.reshape(ROWS, TILE_SIZE // 4, 2))
    c, d = tl.split(second.reshape(ROWS, TILE_SIZE // 4, 2))
    e, f = tl.maximum(a, b), tl.minimum(c, d)
    least, second, third = tl.minimum(a, b), tl.minimum(e, f), tl.maximum(e, f)
    a, b = tl.split(least.reshape(ROWS, TILE_SIZE // 8, 2))
    c, d = tl.split(second.reshape(ROWS, TILE_SIZE // 8, 2))
    e, f = tl.maximum(a, b), tl.minimum(c, d)
    c, d = tl.split(third.reshape(ROWS, TILE_SIZE // 8, 2))
    return tl.minimum(a, b), tl.minimum(e, f), tl.minimum(tl.maximum(e, f), tl.minimum(c, d))


@triton.jit
def _count(bins, bin, num_bins, SIZE: tl.constexpr):
    """In any order, so that nothing moves between threads. bin: int32."""
    bin = tl.reshape(bin, (SIZE,), can_reorder=True)
    tl.atomic_add(bins + bin, 1, mask=bin < num_bins, sem="relaxed")


@triton.jit
def _pass_over(x, source, column, size, bins, from_key, to_key, peak, scale, TILES: tl.constexpr, STEP: tl.constexpr):
    """Counts what is in the bracket, of x and what follows it in memory, TILES in all; returns what is above weighs.

    x may be NaN, which is not above anything, nor in any bin."""
    shift = peak * scale
    # Key - from_key. Numbers of the other sign come out as no less than the width.
    sign = tl.where(from_key < 0, -1, 1)
    origin = tl.where(from_key < 0, -2147483648, 0) - from_key
    width, num_bins = (to_key - from_key).to(tl.uint32, bitcast=True), (to_key - from_key) >> _BIN_BITS
    above = tl.zeros((STEP, TILE_SIZE // 8), tl.float32)
    for i in range(STEP, TILES + STEP, STEP):
        column += STEP * TILE_SIZE
        following = tl.load(source + column, mask=(column < size) & (i < TILES), other=float("-inf"))
        weight = tl.where(x >= _number_of(to_key), tl.exp2(tl.fma(x, scale, -shift)), 0.0)
        above += tl.sum(weight.reshape(STEP, TILE_SIZE // 8, 8), 2)  # which are one thread's
        offset = (x.to(tl.int32, bitcast=True) * sign + origin).to(tl.uint32, bitcast=True)
        # Additions in memory are what takes time here. Of eight logits few are in the bracket, mostly one or none.
        least, second, third = _three_least(offset, STEP)
        if tl.min(third) < width:
            _count(bins, (offset >> _BIN_BITS).to(tl.int32), num_bins, STEP * TILE_SIZE)
        else:
            _count(bins, (least >> _BIN_BITS).to(tl.int32), num_bins, STEP * TILE_SIZE // 8)
            _count(bins, (second >> _BIN_BITS).to(tl.int32), num_bins, STEP * TILE_SIZE // 8)
        x = as_float(following)
    return tl.sum(above) * tl.exp2(tl.fma(peak, -scale, shift))  # what the shift was rounded by is made good


@triton.jit
def _second_pass_kernel(
    above_SP, bins_SB, state_SW, scratch_SV, logits_SV, size, row_stride,
    HAS_RULES: tl.constexpr, TILES: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The last tiles first, for they are still in the cache. Rows are adjacent in both orders.
    s, num_parts = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    part = num_parts - 1 - tl.program_id(1)
    state = state_SW + s * STATE_SIZE
    logits, scratch = logits_SV + s * row_stride, scratch_SV + s * size
    bins = bins_SB + s * NUM_BINS
    column = (part * TILES + tl.arange(0, STEP)[:, None]) * TILE_SIZE + tl.arange(0, TILE_SIZE)[None, :]
    # Already now, while the brackets are being found, and whether the row has one or not:
    x = as_float(tl.load(logits + column, mask=column < size, other=float("-inf")))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    open, from_key, to_key = tl.load(state + _OPEN), tl.load(state + _FROM), tl.load(state + _TO)
    peak = tl.load(state + _PEAK).to(tl.float32, bitcast=True)
    scale, ruled = tl.load(state + _SCALE).to(tl.float32, bitcast=True), tl.load(state + _RULED)
    if (open > 0) & (to_key > from_key):
        if HAS_RULES and ruled > 0:
            x = as_float(tl.load(scratch + column, mask=column < size, other=float("-inf")))
            above = _pass_over(x, scratch, column, size, bins, from_key, to_key, peak, scale, TILES, STEP)
        else:
            above = _pass_over(x, logits, column, size, bins, from_key, to_key, peak, scale, TILES, STEP)
        tl.store(above_SP + s * num_parts + part, above)


@triton.jit
def settled(
    threshold, tiles, state, bins, above, num_parts, max_N, logits, scratch, params_RP, row, size, num_tiles,
    HAS_RULES: tl.constexpr, ALL_TILES: tl.constexpr, PARTS: tl.constexpr, CELL_BITS: tl.constexpr,
):  # fmt: skip
    """A row's threshold, after the second pass, and further ones if needed. All are pointers to what the row has."""
    # All at once, whether needed or not: one wait for memory.
    open, from_key, to_key = tl.load(state + _OPEN), tl.load(state + _FROM), tl.load(state + _TO)
    low, total = tl.load(state + _LOW), tl.load(state + _TOTAL).to(tl.float32, bitcast=True)
    peak = tl.load(state + _PEAK).to(tl.float32, bitcast=True)
    count, part = tl.load(bins + tl.arange(0, NUM_BINS)).to(tl.float32), tl.arange(0, PARTS)
    larger = tl.load(above + part, mask=part < num_parts, other=0.0).to(tl.float64)
    if open > 0:
        temperature, top_k = float_param(params_RP, row, _TEMPERATURE), int_param(params_RP, row, _TOP_K)
        top_p, ruled = float_param(params_RP, row, _TOP_P), has_rules(params_RP, row, HAS_RULES)
        threshold = peak + temperature * tl.log(float_param(params_RP, row, _MIN_P))  # not what an earlier draw left
        counting, found = (top_k > 0) & (top_k < size), to_key > from_key
        scale, fraction = LOG2_E / temperature, tl.maximum(top_p - _SLACK, _SLACK / 10)
        cell = tl.where(ruled, 1, 1 << CELL_BITS)
        high, above_bins = _key(peak) + cell, tl.sum(larger, 0)
        num_wanted = tl.full((), -1, tl.int32)  # not yet written down
        if counting:
            stop, target = high, top_k.to(tl.float32)
            if found:
                low, stop = _by_bins(from_key, to_key, count, above_bins, peak, 0.0, target, low, stop, cell)
            if stop.to(tl.int64) - low > cell:
                num_wanted = _list_wanted(tiles, max_N, low, num_tiles, ALL_TILES)
                low = _search(
                    low, stop, cell, target, tiles, num_wanted, logits, scratch, size, peak, 0.0, ruled, HAS_RULES
                )  # fmt: skip
            threshold = tl.maximum(threshold, _number_of(low))
        if top_p < 1:
            if counting | (threshold > float("-inf")):
                start = from_key + tl.arange(0, NUM_BINS) * _BIN
                if found & (above_bins == 0) & (cell == _BIN) & (low >= from_key):
                    kept = (count > 0) & (start >= _key_up(threshold, cell))
                    total = tl.sum(tl.where(kept, count * tl.exp2((_number_of(start) - peak) * scale), 0.0), 0)
                else:
                    num_wanted = _list_wanted(tiles, max_N, low, num_tiles, ALL_TILES)
                    total, _, _ = _sums_from(
                        threshold, threshold, threshold, tiles, num_wanted, logits, scratch, size, peak, scale, ruled,
                        HAS_RULES,
                    )  # fmt: skip
            enough = total * fraction
            if found & ((above_bins == 0) | (not counting)):
                low, high = _by_bins(from_key, to_key, count, above_bins, peak, scale, enough, low, high, cell)
            if high.to(tl.int64) - low > cell:
                if num_wanted < 0:
                    num_wanted = _list_wanted(tiles, max_N, low, num_tiles, ALL_TILES)
                low = _search(
                    low, high, cell, enough, tiles, num_wanted, logits, scratch, size, peak, scale, ruled, HAS_RULES
                )  # fmt: skip
            threshold = tl.maximum(threshold, _number_of(low))
    return threshold


def _threshold_triton(
    rows: RowLogits,
    max_SN: Tensor,
    mass_SN: Tensor,
    passes: bool = True,
    pieces: int = 512,
    num_warps: int = 16,
    pass_tiles: int = 32,
    pass_warps: int = 1,  # so that whether a branch is taken is a warp's own affair
    pass_step: int = 4,
) -> Limits:
    num_rows, size = rows.logits_SV.shape
    num_tiles = max_SN.shape[1]
    passes = passes and size >= 2 * pieces * PIECE
    ints, parts = rows.state.params_RP.new_empty, -(-num_tiles // pass_tiles)
    limits = Limits(
        max_SN.new_empty(num_rows), ints(num_rows, STATE_WORDS), ints(num_rows, BINS), max_SN.new_empty(num_rows, parts)
    )
    all_tiles = max(power_of_2(num_tiles), TILE)
    scratch_SV = rows.logits_SV if rows.scratch_SV is None else rows.scratch_SV
    logits = (scratch_SV, rows.logits_SV, rows.rows_S, rows.state.params_RP, size, rows.logits_SV.stride(0), num_tiles)
    if num_rows:
        _threshold_kernel[(num_rows,)](
            limits.threshold_S,
            limits.state_SW,
            limits.bins_SB,
            ints(num_rows, all_tiles),
            max_SN,
            mass_SN,
            *logits,
            HAS_RULES=rows.has_rules,
            ALL_TILES=all_tiles,
            CELL_BITS=CELL_BITS.get(rows.logits_SV.dtype, 0),
            PIECES=pieces * passes,
            num_warps=num_warps,
            maxnreg=1024 // num_warps,  # two programs fit a multiprocessor, so 256 rows an H200
            **overlap(max_SN.device),
        )
        if passes:
            _second_pass_kernel[(num_rows, parts)](
                limits.above_SP,
                limits.bins_SB,
                limits.state_SW,
                scratch_SV,
                rows.logits_SV,
                size,
                rows.logits_SV.stride(0),
                HAS_RULES=rows.has_rules,
                TILES=pass_tiles,
                STEP=pass_step,
                num_warps=pass_warps,
                **overlap(max_SN.device),
            )
    return limits


def threshold(rows: RowLogits, max_SN: Tensor, mass_SN: Tensor, passes: bool = True) -> Limits:
    """Returns Limits: the smallest logit (with the rules applied) that each row's filters keep, -inf without filters.

    max_SN, mass_SN: of tile_stats, of the same rows. Rows without filters, and of temperature 0, leave at once.
    passes: whether some row may need a second pass: False changes nothing but the time that it takes.
    """
    if runs_triton(rows.logits_SV):
        return _threshold_triton(rows, max_SN, mass_SN, passes)
    return Limits(threshold_reference(rows))
