"""The largest logit of each tile of 128 tokens, and the tile's probability mass: all that most of sampling looks at."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanollm.kernels.backend import gdc_launch_dependents, gdc_wait, overlap, runs_triton, tl, triton
from nanollm.kernels.token_rules import RowLogits, apply_rules, as_logits, float_param, has_rules
from nanollm.sampling_params import TEMPERATURE

TILE = 128  # tokens; the shards of a vocabulary are whole tiles
TILE_SIZE = tl.constexpr(TILE)
LARGEST = 3.4028234663852886e38  # float32
LOG2_E = tl.constexpr(1.4426950408889634)
BIN = 2**16  # keys; one value of bfloat16
_TEMPERATURE, _LARGEST, _BIN = (tl.constexpr(value) for value in (TEMPERATURE, LARGEST, BIN))


@dataclass
class Guess:
    """Brackets in which the rows' filters likely cut, and what tile_stats finds there; see kernels.threshold.

    bracket_2S: int32, keys [from, to) of logits; none if they are equal. bins_BS: int32, zeros, to which tile_stats
    adds how many logits have their keys in each 2**16 of the bracket. above_SN: float32, as mass_SN of tile_stats but
    of logits above the bracket alone; written in rows that have one.
    """

    bracket_2S: Tensor
    bins_BS: Tensor
    above_SN: Tensor


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
def number_of(key):
    """The float32 that has this key: int32 that order as the numbers do, 0 for both zeros."""
    magnitude = tl.where(key < 0, -key, key)
    return (magnitude | (key & -(2**31))).to(tl.float32, bitcast=True)


@triton.jit
def _made_good(mass, rounded, has_any):
    right = tl.abs(rounded) < 60
    return tl.where(right, mass * tl.exp2(tl.where(right, rounded, 0.0)), tl.where(has_any, 1.0, 0.0))


@triton.jit
def _store_stats(
    max_SN, mass_SN, above_SN, bins_BS, s, num_rows, tile, num_tiles, x, temperature, from_key, to_key,
    TILES: tl.constexpr, GUESSES: tl.constexpr,
):  # fmt: skip
    at, mask = s * num_tiles + tile, tile < num_tiles
    top = tl.max(x, 1)
    tl.store(max_SN + at, top, mask=mask)
    if temperature > 0:
        # x * scale - shift is one instruction, rounded once; what shift itself was rounded by is made good a tile.
        scale = LOG2_E / temperature
        shift = clamped(top) * scale
        rounded = tl.fma(clamped(top), -scale, shift)
        # Where that is much, numbers that differ are so far apart that the largest weighs all.
        weight = tl.exp2(tl.fma(x, scale, -shift[:, None]))
        tl.store(mass_SN + at, _made_good(tl.sum(weight, 1), rounded, top > float("-inf")), mask=mask)
        if GUESSES and to_key > from_key:  # of one sign
            larger = tl.sum(tl.where(x >= number_of(to_key), weight, 0.0), 1)
            tl.store(above_SN + at, _made_good(larger, rounded, top >= number_of(to_key)), mask=mask)
            # Key - from_key. Numbers of the other sign come out as no less than the width.
            sign = tl.where(from_key < 0, -1, 1)
            offset = x.to(tl.int32, bitcast=True) * sign + (tl.where(from_key < 0, -2147483648, 0) - from_key)
            offset = offset.to(tl.uint32, bitcast=True)
            # In any order, so that nothing moves between threads.
            offset = tl.reshape(offset, (TILES * TILE_SIZE,), can_reorder=True)
            inside = offset < (to_key - from_key).to(tl.uint32, bitcast=True)
            bins = bins_BS + s + (offset // _BIN).to(tl.int32) * num_rows
            tl.atomic_add(bins, 1, mask=inside, sem="relaxed")


@triton.jit
def store_stats(
    max_SN, mass_SN, above_SN, bins_BS, s, num_rows, first, row, temperature, from_key, to_key, scratch_SV, logits_SV,
    positions_S, params_RP, words_RV, slots_R3S, masks_RW, size, row_stride, words_stride, masks_stride, num_tiles,
    HAS_RULES: tl.constexpr, GUESSES: tl.constexpr, TILES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """tile_stats of TILES tiles of a row from `first` on, STEP at a time."""
    logits, within = logits_SV + s * row_stride, tl.arange(0, TILE_SIZE)[None, :]
    if has_rules(params_RP, row, HAS_RULES):
        position = tl.load(positions_S + s)
        FEW: tl.constexpr = STEP // 16  # for rules take registers that the other rows would lack
        for i in range(0, TILES, FEW):
            tile = first + i + tl.arange(0, FEW)
            column = tile[:, None] * TILE_SIZE + within
            x = as_logits(tl.load(logits + column, mask=column < size, other=float("-inf")))
            x = apply_rules(
                x, column, column < size, row, position, params_RP, words_RV, words_stride, slots_R3S, masks_RW,
                masks_stride,
            )  # fmt: skip
            tl.store(scratch_SV + s * size + column, x, mask=column < size)
            _store_stats(
                max_SN, mass_SN, above_SN, bins_BS, s, num_rows, tile, num_tiles, x, temperature, from_key, to_key,
                FEW, GUESSES,
            )  # fmt: skip
    else:
        for i in range(0, TILES, STEP):
            tile = first + i + tl.arange(0, STEP)
            column = tile[:, None] * TILE_SIZE + within
            x = as_logits(tl.load(logits + column, mask=column < size, other=float("-inf")))
            _store_stats(
                max_SN, mass_SN, above_SN, bins_BS, s, num_rows, tile, num_tiles, x, temperature, from_key, to_key,
                STEP, GUESSES,
            )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["rows_S", "positions_S", "bracket_2S"])
def _tile_stats_kernel(
    max_SN, mass_SN, above_SN, bins_BS, bracket_2S, scratch_SV, logits_SV, rows_S, positions_S, params_RP, words_RV,
    slots_R3S, masks_RW, size, row_stride, words_stride, masks_stride, num_tiles,
    HAS_RULES: tl.constexpr, GUESSES: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program for some tiles of a row: enough loads in flight to keep the memory busy.
    s, num_rows = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # only now: see overlap()
    row = tl.load(rows_S + s)
    from_key, to_key = 0, 0
    if GUESSES:
        from_key, to_key = tl.load(bracket_2S + s), tl.load(bracket_2S + num_rows + s)
    store_stats(
        max_SN, mass_SN, above_SN, bins_BS, s, num_rows, tl.program_id(0) * TILES, row,
        float_param(params_RP, row, _TEMPERATURE), from_key, to_key, scratch_SV, logits_SV, positions_S, params_RP,
        words_RV, slots_R3S, masks_RW, size, row_stride, words_stride, masks_stride, num_tiles,
        HAS_RULES, GUESSES, TILES, TILES,
    )  # fmt: skip


def logits_arguments(rows: RowLogits) -> tuple[Tensor | int, ...]:
    """What kernels need to read logits and apply rules: scratch_SV, which is made here, to num_tiles."""
    state, (num_rows, size) = rows.state, rows.logits_SV.shape
    if rows.has_rules:
        rows.scratch_SV = rows.logits_SV.new_empty(num_rows, size, dtype=torch.float32)
    return (
        state.params_RP if rows.scratch_SV is None else rows.scratch_SV,
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
        -(-size // TILE),
    )


def _tile_stats_triton(
    rows: RowLogits, guess: Guess | None = None, tiles: int = 32, num_warps: int = 4
) -> tuple[Tensor, Tensor]:
    num_rows, size = rows.logits_SV.shape
    num_tiles = -(-size // TILE)
    max_SN, mass_SN = (rows.logits_SV.new_empty(num_rows, num_tiles, dtype=torch.float32) for _ in range(2))
    found = (max_SN, max_SN, rows.rows_S) if guess is None else (guess.above_SN, guess.bins_BS, guess.bracket_2S)
    arguments = logits_arguments(rows)
    if num_rows:
        _tile_stats_kernel[(-(-num_tiles // tiles), num_rows)](
            max_SN,
            mass_SN,
            *found,
            *arguments,
            HAS_RULES=rows.has_rules,
            GUESSES=guess is not None,
            TILES=tiles,
            num_warps=num_warps,
            maxnreg=None if guess is None else 80,
            **overlap(rows.logits_SV.device),
        )
    return max_SN, mass_SN


def tile_stats(rows: RowLogits, guess: Guess | None = None) -> tuple[Tensor, Tensor]:
    """Returns (largest logit, mass), float32 [S, tiles] each, of the logits with the rows' rules applied.

    Mass is the sum of exp((logit - the tile's largest) / temperature): 1 to 128, or 0 where all are -inf. What it is
    in rows of temperature 0 says nothing. On a GPU the logits of rows with rules are left in rows.scratch_SV, which is
    made here, and what a guess asks for is found in the same read. Floor on a GPU: one read of the logits.
    """
    return _tile_stats_triton(rows, guess) if runs_triton(rows.logits_SV) else tile_stats_reference(rows)
