"""min_p, top_k and top_p as one number a row: the smallest logit that is kept.

In vLLM's order: min_p keeps tokens of at least min_p × the largest probability; of those top_k keeps the k largest;
of those top_p keeps the smallest set of largest ones that has top_p of their mass. Each keeps a token if its logit is
large enough, so together they are a threshold. Ties are kept or dropped together: all tokens that equal the k-th
largest stay, and a token stays iff what is strictly larger has less mass than top_p, to within 1e-6, which is what
float32 sums are good for. The largest logit always stays.

On a GPU nothing is sorted. The answer is the largest threshold at or above which there is enough: k tokens, or enough
mass. It is looked for among integer keys that order as the floats do.

1. Where the tiles' maxima are enough by themselves, the answer is no lower. If few tiles reach what is left, they fit
   the registers of one program, which halves the range of keys until one is left: that is most rows.
2. Otherwise a sample of the tiles tells a bracket in which the answer likely lies, and many programs a row pass over
   the logits: they sum what is above the bracket and count what is inside by keys, one bin for each value of a 16-bit
   type. Counts are integers, so their order doesn't matter and a row is cut at the same place every time.
3. If that doesn't settle it (a bracket without the answer, bins of many float32 values, a top_p after a large top_k),
   one program a row makes more such passes, over ever smaller brackets.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import replace

import torch
from torch import Tensor

from nanollm.kernels.backend import gdc_launch_dependents, gdc_wait, overlap, power_of_2, runs_triton, tl, triton
from nanollm.kernels.tile_stats import TILE, TILE_SIZE
from nanollm.kernels.token_rules import RowLogits, float_param, has_rules, int_param, load_as_is, load_logits
from nanollm.sampling_params import MIN_P, TEMPERATURE, TOP_K, TOP_P

SLACK = 1e-6  # masses this close to top_p count as equal to it
_SLACK, _LOG2_E = tl.constexpr(SLACK), tl.constexpr(1.4426950408889634)
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = (tl.constexpr(column) for column in (TEMPERATURE, TOP_K, TOP_P, MIN_P))
# Keys of numbers that were converted from this type are multiples of 2 to this power.
_CELL_BITS = {torch.bfloat16: 16, torch.float16: 13}
_DONE, _COUNTING, _WEIGHING, _CUTTING = (tl.constexpr(phase) for phase in range(4))
BINS = 1024
_BINS = tl.constexpr(BINS)
# What the kernels tell each other of a row, int64 words; the bracket is [FROM, TO), and the answer in [LOW, HIGH).
STATE_WORDS = 8
_PHASE, _FROM, _TO, _LOW, _HIGH, _TARGET, _PEAK, _ABOVE = (tl.constexpr(i) for i in range(STATE_WORDS))
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
    """int32 that order as the float32 numbers do; of both zeros 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def _number(key):
    """The inverse of _key."""
    magnitude = tl.where(key < 0, -key, key)
    return (magnitude | (key & -(2**31))).to(tl.float32, bitcast=True)


@triton.jit
def _key_up(x, cell):
    """The first multiple of cell that is no smaller than the key of x."""
    return (_key(x) + (cell - 1)) & -cell


@triton.jit
def _scale_of(phase, temperature, peak):
    """scale, shift: exp2(x * scale - shift) is the weight of x: 1 where tokens are counted, else 1 to 2 for the peak.

    The shift is a whole number so that nothing is rounded but the result.
    """
    scale = tl.where(phase == _COUNTING, 0.0, _LOG2_E / temperature)
    return scale, tl.floor(peak * scale)


@triton.jit
def _bisect(x, weight, target, low, high, cell):
    """The largest key at or above which the weights of x are enough, of low, low + cell, … below high; low if none."""
    while high.to(tl.int64) - low > cell:
        middle = low + (((high - low).to(tl.uint32, bitcast=True) >> 1).to(tl.int32) & -cell)
        enough = tl.sum(tl.where(x >= _number(middle), weight, 0.0)) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _list_tiles(tiles, t, wanted):
    """Writes down the numbers t of the wanted tiles, and returns how many they are."""
    tl.store(tiles + tl.cumsum(wanted.to(tl.int32), 0) - 1, t, mask=wanted)
    tl.debug_barrier()
    return tl.sum(wanted.to(tl.int32), 0)


