"""The draw: one token from softmax(logits / temperature) over the tokens at or above a threshold, in two levels.

Gumbel-max (Gumbel, 1954): if g_i are independent standard Gumbel variables, argmax_i(log w_i + g_i) is i with
probability w_i / sum(w). One variable a token would cost more than reading the logits. Two levels need one a tile of
128 tokens, and 128 more:

1. Tile t has mass W_t = sum of its w_i. T = argmax_t(log W_t + g_t), so P(T = t) = W_t / W.
2. Within T, i = argmax(log w_i + g_i) with noise of its own, independent of the first, so P(i | T) = w_i / W_T.

Together P(i) = W_T / W × w_i / W_T = w_i / W: exactly the distribution wanted. Tiles are fixed ranges of token ids,
a tile lies on one rank as a whole, and its noise belongs to its number, so the same tile and the same token win
whatever the ranks. Each rank sends its best tile's value and token, and the largest value wins.

Before that, rows whose threshold kernels.threshold left open complete it, and read their tiles again.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
from torch import Tensor

from nanollm.kernels.backend import gdc_launch_dependents, gdc_wait, overlap, power_of_2, runs_triton, tl, triton
from nanollm.kernels.noise import (
    TILE_STREAM,
    TILES,
    TOKEN_STREAM,
    TOKENS,
    gumbel,
    gumbel_noise,
    noise_word,
    noise_words,
)
from nanollm.kernels.threshold import STATE_SIZE, Limits, cell_bits, settled
from nanollm.kernels.tile_stats import LARGEST, LOG2_E, TILE, TILE_SIZE, clamped, in_tiles
from nanollm.kernels.token_rules import RowLogits, float_param, int_param, load_logits, source_of
from nanollm.sampling_params import CHOICE, SEED_HIGH, SEED_LOW, TEMPERATURE

_TEMPERATURE, _SEED_LOW, _SEED_HIGH, _CHOICE = (
    tl.constexpr(column) for column in (TEMPERATURE, SEED_LOW, SEED_HIGH, CHOICE)
)
_LN_2 = tl.constexpr(0.6931471805599453)
_SLACK = tl.constexpr(1e-3)  # more than rounding can be off


def draw_reference(
    rows: RowLogits, max_SN: Tensor, mass_SN: Tensor, limits: Limits | None = None
) -> tuple[Tensor, Tensor]:
    """The definition; arguments as in draw. Every tile's mass is summed anew, over the tokens that may be drawn."""
    x_SNT = in_tiles(rows.processed().logits_SV)
    if limits is not None:
        x_SNT = x_SNT.where(x_SNT >= limits.threshold_S[:, None, None], float("-inf"))
    temperature_S, greedy_S = rows.floats(TEMPERATURE), rows.floats(TEMPERATURE) == 0
    scale_S1 = temperature_S.where(~greedy_S, 1.0)[:, None]
    seed_S = rows.ints(SEED_HIGH) << 32 | rows.ints(SEED_LOW) & 0xFFFFFFFF

    def noise(ids_SN: Tensor, stream: int) -> Tensor:
        words_SN = noise_words(seed_S, rows.ints(CHOICE), rows.positions_S, ids_SN, stream)
        return gumbel(words_SN).masked_fill(greedy_S[:, None], 0.0)

    tiles_SN = torch.arange(x_SNT.shape[1], device=x_SNT.device).expand(len(x_SNT), -1)
    top_SN = max_SN.clamp(-LARGEST, LARGEST)
    log_mass_SN = torch.exp((x_SNT - top_SN[..., None]) / scale_S1[..., None]).sum(-1).log()
    log_mass_SN = torch.where(greedy_S[:, None], 0.0, log_mass_SN)
    # In float64, so that nothing is rounded away where the temperature is tiny.
    noise_SN = log_mass_SN + noise(tiles_SN + rows.first_id // TILE, TILES)
    value_S, tile_S = (max_SN.double() / scale_S1.double() + noise_SN.double()).max(-1)
    index_S1 = tile_S[:, None]
    x_ST = x_SNT[torch.arange(len(x_SNT)), tile_S]
    ids_ST = rows.first_id + index_S1 * TILE + torch.arange(TILE, device=x_SNT.device)
    index_S1 = ((x_ST - top_SN.gather(1, index_S1)) / scale_S1 + noise(ids_ST, TOKENS)).argmax(-1, keepdim=True)
    nothing_S = max_SN.amax(-1) == float("-inf")
    return value_S, ids_ST.gather(1, index_S1)[:, 0].masked_fill(nothing_S, -1)


@triton.jit
def _value(top, mass, noise, temperature):
    """A tile's value, float64: of the tile alone, so the same one wins in any batch, on any number of ranks.

    Compilers may round a product and a sum once or twice, as each kernel suits them; of tl.fma there is one result.
    """
    log_mass_and_noise = tl.fma(tl.log2(mass), _LN_2, noise)
    return tl.fma(top.to(tl.float64), (1 / temperature).to(tl.float64), log_mass_and_noise.to(tl.float64))


@triton.jit
def _keyed(value, tile):
    """int64 that order as the values do, to 2**-36 of them, and of equals the lower tile last: one maximum finds both.
    Values without the last 16 bits, such as float32 numbers, stay what they are."""
    bits = value.to(tl.int64, bitcast=True)
    key = tl.where(bits < 0, -(bits & 0x7FFFFFFFFFFFFFFF), bits)
    return (key & -65536) | (65535 - tile)


@triton.jit
def _unkeyed(key):
    """value and tile."""
    bits = key & -65536
    bits = tl.where(bits < 0, -bits, bits) | (bits & -(2**63))
    return bits.to(tl.float64, bitcast=True), (65535 - (key & 65535)).to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=["threshold_S", "rows_S", "positions_S"])
