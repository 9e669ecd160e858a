"""Sampling's definitions against oracles that share nothing with them: NumPy in float64, transformers, χ² tests."""

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from nanollm.kernels.advance_rows import advance_rows
from nanollm.kernels.draw import draw
from nanollm.kernels.noise import TILES, TOKENS, noise_words
from nanollm.kernels.threshold import threshold
from nanollm.kernels.tile_stats import tile_stats
from nanollm.kernels.token_rules import RowLogits, SamplerState
from nanollm.sampling_params import HAS_MASK, SINGLES_OUT
from tests.kernels.sampling_checks import FILTERED, FILTERS, KINDS, adversarial_logits, make_state


def sample_rows(logits: torch.Tensor, state: SamplerState, positions: torch.Tensor) -> torch.Tensor:
    token_ids = []
    for index in torch.arange(len(logits)).split(2000):  # which fit a cache
        rows = RowLogits(logits[index], index, positions[index], state)
        stats = tile_stats(rows)
        token_ids.append(draw(rows, *stats, threshold(rows, *stats))[1])
    return torch.cat(token_ids)


def test_noise_integers_stay_what_they_are() -> None:
    """The first word of Philox4x32-10; zeros are the generator's published test vector."""
    ids = torch.tensor([[0, 1, 127, 151_935]])

    def words(seed: int, choice: int, position: int, stream: int) -> list[int]:
        return noise_words(*(torch.tensor([value]) for value in (seed, choice, position)), ids, stream)[0].tolist()

    assert words(0, 0, 0, TOKENS) == GOLDEN[0]
    assert words(0, 0, 0, TOKENS)[0] == 0x6627E8D5
    assert words(-1, 3, 17, TILES) == GOLDEN[1]
    assert words(2**63 - 1, 0, 40_959, TOKENS) == GOLDEN[2]


GOLDEN = [
    [1713891541, 4175744164, 3659407846, 4207051111],
    [2954133450, 2353199572, 3121459213, 1516435923],
    [1101288724, 811360172, 1791850006, 955303081],
]


