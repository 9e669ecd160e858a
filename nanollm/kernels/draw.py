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
from nanollm.kernels.tile_stats import LARGEST, TILE, TILE_SIZE, in_tiles
from nanollm.kernels.token_rules import RowLogits, float_param, has_rules, int_param, load_logits
from nanollm.sampling_params import CHOICE, SEED_HIGH, SEED_LOW, TEMPERATURE

_TEMPERATURE, _SEED_LOW, _SEED_HIGH, _CHOICE = (
    tl.constexpr(column) for column in (TEMPERATURE, SEED_LOW, SEED_HIGH, CHOICE)
)
_LARGEST = tl.constexpr(LARGEST)
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

    # Relative to the row's largest, so that nothing is rounded away where the temperature is tiny.
    peak_S1 = max_SN.amax(-1, keepdim=True).clamp(-LARGEST, LARGEST)
    tiles_SN = torch.arange(x_SNT.shape[1], device=x_SNT.device).expand(len(x_SNT), -1)
    top_SN = max_SN.clamp(-LARGEST, LARGEST)
    log_mass_SN = torch.exp((x_SNT - top_SN[..., None]) / scale_S1[..., None]).sum(-1).log()
    log_mass_SN = torch.where(greedy_S[:, None], 0.0, log_mass_SN)
    tile_SN = (max_SN - peak_S1) / scale_S1 + log_mass_SN + noise(tiles_SN + rows.first_id // TILE, TILES)
    value_S, tile_S = tile_SN.max(-1)
    x_ST = x_SNT[torch.arange(len(x_SNT)), tile_S]
    ids_ST = rows.first_id + tile_S[:, None] * TILE + torch.arange(TILE, device=x_SNT.device)
    index_S = ((x_ST - peak_S1) / scale_S1 + noise(ids_ST, TOKENS)).argmax(-1, keepdim=True)
    value_S = peak_S1[:, 0].double() / scale_S1[:, 0].double() + value_S.double()
    nothing_S = max_SN.amax(-1) == float("-inf")
    value_S = value_S.masked_fill(nothing_S, float("-inf"))
    return value_S, ids_ST.gather(1, index_S)[:, 0].masked_fill(nothing_S, -1)


@triton.jit(do_not_specialize_on_alignment=["threshold_S", "rows_S", "positions_S"])
def _draw_kernel(
    value_S,
    id_S,
    tiles_SN,
    max_SN,
    mass_SN,
    threshold_S,
    scratch_SV,
    logits_SV,
    rows_S,
    positions_S,
    params_RP,
    size,
    row_stride,
    num_tiles,
    first_id,
    HAS_THRESHOLD: tl.constexpr,
    HAS_RULES: tl.constexpr,
    ALL_TILES: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, position = tl.load(rows_S + s), tl.load(positions_S + s)
    t = tl.arange(0, ALL_TILES)
    top = tl.load(max_SN + s * num_tiles + t, mask=t < num_tiles, other=float("-inf"))
    peak = tl.max(top, 0)
    finite_peak = tl.minimum(tl.maximum(peak, -_LARGEST), _LARGEST)
    temperature = float_param(params_RP, row, _TEMPERATURE)
    seed_low, seed_high = int_param(params_RP, row, _SEED_LOW), int_param(params_RP, row, _SEED_HIGH)
    choice = int_param(params_RP, row, _CHOICE)
    threshold = tl.load(threshold_S + s) if HAS_THRESHOLD else float("-inf")
    within = tl.arange(0, TILE_SIZE)
    ruled = has_rules(params_RP, row, HAS_RULES)
    logits, scratch = logits_SV + s * row_stride, scratch_SV + s * size
    if temperature == 0:
        _, tile = tl.max(top, 0, return_indices=True, return_indices_tie_break_left=True)
        value = peak.to(tl.float64)
    else:
        mass = tl.load(mass_SN + s * num_tiles + t, mask=t < num_tiles, other=0.0)
        noise = gumbel_noise(noise_word(seed_low, seed_high, choice, position, first_id // TILE_SIZE + t, TILE_STREAM))
        least = tl.where((top >= threshold) & (mass > 0), (top - finite_peak) / temperature + noise, float("-inf"))
        most = least + tl.log(mass)
        best, tile = tl.max(most, 0, return_indices=True, return_indices_tie_break_left=True)
        if HAS_THRESHOLD and threshold > float("-inf"):
            # Of a tile's tokens some may be below the threshold: then its value is less than `most`, but not less than
            # that of its largest token alone. The few tiles that may win so are looked at together.
            may_win = most >= tl.max(least, 0) - _SLACK
            count, tiles = tl.sum(may_win.to(tl.int32), 0), tiles_SN + s * ALL_TILES
            tl.store(tiles + tl.cumsum(may_win.to(tl.int32), 0) - 1, t, mask=may_win)
            tl.debug_barrier()
            best = tl.full((), float("-inf"), tl.float32)
            for first in range(0, count, GROUP):
                number = first + tl.arange(0, GROUP)
                candidate = tl.load(tiles + number, mask=number < count, other=0)
                column = candidate[:, None] * TILE_SIZE + within[None, :]
                x = load_logits(logits, scratch, column, column < size, ruled, HAS_RULES)
                largest = tl.minimum(tl.max(x, 1), _LARGEST)
                weight = tl.exp2((x - largest[:, None]) * (1.4426950408889634 / temperature))
                log_mass = tl.log(tl.sum(tl.where(x >= threshold, weight, 0.0), 1))
                word = noise_word(seed_low, seed_high, choice, position, first_id // TILE_SIZE + candidate, TILE_STREAM)
                exact = (largest - finite_peak) / temperature + log_mass + gumbel_noise(word)
                exact = tl.where(number < count, exact, float("-inf"))
                highest, at = tl.max(exact, 0, return_indices=True, return_indices_tie_break_left=True)
                winner = tl.sum(tl.where(number - first == at, candidate, 0), 0)
                tile = tl.where(highest > best, winner, tile)  # they ascend: of equals the first stays
                best = tl.maximum(best, highest)
        value = finite_peak.to(tl.float64) / temperature.to(tl.float64) + best.to(tl.float64)
    column = tile * TILE_SIZE + within
    x = load_logits(logits, scratch, column, column < size, ruled, HAS_RULES)
    if temperature > 0:
        noise = gumbel_noise(noise_word(seed_low, seed_high, choice, position, first_id + column, TOKEN_STREAM))
        x = tl.where(x >= threshold, (x - finite_peak) / temperature + noise, float("-inf"))
    _, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    nothing = peak == float("-inf")
    tl.store(value_S + s, tl.where(nothing, float("-inf"), value))
    tl.store(id_S + s, tl.where(nothing, -1, first_id + tile * TILE_SIZE + index).to(tl.int64))


def _draw_triton(
    rows: RowLogits, max_SN: Tensor, mass_SN: Tensor, threshold_S: Tensor | None, num_warps: int = 16
) -> tuple[Tensor, Tensor]:
    num_rows, size = rows.logits_SV.shape
    num_tiles = max_SN.shape[1]
    all_tiles = max(power_of_2(num_tiles), TILE)
    tiles_SN = max_SN if threshold_S is None else max_SN.new_empty(num_rows, all_tiles, dtype=torch.int32)
    value_S = max_SN.new_empty(num_rows, dtype=torch.float64)
    id_S = max_SN.new_empty(num_rows, dtype=torch.int64)
    if num_rows:
        _draw_kernel[(num_rows,)](
            value_S,
            id_S,
            tiles_SN,
            max_SN,
            mass_SN,
            max_SN if threshold_S is None else threshold_S,
            rows.logits_SV if rows.scratch_SV is None else rows.scratch_SV,
            rows.logits_SV,
            rows.rows_S,
            rows.positions_S,
            rows.state.params_RP,
            size,
            rows.logits_SV.stride(0),
            num_tiles,
            rows.first_id,
            HAS_THRESHOLD=threshold_S is not None,
            HAS_RULES=rows.has_rules,
            ALL_TILES=all_tiles,
            GROUP=16,
            num_warps=num_warps,
            **overlap(max_SN.device),
        )
    return value_S, id_S


def draw(rows: RowLogits, max_SN: Tensor, mass_SN: Tensor, threshold_S: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """This rank's candidate: (value float64 [S], token id int64 [S]).

    max_SN, mass_SN: of tile_stats, of the same rows. threshold_S: float32; only tokens whose logit (with the rules
    applied) is at least this are drawn; -inf, or None for all rows, is no limit. At temperature 0 it is the largest
    logit, the lowest id of equals, and its value is the logit. Values of different shards compare; of equals the lower
    tile wins.
    A row whose logits are all -inf has value -inf and id -1.
    On a GPU a tile is read only if it may win: a program a row, that reads [tiles] numbers and few tiles of logits.
    """
    run = _draw_triton if runs_triton(rows.logits_SV) else draw_reference
    return run(rows, max_SN, mass_SN, threshold_S)
