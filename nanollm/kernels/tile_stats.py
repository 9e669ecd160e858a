"""The largest logit of each tile of 128 tokens, and the tile's probability mass: all that most of sampling looks at.

Where filters will ask for more, the logits are counted on the way: kernels.histogram.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import torch.nn.functional as F
from torch import Tensor

from nanollm.kernels import histogram
from nanollm.kernels.backend import gdc_launch_dependents, gdc_wait, gpu, overlap, runs_triton, tl, triton
from nanollm.kernels.token_rules import (
    RowLogits,
    apply_rules,
    as_logits,
    float_param,
    has_mask,
    int_param,
    masked,
    penalized,
    rules_of,
    singles_out,
)
from nanollm.sampling_params import TEMPERATURE, TOP_K, TOP_P

TILE = 128  # tokens; the shards of a vocabulary are whole tiles
TILE_SIZE = tl.constexpr(TILE)
LARGEST = 3.4028234663852886e38  # float32
LOG2_E = tl.constexpr(1.4426950408889634)
_TEMPERATURE, _TOP_K, _TOP_P = tl.constexpr(TEMPERATURE), tl.constexpr(TOP_K), tl.constexpr(TOP_P)
_LARGEST = tl.constexpr(LARGEST)
_NO_PAIR = tl.constexpr(0xFF80FF80 - 2**32)  # two logits of -inf


def in_tiles(x_SV: Tensor) -> Tensor:
    """[S, tiles, 128], the last tile filled up with -inf."""
    return F.pad(x_SV, (0, -x_SV.shape[1] % TILE), value=float("-inf")).unflatten(1, (-1, TILE))


def tile_stats_reference(rows: RowLogits) -> tuple[Tensor, Tensor]:
    """The definition; as tile_stats."""
    x_SNT = in_tiles(rows.processed().logits_SV)
    max_SN = x_SNT.amax(-1)
    # Where all is -inf, exp(-inf - finite) is the 0 that it should be.
    top_SN1 = max_SN.clamp(-LARGEST, LARGEST)[..., None]
    temperature_S11 = rows.floats(TEMPERATURE)[:, None, None]
    mass_SN = torch.exp((x_SNT - top_SN1) / temperature_S11.where(temperature_S11 > 0, 1.0)).sum(-1)
    return max_SN, mass_SN


@triton.jit
def clamped(top):
    """The same, but finite."""
    return tl.minimum(tl.maximum(top, -_LARGEST), _LARGEST)


@triton.jit
def _store_stats(max_SN, mass_SN, at, mask, x, temperature):
    top = tl.max(x, 1)
    tl.store(max_SN + at, top, mask=mask)
    if temperature > 0:
        # The difference first: it is exact where it matters, however large the logits.
        weight = tl.exp2((x - clamped(top)[:, None]) * (LOG2_E / temperature))
        tl.store(mass_SN + at, tl.sum(weight, 1), mask=mask)


def _in_pairs(logits_SV: Tensor) -> bool:
    """Whether kernels may take two neighbours at once, as the GPU computes with bfloat16 (Hopper and later)."""
    even = logits_SV.shape[1] % 2 == logits_SV.stride(0) % 2 == logits_SV.data_ptr() % 4 == 0
    return even and logits_SV.dtype == torch.bfloat16 and gpu(logits_SV.device).capability >= (9, 0)


@triton.jit
def _as_pairs(logits):
    """A pointer to pairs of bfloat16, each an int32."""
    return logits.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def _low_half(pair):
    """The first of two logits, float32."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high_half(pair):
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _max_of_pairs(a, b):
    """The larger of two pairs of bfloat16, each in an int32; NaN only of two NaN."""
    return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def _store_stats_of_pairs(max_SN, mass_SN, at, mask, pair, temperature, bins, COUNTED: tl.constexpr):
    """The same of pairs [tiles, 4, 16]: four neighbouring threads share a tile, so that few numbers cross threads.
    COUNTED, at a temperature: counts them too, first of all, so that the rest is done meanwhile."""
    if COUNTED:
        histogram.add_pairs(bins, _max_of_pairs(pair, _NO_PAIR))
    both = tl.reduce(tl.reduce(pair, 1, _max_of_pairs), 1, _max_of_pairs)
    top = tl.maximum(tl.maximum(_low_half(both), _high_half(both)), float("-inf"))
    tl.store(max_SN + at, top, mask=mask)
    if COUNTED or temperature > 0:
        pair = _max_of_pairs(pair, _NO_PAIR)
        # x * scale - shift is rounded once, and by what the shift was rounded the sum is corrected. Numbers so large
        # that this is too much differ, if at all, so much that a smaller scale tells them apart as well.
        peak = clamped(top)
        scale = tl.minimum(LOG2_E / temperature, 2.0**28 / tl.maximum(tl.abs(peak), 1.0))
        shift = peak * scale
        by, less = scale.expand_dims(1).expand_dims(1), (-shift).expand_dims(1).expand_dims(1)
        weight = tl.exp2(tl.fma(_low_half(pair), by, less)) + tl.exp2(tl.fma(_high_half(pair), by, less))
        mass = tl.sum(tl.sum(weight, 1), 1) * tl.exp2(tl.fma(peak, -scale, shift))
        tl.store(mass_SN + at, mass, mask=mask)