def kept_by(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which tokens the filters keep, in float64 and in words: min_p, then top_k, then top_p of what is left."""
    x = logits.astype(np.float64)
    if np.isinf(x.max()):
        return x == x.max()
    probabilities = np.exp((x - x.max()) / temperature)
    kept = probabilities >= min_p * (1 - 1e-6) if min_p < 1 else x == x.max()
    if top_k and top_k < len(x):
        kept &= x >= np.sort(x)[-top_k]
    if top_p < 1:
        probabilities = np.where(kept, probabilities, 0)
        probabilities /= probabilities.sum()
        values, counts = np.unique(x[kept], return_counts=True)
        larger = 0.0
        for value, count in zip(values[::-1], counts[::-1], strict=True):
            if larger > 0 and larger >= top_p - 1e-6:
                kept &= x > value
                break
            larger += count * probabilities[x == value][0]
    return kept


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "infinite"])
@pytest.mark.parametrize("size", [7, 512, 151_936])
def test_filters_keep_what_a_plain_reference_keeps(size: int, kind: str) -> None:
    logits = adversarial_logits(FILTERED, size, kind, "cpu", torch.bfloat16)
    index = torch.arange(FILTERED)
    rows = RowLogits(logits, index, index, make_state(FILTERED, size, **FILTERS))
    limits = threshold(rows, *tile_stats(rows)).threshold_S
    for row, (temperature, *filters) in enumerate(zip(*FILTERS.values(), strict=True)):
        kept = logits[row].float() >= limits[row]
        if temperature == 0:
            assert kept.all()
        else:
            assert np.array_equal(kept.numpy(), kept_by(logits[row].float().numpy(), temperature, *filters)), row


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.6, [2, 3]), (0.7, [2, 3]), (0.71, [1, 2, 3]), (0.4, [3]), (1e-9, [3]), (0.999, [0, 1, 2, 3])]
)
def test_top_p_of_ten_twenty_thirty_and_forty_per_cent(top_p: float, kept: list[int]) -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    rows = RowLogits(logits, torch.tensor([0]), torch.tensor([1]), make_state(1, 4, TOP_P=[top_p]))
    assert (logits[0] >= threshold(rows, *tile_stats(rows)).threshold_S).nonzero()[:, 0].tolist() == kept


def test_filters_keep_what_transformers_keeps() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 5000) * 3
    for columns, warper in [
        ({"TOP_K": [40]}, hf.TopKLogitsWarper(40)),
        ({"TOP_P": [0.8]}, hf.TopPLogitsWarper(0.8)),
        ({"MIN_P": [0.02]}, hf.MinPLogitsWarper(0.02)),
    ]:
        rows = RowLogits(logits, torch.tensor([0]), torch.tensor([1]), make_state(1, 5000, **columns))
        assert torch.equal(
            logits >= threshold(rows, *tile_stats(rows)).threshold_S, warper(None, logits) > float("-inf")
        )


COMBINATIONS: dict[str, dict[str, list[float]]] = {
    "temperature": {"TEMPERATURE": [0.7]},
    "top_k": {"TOP_K": [9]},
    "top_p": {"TOP_P": [0.6]},
    "min_p": {"MIN_P": [0.2]},
    "together": {"TEMPERATURE": [1.4], "TOP_K": [60], "TOP_P": [0.9], "MIN_P": [0.01]},
}


def chi_squared_passes(token_ids: torch.Tensor, expected: np.ndarray) -> bool:
    """Whether draws look like these probabilities, at 1 in 10,000. Rare tokens are counted together."""
    counts = np.bincount(token_ids.numpy(), minlength=len(expected)).astype(float)
    assert counts[expected == 0].sum() == 0
    expected = expected * len(token_ids)
    rare = expected < 10
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    # Wilson and Hilferty's cube root of χ² is normal, nearly.
    z = ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / (2 / (9 * freedom)) ** 0.5
    return bool(z < 3.72)


def probabilities_of(logits: np.ndarray, columns: dict[str, list[float]]) -> np.ndarray:
    defaults = {"TEMPERATURE": [1.0], "TOP_K": [0], "TOP_P": [1.0], "MIN_P": [0.0]} | columns
    temperature, top_k, top_p, min_p = (values[0] for values in defaults.values())
    kept = kept_by(logits, temperature, int(top_k), top_p, min_p)
    weights = np.where(kept, np.exp(logits.astype(np.float64) / temperature), 0)
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("name", "over"), [*((name, "seeds") for name in COMBINATIONS), ("together", "positions"), ("together", "choices")]
)
def test_draws_have_the_frequencies_of_the_softmax(name: str, over: str) -> None:
    """10⁵ draws of 512 tokens, which differ in nothing but their seed, or their position, or their choice index."""
    num_draws, size = 100_000, 512
    logits = torch.randn(size, generator=torch.Generator().manual_seed(3)) * 2
    numbers = list(range(num_draws))
    columns = {"seeds": {"SEED_LOW": numbers}, "choices": {"CHOICE": numbers}}.get(over, {})
    state = make_state(num_draws, 1, **({"SEED_LOW": [7]} | columns | COMBINATIONS[name]))
    positions = torch.arange(num_draws) if over == "positions" else torch.full((num_draws,), 5)
    token_ids = sample_rows(logits.expand(num_draws, -1), state, positions)
    assert chi_squared_passes(token_ids, probabilities_of(logits.numpy(), COMBINATIONS[name]))
    wrong = probabilities_of(logits.numpy() * 1.1, COMBINATIONS[name])
    assert not chi_squared_passes(token_ids, np.where(wrong > 0, wrong, 1e-12)), "the test could fail"


def test_draws_at_different_positions_have_nothing_to_do_with_each_other() -> None:
    """Pairs of draws at neighbouring positions, of 16 equal tokens: all 256 pairs are as frequent."""
    num_draws = 100_000
    state = make_state(num_draws, 1, SEED_LOW=[1])
    token_ids = sample_rows(torch.zeros(num_draws, 16), state, torch.arange(num_draws))
    assert chi_squared_passes(token_ids[:-1] * 16 + token_ids[1:], np.full(256, 1 / 256))


def test_a_tiny_temperature_takes_equal_logits_equally_often() -> None:
    num_draws = 20_000
    logits = torch.full((num_draws, 400), 20.0)
    logits[:, [3, 200, 399]] = 30.0
    token_ids = sample_rows(logits, make_state(num_draws, 1, TEMPERATURE=[1e-5]), torch.arange(num_draws))
    expected = np.zeros(400)
    expected[[3, 200, 399]] = 1 / 3
    assert chi_squared_passes(token_ids, expected)


def ruled(logits: torch.Tensor, state: SamplerState, position: int = 5) -> torch.Tensor:
    return RowLogits(logits[None], torch.tensor([0]), torch.tensor([position]), state).processed().logits_SV[0]


def with_counts(prompt: list[int], output: list[int], size: int, **penalties: list[float]) -> SamplerState:
    state = make_state(1, size, RULES=[1], **penalties)
    state.words_RV[0, sorted(set(prompt))] |= -(2**31)
    rows, last = torch.tensor([0]), torch.zeros(2, dtype=torch.int64)
    for i, token_id in enumerate(output):
        advance_rows(torch.tensor([token_id]), rows, rows + i, state, last, 0)
    return state


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    prompt, output = [1, 2, 2, 3], [3, 7, 7]
    for penalty in (0.01, 0.7, 1.3, 100.0):
        state = with_counts(prompt, output, 50, REPETITION=[penalty])
        expected = hf.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits[None].clone())
        torch.testing.assert_close(ruled(logits, state), expected[0])


def test_frequency_and_presence_penalties_count_the_output() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    state = with_counts([1, 2, 3], [3, 7] + [8] * 10_000, 50, FREQUENCY=[0.25], PRESENCE=[-0.5])
    expected = logits.clone()
    expected[3] += -0.25 + 0.5
    expected[7] += -0.25 + 0.5
    expected[8] += -0.25 * 10_000 + 0.5
    torch.testing.assert_close(ruled(logits, state), expected)


def test_a_mask_allows_the_tokens_of_its_bits_and_only_in_its_row() -> None:
    allowed = [0, 31, 32, 77, 99]
    state = make_state(2, 100, RULES=[SINGLES_OUT | HAS_MASK, SINGLES_OUT])
    for token_id in allowed:
        bit = token_id % 32
        state.masks_RW[0, token_id // 32] += 1 << bit if bit < 31 else -(2**31)
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    masked, free = RowLogits(logits, torch.tensor([0, 1]), torch.tensor([5, 5]), state).processed().logits_SV
    assert masked.isfinite().nonzero()[:, 0].tolist() == allowed
    assert torch.equal(masked[allowed], logits[0, allowed]) and torch.equal(free, logits[1])


def test_nan_is_never_drawn_and_no_finite_logit_gives_no_token() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan, 1.0, nan], [-inf, -inf, -inf], [nan, nan, -inf], [1.0, inf, nan], [-inf, -inf, 2.0]])
    for temperature in (0.0, 1.0):
        state = make_state(5, 3, TEMPERATURE=[temperature], TOP_P=[0.9], TOP_K=[2], MIN_P=[0.1])
        assert sample_rows(logits, state, torch.arange(5)).tolist() == [1, -1, -1, 1, 2]


def test_first_tokens_win_greedy_ties() -> None:
    logits = torch.zeros(3, 300)
    logits[1, [150, 299]] = 1.0
    logits[2, [128, 129]] = 1.0
    assert sample_rows(logits, make_state(3, 300, TEMPERATURE=[0.0]), torch.arange(3)).tolist() == [0, 150, 128]