def _draw_kernel(
    value_S, id_S, threshold_S, state_SW, found_SN, max_SN, mass_SN, scratch_SV, logits_SV, rows_S, positions_S,
    params_RP, masks_RW, size, row_stride, masks_stride, num_tiles, first_id,
    LIMITED: tl.constexpr, SETTLES: tl.constexpr, HAS_RULES: tl.constexpr, ALL_TILES: tl.constexpr,
    CELL_BITS: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    row, position = tl.load(rows_S + s), tl.load(positions_S + s)
    temperature = float_param(params_RP, row, _TEMPERATURE)
    seed_low, seed_high = int_param(params_RP, row, _SEED_LOW), int_param(params_RP, row, _SEED_HIGH)
    choice, t = int_param(params_RP, row, _CHOICE), tl.arange(0, ALL_TILES)
    source = source_of(s, row, size, logits_SV, row_stride, scratch_SV, masks_RW, masks_stride, params_RP, HAS_RULES)
    noise = tl.zeros((ALL_TILES,), tl.float32)
    if temperature > 0:
        word = noise_word(seed_low, seed_high, choice, position, first_id // TILE_SIZE + t, TILE_STREAM)
        noise = gumbel_noise(word)
    if PDL:  # only now: the noise needs nothing of the kernels before this one
        gdc_wait()
        gdc_launch_dependents()
    top = tl.load(max_SN + s * num_tiles + t, mask=t < num_tiles, other=float("-inf"))
    mass = tl.load(mass_SN + s * num_tiles + t, mask=t < num_tiles, other=0.0)
    threshold = tl.full((), float("-inf"), tl.float32)
    if LIMITED:
        threshold = tl.load(threshold_S + s)
        tl.store(id_S + s, 0)  # it counts, at first
    if SETTLES:
        threshold = settled(
            threshold, (found_SN + s * ALL_TILES).to(tl.pointer_type(tl.int32), bitcast=True),
            state_SW + s * STATE_SIZE, top, source, params_RP, row, num_tiles, CELL_BITS,
        )  # fmt: skip
        tl.store(threshold_S + s, threshold)
    value, possible = top.to(tl.float64), (top >= threshold) & (mass > 0)
    if temperature > 0:
        value = tl.where(possible, _value(top, mass, noise, temperature), float("-inf"))
    if (temperature > 0) & (threshold > float("-inf")):
        # Of a tile's tokens some may be below the threshold: then its value is less than this one, but not less than
        # that of its largest token alone. The few tiles that may win so are looked at together.
        least = tl.where(possible, _value(top, tl.zeros_like(top) + 1.0, noise, temperature), float("-inf"))
        may_win = possible & (value >= tl.max(least, 0) - _SLACK)
        found = found_SN + s * ALL_TILES
        tl.debug_barrier()
        place = tl.atomic_add(id_S + s + tl.zeros_like(t), 1, mask=may_win, sem="relaxed")  # in any order
        tl.store(found + place, t.to(tl.int64) << 32 | noise.to(tl.uint32, bitcast=True), mask=may_win)
        tl.debug_barrier()
        count = tl.load(id_S + s, volatile=True)
        key = _keyed(tl.full((), float("-inf"), tl.float64), 0)  # a shard may have nothing to draw
        for first in range(0, count, GROUP):
            number = first + tl.arange(0, GROUP)
            tile_and_noise = tl.load(found + number, mask=number < count, other=0)
            candidate = (tile_and_noise >> 32).to(tl.int32)
            x = load_logits(source, candidate[:, None] * TILE_SIZE + tl.arange(0, TILE_SIZE)[None, :])
            largest = tl.max(x, 1)
            kept = tl.where(x >= threshold, tl.exp2((x - clamped(largest)[:, None]) * (LOG2_E / temperature)), 0.0)
            its_noise = tile_and_noise.to(tl.int32).to(tl.float32, bitcast=True)
            exact = tl.where(number < count, _value(largest, tl.sum(kept, 1), its_noise, temperature), float("-inf"))
            key = tl.maximum(key, tl.max(_keyed(exact, candidate), 0))
    else:
        key = tl.max(_keyed(value, t), 0)
    value, tile = _unkeyed(key)
    column = tile * TILE_SIZE + tl.arange(0, TILE_SIZE)
    x = load_logits(source, column)
    top = tl.load(max_SN + s * num_tiles + tile)
    if temperature > 0:
        word = noise_word(seed_low, seed_high, choice, position, first_id + column, TOKEN_STREAM)
        x = tl.where(x >= threshold, tl.fma(x - clamped(top), 1 / temperature, gumbel_noise(word)), float("-inf"))
    _, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(value_S + s, value)
    tl.store(id_S + s, tl.where(top == float("-inf"), -1, first_id + tile * TILE_SIZE + index).to(tl.int64))


def _draw_triton(
    rows: RowLogits, max_SN: Tensor, mass_SN: Tensor, limits: Limits | None = None, num_warps: int = 0
) -> tuple[Tensor, Tensor]:
    num_rows, size = rows.logits_SV.shape
    num_tiles = max_SN.shape[1]
    all_tiles = max(power_of_2(num_tiles), TILE)
    value_S = max_SN.new_empty(num_rows, dtype=torch.float64)
    id_S = max_SN.new_empty(num_rows, dtype=torch.int64)
    limited, settles = limits is not None, limits is not None and limits.state_SW is not None
    num_warps = num_warps or (8 if settles else 4)
    limits = limits or Limits(max_SN)
    if num_rows:
        _draw_kernel[(num_rows,)](
            value_S,
            id_S,
            limits.threshold_S,
            limits.state_SW if settles else max_SN,
            id_S.new_empty(num_rows, all_tiles) if limited else id_S,
            max_SN,
            mass_SN,
            rows.logits_SV if rows.scratch_SV is None else rows.scratch_SV,
            rows.logits_SV,
            rows.rows_S,
            rows.positions_S,
            rows.state.params_RP,
            rows.state.masks_RW,
            size,
            rows.logits_SV.stride(0),
            rows.state.masks_RW.stride(0),
            num_tiles,
            rows.first_id,
            LIMITED=limited,
            SETTLES=settles,
            HAS_RULES=rows.has_rules,
            ALL_TILES=all_tiles,
            CELL_BITS=cell_bits(rows),
            GROUP=16,
            num_warps=num_warps,
            maxnreg=1024 // num_warps if settles else None,  # two programs fit a multiprocessor, so 256 rows an H200
            **overlap(max_SN.device),
        )
    return value_S, id_S


def draw(rows: RowLogits, max_SN: Tensor, mass_SN: Tensor, limits: Limits | None = None) -> tuple[Tensor, Tensor]:
    """This rank's candidate: (value float64 [S], token id int64 [S]).

    max_SN, mass_SN: of tile_stats, of the same rows. limits: only tokens whose logit (with the rules applied) is at
    least this are drawn, and threshold_S is completed; None for all rows, or -inf, is no limit. At temperature 0 it is
    the largest logit, the lowest id of equals, and its value is the logit. Values of different shards compare; of
    equals the lower tile wins. A row whose logits are all -inf has value -inf and id -1.
    On a GPU a tile is read only if it may win, or to complete a threshold: a program a row, that reads [tiles] numbers
    and mostly few tiles of logits.
    """
    run = _draw_triton if runs_triton(rows.logits_SV) else draw_reference
    return run(rows, max_SN, mass_SN, limits)
