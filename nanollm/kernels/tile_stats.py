"""The largest logit of each tile of 128 tokens, and the tile's probability mass: all that most of sampling looks at."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import torch.nn.functional as F
from torch import Tensor

from nanollm.kernels.backend import gdc_launch_dependents, gdc_wait, overlap, runs_triton, tl, triton
from nanollm.kernels.token_rules import RowLogits, apply_rules, float_param, has_rules, load_raw
from nanollm.sampling_params import TEMPERATURE

TILE = 128  # tokens; the shards of a vocabulary are whole tiles
TILE_SIZE = tl.constexpr(TILE)
LARGEST = 3.4028234663852886e38  # float32
_TEMPERATURE = tl.constexpr(TEMPERATURE)
_HUGE = tl.constexpr(1e33)  # over any temperature still finite; larger logits count as infinite


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
def _store_stats(max_SN, mass_SN, at, tile, num_tiles, x, temperature):
    top = tl.max(x, 1)
    tl.store(max_SN + at + tile, top, mask=tile < num_tiles)
    if temperature > 0:
        # x * scale - shift is one instruction, rounded once; what shift itself was rounded by is made good a tile.
        scale = 1.4426950408889634 / temperature
        top = tl.minimum(tl.maximum(top, -_HUGE), _HUGE)
        shift = top * scale
        mass = tl.sum(tl.exp2(x * scale - shift[:, None]), 1) * tl.exp2(tl.fma(top, -scale, shift))
        tl.store(mass_SN + at + tile, mass, mask=tile < num_tiles)


@triton.jit(do_not_specialize_on_alignment=["rows_S", "positions_S"])
def _tile_stats_kernel(
    max_SN,
    mass_SN,
    scratch_SV,
    logits_SV,
    rows_S,
    positions_S,
    params_RP,
    words_RV,
    slots_R3S,
    masks_RW,
    size,
    row_stride,
    words_stride,
    masks_stride,
    num_tiles,
    HAS_RULES: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program for some tiles of a row: enough loads in flight to keep the memory busy.
    s, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILES
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # only now: see overlap()
    row, position = tl.load(rows_S + s), tl.load(positions_S + s)
    temperature = float_param(params_RP, row, _TEMPERATURE)
    within = tl.arange(0, TILE_SIZE)[None, :]
    if has_rules(params_RP, row, HAS_RULES):
        # Tile by tile, for rules take registers that the other rows would lack.
        for i in range(TILES):
            tile = first + i + tl.arange(0, 1)
            column = tile[:, None] * TILE_SIZE + within
            x = load_raw(logits_SV + s * row_stride, column, column < size)
            x = apply_rules(
                x,
                column,
                column < size,
                row,
                position,
                params_RP,
                words_RV,
                words_stride,
                slots_R3S,
                masks_RW,
                masks_stride,
            )
            tl.store(scratch_SV + s * size + column, x, mask=column < size)
            _store_stats(max_SN, mass_SN, s * num_tiles, tile, num_tiles, x, temperature)
    else:
        tile = first + tl.arange(0, TILES)
        column = tile[:, None] * TILE_SIZE + within
        x = load_raw(logits_SV + s * row_stride, column, column < size)
        _store_stats(max_SN, mass_SN, s * num_tiles, tile, num_tiles, x, temperature)


def _tile_stats_triton(rows: RowLogits, tiles: int = 32, num_warps: int = 4) -> tuple[Tensor, Tensor]:
    num_rows, size = rows.logits_SV.shape
    state, num_tiles = rows.state, -(-size // TILE)
    max_SN, mass_SN = (rows.logits_SV.new_empty(num_rows, num_tiles, dtype=torch.float32) for _ in range(2))
    if rows.has_rules:
        rows.scratch_SV = rows.logits_SV.new_empty(num_rows, size, dtype=torch.float32)
    if num_rows:
        _tile_stats_kernel[(num_rows, -(-num_tiles // tiles))](
            max_SN,
            mass_SN,
            rows.scratch_SV if rows.has_rules else max_SN,
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
            HAS_RULES=rows.has_rules,
            TILES=tiles,
            num_warps=num_warps,
            **overlap(rows.logits_SV.device),
        )
    return max_SN, mass_SN


def tile_stats(rows: RowLogits) -> tuple[Tensor, Tensor]:
    """Returns (largest logit, mass), float32 [S, tiles] each, of the logits with the rows' rules applied.

    Mass is the sum of exp((logit - the tile's largest) / temperature): 1 to 128, or 0 where all are -inf. What it is
    in rows of temperature 0 says nothing. On a GPU the logits of rows with rules are left in rows.scratch_SV, which is
    made here. Floor on a GPU: one read of the logits.
    """
    return (_tile_stats_triton if runs_triton(rows.logits_SV) else tile_stats_reference)(rows)
