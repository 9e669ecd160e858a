"""The draw: one token from softmax(logits / temperature) over the tokens at or above a threshold, in two levels.

Gumbel-max (Gumbel, 1954): if g_i are independent standard Gumbel variables, argmax_i(log w_i + g_i) is i with
probability w_i / sum(w). One variable a token would cost more than reading the logits. Two levels need one a tile of
128 tokens, and 128 more:

1. Tile t has mass W_t = sum of its w_i. T = argmax_t(log W_t + g_t), so P(T = t) = W_t / W.
2. Within T, i = argmax(log w_i + g_i) with noise of its own, independent of the first, so P(i | T) = w_i / W_T.

Together P(i) = W_T / W × w_i / W_T = w_i / W: exactly the distribution wanted. Tiles are fixed ranges of token ids,
a tile lies on one rank as a whole, and its noise belongs to its number, so the same tile and the same token win
whatever the ranks. Each rank sends its best tile's value and token, and the largest value wins.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
from torch import Tensor

from nanollm.kernels.backend import (
    arrival_counts,
    gdc_launch_dependents,
    gdc_wait,
    overlap,
    power_of_2,
    runs_triton,
    tl,
    triton,
)
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
from nanollm.kernels.tile_stats import (
    LARGEST,
    LOG2_E,
    TILE,
    TILE_SIZE,
    clamped,
    in_tiles,
    logits_arguments,
    store_stats,
    tile_stats_reference,
)
from nanollm.kernels.token_rules import RowLogits, float_param, has_rules, int_param, load_logits
from nanollm.sampling_params import CHOICE, SEED_HIGH, SEED_LOW, TEMPERATURE

_TEMPERATURE, _SEED_LOW, _SEED_HIGH, _CHOICE = (
    tl.constexpr(column) for column in (TEMPERATURE, SEED_LOW, SEED_HIGH, CHOICE)
)
_SLACK = tl.constexpr(1e-3)  # more than rounding can be off


def draw_reference(
    rows: RowLogits, max_SN: Tensor, mass_SN: Tensor, threshold_S: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The definition; arguments as in draw. Every tile's mass is summed anew, over the tokens that may be drawn."""
    x_SNT = in_tiles(rows.processed().logits_SV)
    if threshold_S is not None:
        x_SNT = x_SNT.where(x_SNT >= threshold_S[:, None, None], float("-inf"))
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
def _noise_of_tiles(tile, first_id, seed_low, seed_high, choice, position):
    return gumbel_noise(noise_word(seed_low, seed_high, choice, position, first_id // TILE_SIZE + tile, TILE_STREAM))


@triton.jit
def _value(top, log_mass_and_noise, temperature):
    """A tile's value, float64: of the tile alone, so the same one wins in any batch, on any number of ranks."""
    return top.to(tl.float64) * (1 / temperature).to(tl.float64) + log_mass_and_noise.to(tl.float64)


@triton.jit
def _draw_from_tile(
    value_S, id_S, s, value, tile, threshold, logits, scratch, size, first_id, temperature, seed_low, seed_high,
    choice, position, ruled,
    HAS_RULES: tl.constexpr,
):  # fmt: skip
    column = tile * TILE_SIZE + tl.arange(0, TILE_SIZE)
    x = load_logits(logits, scratch, column, column < size, ruled, HAS_RULES)
    top = tl.max(x, 0)
    if temperature > 0:
        word = noise_word(seed_low, seed_high, choice, position, first_id + column, TOKEN_STREAM)
        x = tl.where(x >= threshold, (x - clamped(top)) / temperature + gumbel_noise(word), float("-inf"))
    _, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(value_S + s, value)
    tl.store(id_S + s, tl.where(top == float("-inf"), -1, first_id + tile * TILE_SIZE + index).to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=["rows_S", "positions_S"])
def _read_and_draw_kernel(
    value_S, id_S, value_SP, tile_SP, arrived_S, max_SN, mass_SN, scratch_SV, logits_SV, rows_S, positions_S,
    params_RP, words_RV, slots_R3S, masks_RW, size, row_stride, words_stride, masks_stride, num_tiles, first_id,
    HAS_RULES: tl.constexpr, TILES: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # tile_stats, and the best of a program's tiles; a row's last program draws while other rows are still read.
    part, num_parts, s = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(rows_S + s)
    temperature = float_param(params_RP, row, _TEMPERATURE)
    store_stats(
        max_SN, mass_SN, max_SN, max_SN, s, 0, part * TILES, row, temperature, 0, 0, scratch_SV, logits_SV,
        positions_S, params_RP, words_RV, slots_R3S, masks_RW, size, row_stride, words_stride, masks_stride, num_tiles,
        HAS_RULES, False, TILES, STEP,
    )  # fmt: skip
    position, choice = tl.load(positions_S + s), int_param(params_RP, row, _CHOICE)
    seed_low, seed_high = int_param(params_RP, row, _SEED_LOW), int_param(params_RP, row, _SEED_HIGH)
    # Back from memory, in which every tile has a thread of its own: noise takes more instructions than its logits.
    tl.debug_barrier()
    t = part * TILES + tl.arange(0, TILES)
    top = tl.load(max_SN + s * num_tiles + t, mask=t < num_tiles, other=float("-inf"))
    value = top.to(tl.float64)
    if temperature > 0:
        noise = _noise_of_tiles(t, first_id, seed_low, seed_high, choice, position)
        mass = tl.load(mass_SN + s * num_tiles + t, mask=t < num_tiles, other=0.0)
        value = tl.where(mass > 0, _value(top, tl.log(mass) + noise, temperature), float("-inf"))
    best, at = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(value_SP + s * num_parts + part, best)
    tl.store(tile_SP + s * num_parts + part, part * TILES + at)
    tl.debug_barrier()  # all threads have stored before one of them says so
    if tl.atomic_add(arrived_S + s, 1, sem="acq_rel") == num_parts - 1:
        tl.store(arrived_S + s, 0)  # for the next launch
        p = tl.arange(0, PARTS)
        values = tl.load(value_SP + s * num_parts + p, mask=p < num_parts, other=float("-inf"), cache_modifier=".cg")
        best, at = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
        tile = tl.load(tile_SP + s * num_parts + at, cache_modifier=".cg")
        ruled = has_rules(params_RP, row, HAS_RULES)
        _draw_from_tile(
            value_S, id_S, s, best, tile, float("-inf"), logits_SV + s * row_stride, scratch_SV + s * size, size,
            first_id, temperature, seed_low, seed_high, choice, position, ruled, HAS_RULES,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["threshold_S", "rows_S", "positions_S"])
def _draw_kernel(
    value_S, id_S, found_SN, max_SN, mass_SN, threshold_S, scratch_SV, logits_SV, rows_S, positions_S, params_RP,
    size, row_stride, num_tiles, first_id,
    HAS_RULES: tl.constexpr, ALL_TILES: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    row, position = tl.load(rows_S + s), tl.load(positions_S + s)
    temperature = float_param(params_RP, row, _TEMPERATURE)
    seed_low, seed_high = int_param(params_RP, row, _SEED_LOW), int_param(params_RP, row, _SEED_HIGH)
    choice = int_param(params_RP, row, _CHOICE)
    t = tl.arange(0, ALL_TILES)
    noise = tl.zeros((ALL_TILES,), tl.float32)
    if temperature > 0:
        noise = _noise_of_tiles(t, first_id, seed_low, seed_high, choice, position)
    if PDL:  # only now: the noise needs nothing of the kernels before this one
        gdc_wait()
        gdc_launch_dependents()
    top = tl.load(max_SN + s * num_tiles + t, mask=t < num_tiles, other=float("-inf"))
    mass = tl.load(mass_SN + s * num_tiles + t, mask=t < num_tiles, other=0.0)
    threshold = tl.load(threshold_S + s)
    ruled = has_rules(params_RP, row, HAS_RULES)
    logits, scratch = logits_SV + s * row_stride, scratch_SV + s * size
    if temperature == 0:
        value, tile = tl.max(top, 0, return_indices=True, return_indices_tie_break_left=True)
        value = value.to(tl.float64)
    else:
        possible = (top >= threshold) & (mass > 0)
        most = tl.where(possible, _value(top, tl.log(mass) + noise, temperature), float("-inf"))
        if threshold > float("-inf"):
            # Of a tile's tokens some may be below the threshold: then its value is less than `most`, but not less than
            # that of its largest token alone. The few tiles that may win so are looked at together.
            least = tl.where(possible, _value(top, noise, temperature), float("-inf"))
            may_win = possible & (most >= tl.max(least, 0) - _SLACK)
            count, found = tl.sum(may_win.to(tl.int32), 0), found_SN + s * ALL_TILES
            numbered = t.to(tl.int64) << 32 | noise.to(tl.uint32, bitcast=True)
            tl.store(found + tl.cumsum(may_win.to(tl.int32), 0) - 1, numbered, mask=may_win)
            tl.debug_barrier()
            value, tile = tl.full((), float("-inf"), tl.float64), tl.full((), 0, tl.int32)
            for first in range(0, count, GROUP):
                number = first + tl.arange(0, GROUP)
                tile_and_noise = tl.load(found + number, mask=number < count, other=0)
                candidate = (tile_and_noise >> 32).to(tl.int32)
                column = candidate[:, None] * TILE_SIZE + tl.arange(0, TILE_SIZE)[None, :]
                x = load_logits(logits, scratch, column, column < size, ruled, HAS_RULES)
                largest = tl.max(x, 1)
                kept = tl.where(x >= threshold, tl.exp2((x - clamped(largest)[:, None]) * (LOG2_E / temperature)), 0.0)
                its_noise = tile_and_noise.to(tl.int32).to(tl.float32, bitcast=True)
                exact = _value(largest, tl.log(tl.sum(kept, 1)) + its_noise, temperature)
                exact = tl.where(number < count, exact, float("-inf"))
                highest, at = tl.max(exact, 0, return_indices=True, return_indices_tie_break_left=True)
                winner = tl.sum(tl.where(number - first == at, candidate, 0), 0)
                tile = tl.where(highest > value, winner, tile)  # they ascend: of equals the first stays
                value = tl.maximum(value, highest)
        else:
            value, tile = tl.max(most, 0, return_indices=True, return_indices_tie_break_left=True)
    _draw_from_tile(
        value_S, id_S, s, value, tile, threshold, logits, scratch, size, first_id, temperature, seed_low, seed_high,
        choice, position, ruled, HAS_RULES,
    )  # fmt: skip


def _read_and_draw_triton(rows: RowLogits, tiles: int = 64, num_warps: int = 2) -> tuple[Tensor, Tensor]:
    num_rows, size = rows.logits_SV.shape
    parts = -(-size // (tiles * TILE))
    value_S = rows.logits_SV.new_empty(num_rows, dtype=torch.float64)
    value_SP, id_S = value_S.new_empty(num_rows, parts), rows.rows_S.new_empty(num_rows)
    max_SN, mass_SN = (value_S.new_empty(num_rows, -(-size // TILE), dtype=torch.float32) for _ in range(2))
    arguments = logits_arguments(rows)
    if num_rows:
        _read_and_draw_kernel[(parts, num_rows)](
            value_S,
            id_S,
            value_SP,
            torch.empty_like(value_SP, dtype=torch.int32),
            arrival_counts(id_S.device, power_of_2(max(num_rows, 4096))),
            max_SN,
            mass_SN,
            *arguments,
            rows.first_id,
            HAS_RULES=rows.has_rules,
            TILES=tiles,
            STEP=8 * num_warps,
            PARTS=power_of_2(parts),
            num_warps=num_warps,
            **overlap(id_S.device),
        )
    return value_S, id_S


def read_and_draw(rows: RowLogits) -> tuple[Tensor, Tensor]:
    """draw for rows without filters, from the logits alone; leaves rows.scratch_SV as tile_stats does.

    Floor on a GPU: one read of the logits.
    """
    if runs_triton(rows.logits_SV):
        return _read_and_draw_triton(rows)
    return draw_reference(rows, *tile_stats_reference(rows), None)


def _draw_triton(
    rows: RowLogits, max_SN: Tensor, mass_SN: Tensor, threshold_S: Tensor, num_warps: int = 8
) -> tuple[Tensor, Tensor]:
    num_rows, size = rows.logits_SV.shape
    num_tiles = max_SN.shape[1]
    all_tiles = max(power_of_2(num_tiles), TILE)
    value_S = max_SN.new_empty(num_rows, dtype=torch.float64)
    id_S = max_SN.new_empty(num_rows, dtype=torch.int64)
    if num_rows:
        _draw_kernel[(num_rows,)](
            value_S,
            id_S,
            max_SN.new_empty(num_rows, all_tiles, dtype=torch.int64),
            max_SN,
            mass_SN,
            threshold_S,
            rows.logits_SV if rows.scratch_SV is None else rows.scratch_SV,
            rows.logits_SV,
            rows.rows_S,
            rows.positions_S,
            rows.state.params_RP,
            size,
            rows.logits_SV.stride(0),
            num_tiles,
            rows.first_id,
            HAS_RULES=rows.has_rules,
            ALL_TILES=all_tiles,
            GROUP=16,
            num_warps=num_warps,
            **overlap(max_SN.device),
        )
    return value_S, id_S


def draw(rows: RowLogits, max_SN: Tensor, mass_SN: Tensor, threshold_S: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's candidate: (value float64 [S], token id int64 [S]).

    max_SN, mass_SN: of tile_stats, of the same rows. threshold_S: float32; only tokens whose logit (with the rules
    applied) is at least this are drawn; -inf is no limit. At temperature 0 it is the largest logit, the lowest id of
    equals, and its value is the logit. Values of different shards compare; of equals the lower tile wins.
    A row whose logits are all -inf has value -inf and id -1.
    On a GPU a tile is read only if it may win: a program a row, that reads [tiles] numbers and few tiles of logits.
    """
    run = _draw_triton if runs_triton(rows.logits_SV) else draw_reference
    return run(rows, max_SN, mass_SN, threshold_S)