@triton.jit
def _masked_pairs(pair, tile, size, masks):
    """Pairs of -inf for tokens that the row's mask doesn't allow."""
    word = tile[:, None] * 4 + tl.arange(0, 4)[None, :]  # of a quarter of a tile
    bits = tl.load(masks + word, mask=word * 32 < size, other=0)[:, :, None] >> (
        tl.arange(0, TILE_SIZE // 8)[None, None, :] * 2
    )
    allowed = (-(bits & 1) & 0xFFFF) | (-((bits >> 1) & 1) << 16)
    return (pair & allowed) | (_NO_PAIR & ~allowed)


@triton.jit
def _load_tiles(logits, tile, size, PAIRS: tl.constexpr):
    """Of neighbouring tiles."""
    if PAIRS:
        quarter, pair = tl.arange(0, 4)[None, :, None], tl.arange(0, TILE_SIZE // 8)[None, None, :]
        column = tile[:, None, None] * (TILE_SIZE // 2) + (quarter * (TILE_SIZE // 8) + pair)
        loaded = tl.load(_as_pairs(logits) + column, mask=column < size // 2, other=_NO_PAIR)
    else:
        column = tile[:, None] * TILE_SIZE + tl.arange(0, TILE_SIZE)[None, :]
        loaded = tl.load(logits + column, mask=column < size, other=float("-inf"))
    return loaded


@triton.jit
def _pass_over(
    max_SN, mass_SN, s, first, steps, loaded, logits, size, num_tiles, temperature, masks, counts, bins,
    TILES: tl.constexpr, PAIRS: tl.constexpr, MASKED: tl.constexpr, COUNTED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """A row without rules, but maybe a mask. loaded: its first tiles."""
    tile = first + tl.arange(0, TILES)
    for step in range(steps):
        following = _load_tiles(logits, tile + TILES, tl.where(step < steps - 1, size, 0), PAIRS)
        at, mask = s * num_tiles + tile, tile < num_tiles
        if PAIRS:
            if MASKED:
                loaded = _masked_pairs(loaded, tile, size, masks)
            _store_stats_of_pairs(max_SN, mass_SN, at, mask, loaded, temperature, bins, COUNTED)
        else:
            x = as_logits(loaded)
            if MASKED:
                x = masked(x, tile, size, masks)
            _store_stats(max_SN, mass_SN, at, mask, x, temperature)
            if COUNTED:
                histogram.add(counts, bins, x, SHARED)
        loaded, tile = following, tile + TILES


@triton.jit(do_not_specialize=["steps"], do_not_specialize_on_alignment=["rows_S", "positions_S"])
def _tile_stats_kernel(
    max_SN, mass_SN, counts_SPB, scratch_SV, logits_SV, rows_S, positions_S, params_RP, words_RV, slots_R3S, masks_RW,
    size, row_stride, words_stride, masks_stride, num_tiles, steps,
    HAS_RULES: tl.constexpr, PAIRS: tl.constexpr, TILES: tl.constexpr, RULED_TILES: tl.constexpr,
    COUNTS: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program for some tiles of a row: enough loads in flight to keep the memory busy.
    steps = steps if COUNTS else 1
    s, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    counts = counts_SPB + (s * tl.num_programs(1) + part) * histogram.NUM_BINS
    bins = histogram.place(SHARED)
    if COUNTS:
        histogram.clear(counts, bins, SHARED)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # only now: see overlap()
    logits, first = logits_SV + s * row_stride, part * steps * TILES
    loaded = _load_tiles(logits, first + tl.arange(0, TILES), size, PAIRS)  # before it is known what the row asks
    row = tl.load(rows_S + s)
    temperature, counted = float_param(params_RP, row, _TEMPERATURE), False
    if COUNTS:
        counted = (int_param(params_RP, row, _TOP_K) > 0) | (float_param(params_RP, row, _TOP_P) < 1)
        counted &= temperature > 0
    is_masked, masks = has_mask(params_RP, row, HAS_RULES), masks_RW + row * masks_stride
    if singles_out(params_RP, row, HAS_RULES):
        position, scratch, within = tl.load(positions_S + s), scratch_SV + s * size, tl.arange(0, TILE_SIZE)[None, :]
        words = words_RV + row * words_stride
        FEW_TILES: tl.constexpr = RULED_TILES if RULED_TILES < 8 else 8
        at = (first + tl.arange(0, RULED_TILES))[:, None] * TILE_SIZE + within
        word, raw = tl.load(words + at, mask=at < size, other=0), tl.load(logits + at, mask=at < size, other=0)
        for i in range(first, first + steps * TILES, RULED_TILES):
            some, here = i + tl.arange(0, RULED_TILES), at < size
            x, rules = tl.where(here, as_logits(raw), float("-inf")), rules_of(word)
            following, more = at + RULED_TILES * TILE_SIZE, at + RULED_TILES * TILE_SIZE < size
            raw = tl.load(logits + following, mask=more, other=0)
            if rules < 2:
                if is_masked:
                    x = masked(x, some, size, masks)
                if rules == 1:
                    x = penalized(x, word, row, params_RP)
                tl.store(scratch + at, x, mask=here)
            else:
                # A few by themselves: what they look up would spread the others over the threads as it suits that.
                for j in range(i, i + RULED_TILES, FEW_TILES):
                    few = j + tl.arange(0, FEW_TILES)
                    one = few[:, None] * TILE_SIZE + within
                    y = as_logits(tl.load(logits + one, mask=one < size, other=float("-inf")))
                    y = apply_rules(y, one, size, row, position, params_RP, words, slots_R3S)
                    if is_masked:
                        y = masked(y, few, size, masks)
                    tl.store(scratch + one, y, mask=one < size)
                tl.debug_barrier()
                x = tl.load(scratch + at, mask=here, other=float("-inf"))
            word, at = tl.load(words + following, mask=more, other=0), following
            _store_stats(max_SN, mass_SN, s * num_tiles + some, some < num_tiles, x, temperature)
            if counted:
                histogram.add(counts, bins, x, SHARED)
    elif is_masked:  # and counted, asked for or not: a pass less to compile
        _pass_over(
            max_SN, mass_SN, s, first, steps, loaded, logits, size, num_tiles, temperature, masks, counts, bins,
            TILES, PAIRS, True, COUNTS, SHARED,
        )  # fmt: skip
    elif COUNTS and counted:
        _pass_over(
            max_SN, mass_SN, s, first, steps, loaded, logits, size, num_tiles, temperature, masks, counts, bins,
            TILES, PAIRS, False, True, SHARED,
        )  # fmt: skip
    else:
        _pass_over(
            max_SN, mass_SN, s, first, steps, loaded, logits, size, num_tiles, temperature, masks, counts, bins,
            TILES, PAIRS, False, False, SHARED,
        )  # fmt: skip
    if counted:
        histogram.finish(counts, bins, SHARED)


def _tile_stats_triton(
    rows: RowLogits, counts: bool = False, parts: int = 0, tiles: int = 0, num_warps: int = 0
) -> tuple[Tensor, Tensor]:
    state, (num_rows, size) = rows.state, rows.logits_SV.shape
    num_tiles, steps, tiles = -(-size // TILE), 1, tiles or (128 if counts else 64)
    num_warps = num_warps or (16 if counts else 4)
    if counts:
        # Two programs fit a multiprocessor. If more did, those that start early would crowd on the first to be free.
        parts = parts or max(2 * gpu(rows.logits_SV.device).num_sms // max(num_rows, 1), 1)
        steps = -(-num_tiles // (tiles * parts))
    grid = num_rows, -(-num_tiles // (tiles * steps))
    max_SN, mass_SN = (rows.logits_SV.new_empty(num_rows, num_tiles, dtype=torch.float32) for _ in range(2))
    if rows.has_rules:
        rows.scratch_SV = rows.logits_SV.new_empty(num_rows, size, dtype=torch.float32)
    rows.counts_SPB = rows.logits_SV.new_empty(*grid, histogram.BINS, dtype=torch.int32) if counts else None
    if num_rows:
        _tile_stats_kernel[grid](
            max_SN,
            mass_SN,
            max_SN if rows.counts_SPB is None else rows.counts_SPB,
            max_SN if rows.scratch_SV is None else rows.scratch_SV,
            rows.logits_SV,
            rows.rows_S,
            rows.positions_S,
            state.params_RP,
            state.words_RV,
            state.slots_R3S,
            state.masks_RW,
            size,
            rows.logits_SV.stride(0),
            state.words_RV.stride(0),
            state.masks_RW.stride(0),
            num_tiles,
            steps,
            HAS_RULES=rows.has_rules,
            PAIRS=_in_pairs(rows.logits_SV),
            TILES=tiles,
            RULED_TILES=num_warps,  # a warp a tile, whose mass is summed in one order then, however many they are
            COUNTS=counts,
            SHARED=counts and isinstance(_tile_stats_kernel, triton.JITFunction),  # not interpreted
            num_warps=num_warps,
            maxnreg=64,  # which is enough for all of it
            **overlap(rows.logits_SV.device),
        )
    return max_SN, mass_SN


def tile_stats(rows: RowLogits, counts: bool = False) -> tuple[Tensor, Tensor]:
    """Returns (largest logit, mass), float32 [S, tiles] each, of the logits with the rows' rules applied.

    Mass is the sum of exp((logit - the tile's largest) / temperature): 1 to 128, or 0 where all are -inf. What it is
    in rows of temperature 0 says nothing. On a GPU rows.scratch_SV is made here, and has the logits of rows with rules
    other than a mask. With counts rows.counts_SPB has how many are in each bin of kernels.histogram, of rows with top_k
    or top_p; what fills up the last tiles is in bin 0 too. Floor on a GPU: one read of the logits.
    """
    return _tile_stats_triton(rows, counts) if runs_triton(rows.logits_SV) else tile_stats_reference(rows)