@triton.jit
def _bin_bits(from_key, to_key, cell_bits):
    """A bin holds 2 to this power of keys: a cell, or where the bracket is wide more."""
    while ((to_key.to(tl.int64) - from_key) >> cell_bits) > _BINS:
        cell_bits += 1
    return cell_bits


@triton.jit
def _of_one_sign(from_key, to_key, cell):
    """The part of the bracket that _count_and_weigh can do: positive numbers, or if there are none, negative ones."""
    from_key = tl.where((from_key <= 0) & (to_key > cell), cell, from_key)
    return from_key, tl.where((from_key <= 0) & (to_key > 0), 0, to_key)


@triton.jit
def _count_and_weigh(x, bins, from_key, to_key, bits, scale, shift, COMPILED: tl.constexpr):
    """Counts the x of each bin of [from_key, to_key); returns the weights of larger x, and 0 for the others."""
    # Key - from_key. Numbers of the other sign come out as no less than the width.
    sign = tl.where(from_key < 0, -1, 1)
    origin = tl.where(from_key < 0, -2147483648, 0) - from_key
    offset = (x.to(tl.int32, bitcast=True) * sign + origin).to(tl.uint32, bitcast=True)
    width = (to_key - from_key).to(tl.uint32, bitcast=True)
    if COMPILED:
        # Few are inside, and many warps jump over this. (tl.atomic_add would move everything through shared memory, to
        # a layout that it has no use for here.)
        tl.inline_asm_elementwise(
            """{
            .reg .pred %outside;
            .reg .b32 %bin;
            .reg .b64 %at;
            setp.ge.u32 %outside, $1, $2;
            @%outside bra DONE;
            shr.u32 %bin, $1, $3;
            mad.wide.u32 %at, %bin, 4, $4;
            red.relaxed.gpu.global.add.u32 [%at], 1;
            DONE:
            mov.b32 $0, 0;
            }""",
            "=r,r,r,r,l",
            [offset, width, bits, bins.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_add(bins + (offset >> bits.to(tl.uint32)), 1, mask=offset < width, sem="relaxed")
    return tl.where(x >= _number(to_key), tl.exp2(x * scale - shift), 0.0)


@triton.jit(do_not_specialize_on_alignment=["threshold_S", "rows_S"])
def _threshold_kernel(
    threshold_S, state_SW, tiles_SN, bins_SB, max_SN, mass_SN, scratch_SV, logits_SV, rows_S, params_RP, size,
    row_stride, num_tiles,
    HAS_RULES: tl.constexpr, ALL_TILES: tl.constexpr, FEW: tl.constexpr, SAMPLED: tl.constexpr,
    CELL_BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The filters of a row, if few tiles matter to them; else where to look for its first.
    s = tl.program_id(0).to(tl.int64)
    row, state = tl.load(rows_S + s), state_SW + s * _STATE_WORDS
    temperature = float_param(params_RP, row, _TEMPERATURE)
    top_k = int_param(params_RP, row, _TOP_K)
    top_p = float_param(params_RP, row, _TOP_P)
    min_p = float_param(params_RP, row, _MIN_P)
    ruled = has_rules(params_RP, row, HAS_RULES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    threshold = tl.full((), float("-inf"), tl.float32)
    phase = tl.full((), _DONE, tl.int32)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        t = tl.arange(0, ALL_TILES)
        top = tl.load(max_SN + s * num_tiles + t, mask=t < num_tiles, other=float("-inf"))
        mass = tl.load(mass_SN + s * num_tiles + t, mask=t < num_tiles, other=0.0)
        peak = tl.max(top, 0)
        threshold = peak
        if (peak > float("-inf")) & (peak < float("inf")):
            threshold = peak + temperature * tl.log(min_p)
            if (top_k > 0) & (top_k < size):
                phase = tl.full((), _COUNTING, tl.int32)
            elif top_p < 1:
                phase = tl.where(threshold > float("-inf"), _WEIGHING, _CUTTING)
        if phase != _DONE:
            logits, scratch = logits_SV + s * row_stride, scratch_SV + s * size
            tiles, within = tiles_SN + s * ALL_TILES, tl.arange(0, TILE_SIZE)
            fraction = tl.maximum(top_p - _SLACK, _SLACK / 10)
            mass_scale, mass_shift = _scale_of(_WEIGHING, temperature, peak)
            scale, shift = _scale_of(phase, temperature, peak)
            total = tl.sum(mass * tl.exp2(top * mass_scale - mass_shift), 0)
            target = tl.where(phase == _COUNTING, top_k.to(tl.float32), total * fraction)
            cell = tl.where(ruled, 1, 1 << CELL_BITS)
            low, high = _key_up(threshold, cell), _key(peak) + cell
            lowest = tl.min(tl.where(top > float("-inf"), top, peak), 0)
            weight = tl.where(top > float("-inf"), tl.exp2(top * scale - shift), 0.0)
            maxima_do = (phase != _WEIGHING) & (tl.sum(weight, 0) >= target)
            if maxima_do:
                low = tl.maximum(low, _bisect(top, weight, target, _key(lowest), high, cell))
            count = _list_tiles(tiles, t, (top >= _number(low)) & (t < num_tiles))
            if count <= FEW:
                number = tl.arange(0, FEW)
                tile = tl.load(tiles + number, mask=number < count, other=num_tiles)
                column = tile[:, None] * TILE_SIZE + within[None, :]
                x = load_logits(logits, scratch, column, column < size, ruled, HAS_RULES)
                if phase == _COUNTING:
                    one = tl.where(x >= _number(low), 1.0, 0.0)
                    low = _bisect(x, one, target, low, high, cell)
                    threshold = tl.maximum(threshold, _number(low))
                if top_p < 1:
                    kept = tl.where(x >= threshold, tl.exp2(x * mass_scale - mass_shift), 0.0)
                    enough = tl.where(phase == _CUTTING, target, tl.sum(kept) * fraction)
                    low = _bisect(x, kept, enough, low, high, cell)
                    threshold = tl.maximum(threshold, _number(low))
                phase = tl.full((), _DONE, tl.int32)
            else:
                from_key, to_key = low, tl.where(phase == _WEIGHING, low, high)
                if (phase != _WEIGHING) & (not maxima_do) & (count > 4 * SAMPLED):
                    picked = tl.arange(0, SAMPLED * TILE_SIZE)
                    column = picked // TILE_SIZE * (num_tiles // SAMPLED * TILE_SIZE) + picked % TILE_SIZE
                    sample = load_logits(logits, scratch, column, column < size, ruled, HAS_RULES)
                    sampled = tl.where(sample > float("-inf"), tl.exp2(sample * scale - shift), 0.0)
                    # Of what is small a sample tells the mass best, and all but that is above the answer: which is
                    # therefore at least where all tokens together would weigh that little.
                    below = tl.where(phase == _COUNTING, size, total) - target
                    least = (tl.log2(below / size) + mass_shift) / mass_scale
                    smallest = tl.min(tl.where(sample > float("-inf"), sample, peak), 0)
                    least = tl.minimum(tl.where(phase == _COUNTING, smallest, tl.maximum(least, smallest)), peak)
                    below = below * SAMPLED / num_tiles
                    off: tl.constexpr = 0.72 / SAMPLED**0.5  # 5 standard deviations, if logits are normal
                    from_x, to_x, step = least, least, peak - least
                    for _ in range(8):
                        step *= 0.5
                        less = tl.where(sample < from_x + step, sampled, 0.0)
                        more = tl.where(sample < to_x + step, sampled, 0.0)
                        less, more = tl.split(tl.sum(tl.join(less, more), 0))  # together: one barrier for both
                        from_x += tl.where(less < below * (1 - off), step, 0.0)
                        to_x += tl.where(more < below * (1 + off), step, 0.0)
                    from_key = tl.minimum(tl.maximum(_key_up(from_x, cell), low), high - cell)
                    to_key = tl.maximum(tl.minimum(_key_up(to_x + step, cell) + cell, high), from_key + cell)
                from_key, to_key = _of_one_sign(from_key, to_key, cell)
                bin = tl.arange(0, _BINS)
                tl.store(bins_SB + s * _BINS + bin, tl.zeros((_BINS,), tl.int32))
                tl.store(state + _FROM, from_key.to(tl.int64))
                tl.store(state + _TO, to_key.to(tl.int64))
                tl.store(state + _LOW, low.to(tl.int64))
                tl.store(state + _HIGH, high.to(tl.int64))
                tl.store(state + _TARGET, target.to(tl.float64).to(tl.int64, bitcast=True))
                tl.store(state + _PEAK, peak.to(tl.int32, bitcast=True).to(tl.int64))
                tl.store(state + _ABOVE, tl.full((), 0, tl.int64))
    tl.store(state + _PHASE, phase.to(tl.int64))
    tl.store(threshold_S + s, threshold)


@triton.jit(do_not_specialize_on_alignment=["rows_S"])
def _long_pass_kernel(
    state_SW, bins_SB, max_SN, scratch_SV, logits_SV, rows_S, params_RP, size, row_stride, num_tiles,
    HAS_RULES: tl.constexpr, TILES: tl.constexpr, CELL_BITS: tl.constexpr, COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    s, part, num_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row, state = tl.load(rows_S + s), state_SW + s * _STATE_WORDS
    temperature = float_param(params_RP, row, _TEMPERATURE)
    ruled = has_rules(params_RP, row, HAS_RULES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    phase = tl.load(state + _PHASE)
    from_key, to_key = tl.load(state + _FROM).to(tl.int32), tl.load(state + _TO).to(tl.int32)
    peak = tl.load(state + _PEAK).to(tl.int32).to(tl.float32, bitcast=True)
    if phase != _DONE:
        bits = _bin_bits(from_key, to_key, tl.where(ruled, 0, CELL_BITS))
        scale, shift = _scale_of(phase, temperature, peak)
        logits, scratch = logits_SV + s * row_stride, scratch_SV + s * size
        tops, above = max_SN + s * num_tiles, tl.zeros((TILES, TILE_SIZE // 8), tl.float32)
        # Last tiles first: of what tile_stats read, those are still in the cache.
        last = num_tiles - 1 - tl.arange(0, TILES)
        top = tl.load(tops + last - part * TILES, mask=last >= part * TILES, other=float("-inf"))
        for first in range(part * TILES, num_tiles, num_parts * TILES):
            column = (last - first)[:, None] * TILE_SIZE + tl.arange(0, TILE_SIZE)[None, :]
            mask = (column < size) & (top >= _number(from_key))[:, None]
            following = last - first - num_parts * TILES
            top = tl.load(tops + following, mask=following >= 0, other=float("-inf"))
            if HAS_RULES and ruled:
                x = tl.load(scratch + column, mask=mask, other=float("-inf"))
            else:
                x = load_as_is(logits, column, mask)  # NaN is not above anything, nor in any bin
            larger = _count_and_weigh(x, bins_SB + s * _BINS, from_key, to_key, bits, scale, shift, COMPILED)
            above += tl.sum(larger.reshape(TILES, TILE_SIZE // 8, 8), 2)  # without leaving the thread
        tl.atomic_add(state + _ABOVE, (tl.sum(above) * float(1 << 40)).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["threshold_S", "rows_S"])
def _settle_kernel(
    threshold_S, state_SW, tiles_SN, bins_SB, max_SN, scratch_SV, logits_SV, rows_S, params_RP, size, row_stride,
    num_tiles,
    HAS_RULES: tl.constexpr, ALL_TILES: tl.constexpr, CHUNK: tl.constexpr, CELL_BITS: tl.constexpr,
    COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # What the long pass found, and further passes until the row's threshold is known.
    s = tl.program_id(0).to(tl.int64)
    row, state = tl.load(rows_S + s), state_SW + s * _STATE_WORDS
    temperature, top_p = float_param(params_RP, row, _TEMPERATURE), float_param(params_RP, row, _TOP_P)
    ruled = has_rules(params_RP, row, HAS_RULES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    phase = tl.load(state + _PHASE).to(tl.int32)
    if phase != _DONE:
        from_key, to_key = tl.load(state + _FROM).to(tl.int32), tl.load(state + _TO).to(tl.int32)
        low, high = tl.load(state + _LOW).to(tl.int32), tl.load(state + _HIGH).to(tl.int32)
        target = tl.load(state + _TARGET).to(tl.float64, bitcast=True)
        peak = tl.load(state + _PEAK).to(tl.int32).to(tl.float32, bitcast=True)
        sure = tl.load(state + _ABOVE).to(tl.float64) / (1 << 40)
        threshold = tl.load(threshold_S + s)
        fraction = tl.maximum(top_p - _SLACK, _SLACK / 10).to(tl.float64)
        cell_bits = tl.where(ruled, 0, CELL_BITS)
        cell = 1 << cell_bits
        logits, scratch = logits_SV + s * row_stride, scratch_SV + s * size
        tiles, bins, bin = tiles_SN + s * ALL_TILES, bins_SB + s * _BINS, tl.arange(0, _BINS)
        while phase != _DONE:
            if phase == _WEIGHING:
                target = sure * fraction
                phase = tl.full((), _CUTTING, tl.int32)
                from_key, to_key = low, high
            else:
                # A bin's tokens weigh at least as if all were the least number in it, and at most as if the largest.
                bits = _bin_bits(from_key, to_key, cell_bits)
                scale, shift = _scale_of(phase, temperature, peak)
                start = tl.minimum(from_key + (bin.to(tl.int64) << bits), to_key)
                last = tl.minimum(from_key + ((bin + 1).to(tl.int64) << bits), to_key) - cell
                count = tl.load(bins + bin, cache_modifier=".cg").to(tl.float64)
                lightest = tl.exp2(_number(start.to(tl.int32)) * scale - shift)
                at_least = sure + tl.cumsum(tl.where(count > 0, count * lightest, 0.0), 0, reverse=True)
                at_most = at_least
                if bits > cell_bits:
                    heaviest = tl.exp2(_number(last.to(tl.int32)) * scale - shift)
                    at_most = sure + tl.cumsum(tl.where(count > 0, count * heaviest, 0.0), 0, reverse=True)
                num_sure = tl.sum((at_least >= target).to(tl.int64), 0)
                num_maybe = tl.sum((at_most >= target).to(tl.int64), 0)
                half = (high.to(tl.int64) - low) // 2
                if sure >= target:
                    low = to_key
                else:
                    if num_sure > 0:
                        low = (from_key + ((num_sure - 1) << bits)).to(tl.int32)
                    high = tl.minimum(from_key + (num_maybe << bits), to_key).to(tl.int32)
                from_key, to_key = low, high
                if high.to(tl.int64) - low <= cell:  # found: what follows is the next filter's
                    threshold = tl.maximum(threshold, _number(low))
                    phase = tl.where((phase == _COUNTING) & (top_p < 1), _WEIGHING, _DONE)
                    low, high = _key_up(threshold, cell), _key(peak) + cell
                    from_key, to_key = low, low
                elif high.to(tl.int64) - low > half:
                    # Such wide bins tell little: the next pass is about the middle alone.
                    from_key = low + ((high.to(tl.int64) - low) // 2).to(tl.int32) // cell * cell
                    to_key = from_key
            if phase != _DONE:
                from_key, to_key = _of_one_sign(from_key, to_key, cell)
                bits = _bin_bits(from_key, to_key, cell_bits)
                scale, shift = _scale_of(phase, temperature, peak)
                tl.debug_barrier()  # the bins were read
                tl.store(bins + bin, tl.zeros((_BINS,), tl.int32))
                t = tl.arange(0, ALL_TILES)
                top = tl.load(max_SN + s * num_tiles + t, mask=t < num_tiles, other=float("-inf"))
                num_wanted = _list_tiles(tiles, t, (top >= _number(from_key)) & (t < num_tiles))
                above = tl.zeros((CHUNK,), tl.float64)
                for first in range(0, num_wanted, CHUNK):
                    i = first + tl.arange(0, CHUNK)
                    tile = tl.load(tiles + i, mask=i < num_wanted, other=num_tiles)
                    column = tile[:, None] * TILE_SIZE + tl.arange(0, TILE_SIZE)[None, :]
                    x = load_logits(logits, scratch, column, column < size, ruled, HAS_RULES)
                    larger = _count_and_weigh(x, bins, from_key, to_key, bits, scale, shift, COMPILED)
                    above += tl.sum(larger, 1).to(tl.float64)
                tl.debug_barrier()
                sure = tl.sum(above, 0)
        tl.store(threshold_S + s, threshold)


def _threshold_triton(
    rows: RowLogits,
    max_SN: Tensor,
    mass_SN: Tensor,
    few: int = 64,
    sampled: int = 64,
    tiles: int = 32,
    parts: int = 8,
    num_warps: int = 16,
    settle_warps: int = 8,
) -> Tensor:
    num_rows, size = rows.logits_SV.shape
    num_tiles = max_SN.shape[1]
    all_tiles = max(power_of_2(num_tiles), TILE)
    threshold_S = max_SN.new_empty(num_rows)
    state_SW = max_SN.new_empty(num_rows, STATE_WORDS, dtype=torch.int64)
    tiles_SN = max_SN.new_empty(num_rows, all_tiles, dtype=torch.int32)
    bins_SB = max_SN.new_empty(num_rows, BINS, dtype=torch.int32)
    scratch_SV = rows.logits_SV if rows.scratch_SV is None else rows.scratch_SV
    logits = (scratch_SV, rows.logits_SV, rows.rows_S, rows.state.params_RP, size, rows.logits_SV.stride(0), num_tiles)
    common = {
        "HAS_RULES": rows.has_rules,
        "CELL_BITS": _CELL_BITS.get(rows.logits_SV.dtype, 0),
        **overlap(max_SN.device),
    }
    passes = common | {"COMPILED": isinstance(_threshold_kernel, triton.JITFunction)}
    # With 64 registers two programs fit a multiprocessor, so 256 rows an H200; beside two that settle, one that draws.
    a_row_each = {"ALL_TILES": all_tiles, "maxnreg": 64}
    if num_rows:
        found = (threshold_S, state_SW, tiles_SN, bins_SB, max_SN)
        _threshold_kernel[(num_rows,)](
            *found, mass_SN, *logits, FEW=few, SAMPLED=sampled, num_warps=num_warps, **a_row_each, **common
        )
        _long_pass_kernel[(num_rows, parts)](state_SW, bins_SB, max_SN, *logits, TILES=tiles, num_warps=4, **passes)
        _settle_kernel[(num_rows,)](*found, *logits, CHUNK=16, num_warps=settle_warps, **a_row_each, **passes)
    return threshold_S


def threshold(rows: RowLogits, max_SN: Tensor, mass_SN: Tensor) -> Tensor:
    """The smallest logit (with the rules applied) that each row's filters keep: float32 [S], -inf without filters.

    max_SN, mass_SN: of tile_stats, of the same rows. Rows without filters, and of temperature 0, leave at once.
    """
    if runs_triton(rows.logits_SV):
        return _threshold_triton(rows, max_SN, mass_SN)
    return threshold_reference(rows)
