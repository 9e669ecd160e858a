"""One check for each Triton kernel of sampling, as kernels.checks has them for the others."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanollm import sampling_params
from nanollm.kernels.advance_rows import _advance_rows_triton, advance_rows_reference
from nanollm.kernels.backend import tl, triton
from nanollm.kernels.draw import _draw_triton, draw_reference
from nanollm.kernels.histogram import BINS
from nanollm.kernels.noise import TOKEN_STREAM, TOKENS, gumbel, gumbel_noise, noise_word, noise_words
from nanollm.kernels.threshold import Limits, _threshold_triton, threshold_reference
from nanollm.kernels.tile_stats import _tile_stats_triton, tile_stats_reference
from nanollm.kernels.token_rules import COUNT_MASK, SLOT_SHIFT, RowLogits, SamplerState
from nanollm.layers.sampler import _processed
from nanollm.sampling_params import (
    BAD_PREFIX,
    FREQUENCY,
    HAS_MASK,
    NUM_SLOTS,
    ONLY_BANS,
    PRESENCE,
    REPETITION,
    RULES,
    SINGLES_OUT,
    TEMPERATURE,
    TOP_P,
)
from tests.kernels.checks import randn


@triton.jit
def _noise_kernel(words, noise, seed_low, seed_high, choice, position, first_id, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    seeds = tl.load(seed_low), tl.load(seed_high)
    word = noise_word(seeds[0], seeds[1], tl.load(choice), tl.load(position), first_id + i, TOKEN_STREAM)
    tl.store(words + i, word.to(tl.int64))
    tl.store(noise + i, gumbel_noise(word))


def check_noise(*, device: str) -> None:
    """Integers bit for bit; the float noise within rounding, most of all where it is large, since those values win."""
    for seed, choice, position, first_id in [
        (0, 0, 0, 0), (-1, 3, 17, 4096), (2**63 - 1, 2**31 - 1, 2**31 + 5, 151_552), (-(2**63), 1, 40_000, 4)
    ]:  # fmt: skip
        halves = torch.tensor([seed]).view(torch.int32)[:, None].to(device)
        parameters = [torch.tensor([value], device=device) for value in (seed, choice, position)]
        words = torch.zeros(2048, dtype=torch.int64, device=device)
        noise = torch.zeros(2048, device=device)
        _noise_kernel[(1,)](words, noise, *halves, *parameters[1:], first_id, SIZE=2048)
        ids = first_id + torch.arange(2048, device=device)
        expected = noise_words(*parameters, ids[None], TOKENS)[0]
        assert torch.equal(words, expected)
        u = ((expected.double() + 0.5) / 2**32).float().clamp(max=1 - 2**-24)
        exact = -torch.log(-torch.log1p(-u.double()))
        for approximation in (noise, gumbel(expected)):
            torch.testing.assert_close(approximation.double(), exact, rtol=5e-7, atol=4e-6)


def make_state(num_rows: int, size: int, device: str = "cpu", **columns: list[float]) -> SamplerState:
    """Rows without any filter or rule at temperature 1, but for the columns that are given (lists of a value a row)."""
    state = SamplerState.empty(num_rows + 1, size, torch.device(device))
    given = {"TEMPERATURE": [1.0], "TOP_P": [1.0], "REPETITION": [1.0], "SEED_LOW": list(range(num_rows))} | columns
    for name, values in given.items():
        column = getattr(sampling_params, name)
        dtype = torch.int32 if name in ("SEED_LOW", "SEED_HIGH", "CHOICE", "TOP_K", "RULES") else torch.float32
        values = list(values) * num_rows if len(values) == 1 else values
        state.params_RP[:num_rows, column] = torch.tensor(values, dtype=dtype).view(torch.int32).to(device)
    return state


def make_rules(state: SamplerState, num_rows: int, size: int) -> None:
    """Random penalties, biases and bans for every second row, of some only the bans; of half the others, masks."""
    words = torch.zeros_like(state.words_RV)
    words += torch.randint(0, 4, words.shape).to(words) * (torch.rand(words.shape) < 0.1).to(words)
    slots = torch.randint(0, NUM_SLOTS, words.shape) * (torch.rand(words.shape) < 0.3)
    words |= slots.to(words) << SLOT_SHIFT
    words[(torch.rand(words.shape) < 0.1).to(words.device)] |= -(2**31)
    state.words_RV.copy_(words)
    state.slots_R3S[:, 0] = torch.randn(state.slots_R3S[:, 0].shape).view(torch.int32).to(words)
    state.slots_R3S[:, 1:] = torch.randint(0, 12, state.slots_R3S[:, 1:].shape).to(words)
    state.slots_R3S[:, :, 0] = 0
    state.masks_RW.copy_(torch.randint(-(2**31), 2**31, state.masks_RW.shape))
    for row in range(0, num_rows, 2):
        state.params_RP[row, RULES] = SINGLES_OUT | (HAS_MASK if row % 4 == 0 else 0)
        values = torch.tensor([0.5 + row, 0.3, -0.7])
        if row % 6 == 4:
            state.params_RP[row, RULES] |= ONLY_BANS
            state.slots_R3S[row, 0], values = 0, torch.tensor([1.0, 0.0, 0.0])
        state.params_RP[row, [REPETITION, FREQUENCY, PRESENCE]] = values.view(torch.int32).to(words)
    state.params_RP[1:num_rows:4, RULES] = HAS_MASK


def check_tile_stats(num_rows: int, size: int, *, device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = randn(num_rows, size + 8, device=device, dtype=dtype)[:, :size] * 3
    logits[:, ::7] = float("-inf")
    logits[0, 0] = float("nan")
    # Where x * scale has no bits left for what the x of a tile differ by
    huge = torch.tensor([1e5, -1e5, 1e9, -1e9, 1e30, -3e38, float("-inf")], device=device)
    token = torch.arange(size, device=device)
    logits[-1] = huge[token // 128 % len(huge)] * (token % 128 + 1)
    state = make_state(num_rows, size, device, TEMPERATURE=[0.7])
    make_rules(state, num_rows, size)
    order = torch.randperm(num_rows, device=device)
    rows = RowLogits(logits, order, order + 3, state)
    maxima, mass = _tile_stats_triton(rows)
    expected = tile_stats_reference(rows)
    torch.testing.assert_close(maxima, expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mass, expected[1], rtol=2e-5, atol=0)


def check_counts(num_rows: int, size: int, parts: int, *, device: str, dtype: torch.dtype) -> None:
    """A bin's count is how many logits there are whose keys' upper 16 bits are the bin's, kept within the bins."""
    torch.manual_seed(0)
    logits = randn(num_rows, size, device=device, dtype=dtype) * 3
    logits[:, ::5] *= 1e-7
    logits[:, 1::5] *= 100
    logits[:, :3] = torch.tensor([float("-inf"), float("nan"), 3e4], device=device)[:size]
    kind = [s % 3 for s in range(num_rows)]  # counted, without a filter, without a temperature
    state = make_state(
        num_rows, size, device, TOP_P=[1.0 if k == 1 else 0.9 for k in kind], TEMPERATURE=[float(k < 2) for k in kind]
    )
    state.params_RP[::2, RULES] = HAS_MASK
    state.masks_RW.copy_(torch.randint(-(2**31), 2**31, state.masks_RW.shape))
    index = torch.arange(num_rows, device=device)
    rows, plain = (RowLogits(logits, index, index, state) for _ in range(2))
    (max_SN, mass_SN), (plain_max_SN, plain_mass_SN) = _tile_stats_triton(rows, True, parts), _tile_stats_triton(plain)
    drawn_S = rows.floats(TEMPERATURE) > 0  # to the last bit, for what is drawn must not depend on others' filters
    assert torch.equal(max_SN, plain_max_SN) and torch.equal(mass_SN[drawn_S], plain_mass_SN[drawn_S])
    x_SV = rows.processed().logits_SV[::3]
    bits_SV = x_SV.view(torch.int32)
    steps_SV = torch.where(bits_SV < 0, -(bits_SV & 0x7FFFFFFF), bits_SV) >> 16
    least = 0x3380  # 2**-24
    positive_SV = (steps_SV - least).clamp(0, BINS // 2 - 1) + BINS // 2
    bin_SV = torch.where(steps_SV >= 0, positive_SV, (steps_SV + least).clamp(1 - BINS // 2, 0) + BINS // 2 - 1)
    assert rows.counts_SPB is not None
    count_SB = rows.counts_SPB[::3].sum(1)
    count_SB[:, 0] -= count_SB.sum(1) - size  # what fills up the last tiles
    for count_B, bin_V in zip(count_SB, bin_SV, strict=True):
        assert torch.equal(count_B, bin_V.bincount(minlength=BINS))


def check_threshold(
    logits: Tensor, state: SamplerState, *, exact: bool = True, parts: int = 1, **settings: Any
) -> None:
    """The same kept set as the definition's, which sorts in float64.

    exact: False allows what float32 sums of the mass allow: the set of another top_p, 2e-6 away. parts: of a row, whose
    logits are counted apart; 0 for none, which changes nothing but the time. settings: of RowLogits.
    """
    num_rows = len(logits)
    index = torch.arange(num_rows, device=logits.device)
    rows = RowLogits(logits, index, index + 3, state, **settings)
    stats = _tile_stats_triton(rows, parts > 0, parts)
    limits = _threshold_triton(rows, *stats)
    _draw_triton(rows, *stats, limits)  # which settles what is open
    found = limits.threshold_S
    x = rows.processed().logits_SV
    if exact:
        expected = [threshold_reference(rows)] * 2
    else:
        bounds = []
        for change in (2e-6, -2e-6):
            changed = replace(state, params_RP=state.params_RP.clone())
            changed.params_RP.view(torch.float32)[:, TOP_P] += change
            bounds.append(threshold_reference(replace(rows, state=changed)))
        expected = bounds
    kept, most, least = ((x >= limit[:, None]).sum(-1).tolist() for limit in (found, *expected))
    for row, (fewest, count, largest) in enumerate(zip(least, kept, most, strict=True)):
        assert fewest <= count <= largest, f"row {row} keeps {count} tokens, not {fewest} to {largest}"


FILTERS = {
    "TEMPERATURE": [1.0, 0.6, 1.0, 1.3, 0.6, 1.0, 2.0, 0.0, 0.01, 1.0, 1.5, 0.7, 1.0],
    "TOP_K": [0, 0, 20, 20, 1, 3000, 500, 5, 7, 2**30, 0, 90, 0],
    "TOP_P": [0.9, 1.0, 1.0, 0.95, 0.9, 0.5, 0.999, 0.5, 0.9, 1e-9, 0.8, 0.9, 0.9],
    "MIN_P": [0.0, 0.05, 0.0, 0.02, 0.0, 0.0, 1e-5, 0.5, 0.0, 0.0, 1e-3, 0.0, 1.0],
}
FILTERED = len(FILTERS["TOP_K"])


def adversarial_logits(num_rows: int, size: int, kind: str, device: str, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(num_rows, size) * 2
    if kind == "sharp":
        x *= 4
    if kind == "ties":
        x = x.round()
    if kind == "equal":
        x = x * 0 + 1.5
    if kind == "mostly banned":
        x[:, 3:] = float("-inf")
    if kind == "one-hot":
        x = x * 0
        x[:, size // 2] = 60.0
    if kind == "peaked":
        x[:, ::97] += 12
    if kind == "zipf":
        x = -1.1 * torch.rand(num_rows, size).argsort(-1).add(1).log()
    if kind == "sorted":
        x = x.sort(-1).values
    if kind == "negative":
        x -= 30
    if kind == "far below":
        x -= 258
    if kind == "huge":
        x *= 200
    if kind == "tiny":
        x *= 1e-8
    if kind == "cut at zero":  # by the first of FILTERS
        x -= 1.44
    if kind == "infinite":
        x[:, 5], x[:, 6] = float("inf"), float("nan")
    return x.to(device, dtype)


KINDS = [
    "random",
    "sharp",
    "ties",
    "equal",
    "mostly banned",
    "one-hot",
    "peaked",
    "zipf",
    "sorted",
    "negative",
    "far below",
    "huge",
    "tiny",
    "cut at zero",
    "infinite",
]


def check_filters(size: int, kind: str, *, device: str, dtype: torch.dtype) -> None:
    state = make_state(FILTERED, size, device, **FILTERS)
    exact = dtype != torch.float32 and size < 50_000  # a boundary of many values may fall within float32 rounding
    logits = adversarial_logits(FILTERED, size, kind, device, dtype)
    logits[:, 7:8] = float("nan")
    for parts in (0, 3) if device == "cpu" else (0, 1, 3):
        check_threshold(logits, state, exact=exact, parts=parts)


def check_filters_of_gathered_logits(size: int, *, device: str) -> None:
    """As ranks have them: float32, with the values of bfloat16, but in rows whose rules changed them."""
    state = make_state(FILTERED, size, device, **FILTERS)
    make_rules(state, FILTERED, size)
    logits = adversarial_logits(FILTERED, size, "random", device, torch.bfloat16)
    index = torch.arange(FILTERED, device=device)
    rows = RowLogits(logits, index, index + 3, state)
    check_threshold(rows.processed().logits_SV, state, exact=False, has_rules=False, raw_dtype=torch.bfloat16)


def check_filters_after_rules(size: int, *, device: str, dtype: torch.dtype) -> None:
    state = make_state(FILTERED, size, device, **FILTERS)
    make_rules(state, FILTERED, size)
    logits = adversarial_logits(FILTERED, size, "random", device, dtype)
    logits[:, ::7] = float("nan")
    check_threshold(logits, state, exact=False)
    index = torch.arange(FILTERED, device=device)
    rows = RowLogits(logits, index, index + 3, state)
    _tile_stats_triton(rows)
    torch.testing.assert_close(_processed(rows), rows.processed().logits_SV, rtol=1e-6, atol=1e-6)


def check_draw(num_rows: int, size: int, *, first_id: int, filtered: bool, device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = randn(num_rows, size + 8, device=device, dtype=dtype)[:, :size] * 2
    logits[-1] = float("-inf")
    temperature = (torch.rand(num_rows) * (torch.arange(num_rows) % 3 > 0)).tolist()
    filters = {"TOP_P": [0.8], "TOP_K": [max(size // 3, 1)]} if filtered else {}
    state = make_state(num_rows, size, device, TEMPERATURE=temperature, SEED_HIGH=[5], CHOICE=[1], **filters)
    make_rules(state, num_rows, size)
    index = torch.arange(num_rows, device=device)
    rows = RowLogits(logits, index, index + 3, state, first_id)
    stats = _tile_stats_triton(rows, counts=filtered)
    limits = Limits(threshold_reference(rows))
    found = _threshold_triton(rows, *stats)
    draws = [_draw_triton(rows, *stats, of) for of in (limits, found, found)]  # which the first draw completes
    if not filtered:
        draws.append(_draw_triton(rows, *stats))
    expected_value, expected_id = draw_reference(rows, *stats, limits)
    for value, token_id in draws:
        # A near tie may fall either way, by the rounding of logarithms; with few random rows there is none.
        assert torch.equal(token_id, expected_id)
        assert token_id[-1] == -1
        torch.testing.assert_close(value, expected_value, rtol=2e-6, atol=2e-5)
        assert torch.equal(value[1::2], draws[0][0][1::2]), "rows with a mask at most are the same in any batch"
    drawn = rows.floats(TEMPERATURE) > 0
    beyond = Limits(torch.full_like(limits.threshold_S, 1e9).where(drawn, float("-inf")))  # all kept is on other ranks
    value, token_id = _draw_triton(rows, *stats, beyond)
    assert (value[drawn] == float("-inf")).all() and (token_id < first_id + size).all()


def check_ties(*, device: str) -> None:
    """Of equal logits the lowest id wins, within a tile and across tiles; a row of -inf has no token."""
    logits = torch.zeros(5, 5001, device=device)
    logits[1, [4999, 2500, 2499]] = 1.0
    logits[2, 5000] = 1.0
    logits[3] = float("-inf")
    logits[4] = float("nan")
    index = torch.arange(5, device=device)
    rows = RowLogits(logits, index, index, make_state(5, 5001, device, TEMPERATURE=[0.0]), 384)
    limits = Limits(threshold_reference(rows))
    for of in (None, limits):
        assert _draw_triton(rows, *_tile_stats_triton(rows), of)[1].tolist() == [384, 2883, 5384, -1, -1]


def check_advance_rows(*, device: str) -> None:
    """Integers, so exactly the definition's: counts, last tokens, and bad words of 1 to 16 tokens."""
    torch.manual_seed(0)
    state = make_state(6, 512, device, RULES=[0, 1, 3, 3, 3, 1])
    state.bad_words_RWN[:, :40, 0] = torch.randint(0, 50, (7, 40)).to(device)
    state.bad_words_RWN[:, :40, 1:] = torch.randint(-1, 2, (7, 40, BAD_PREFIX)).to(device)
    state.bad_words_RWN[:, :40, 1:-1] = -1
    state.last_RH[:] = torch.randint(0, 2, state.last_RH.shape).to(device)
    states = [replace(state, **{n: t.clone() for n, t in vars(state).items()}) for _ in range(2)]
    lasts = [torch.zeros(7, dtype=torch.int64, device=device) for _ in range(2)]
    row = torch.tensor([5, 0, 1, 2, 3, 4], device=device)
    for token_ids in ([600, 100, 101, 0, 1, -1], [1, 0, 700, 1, 0, 1]):
        arguments = (torch.tensor(token_ids, device=device), row, row * 10)
        _advance_rows_triton(*arguments, states[0], lasts[0], 100)
        advance_rows_reference(*arguments, states[1], lasts[1], 100)
    assert torch.equal(*lasts)
    assert states[0].words_RV[1, 1] & COUNT_MASK == 1
    assert (states[0].slots_R3S != state.slots_R3S).any()
    for name, ours in vars(states[0]).items():
        assert torch.equal(ours, getattr(states[1], name)), name
