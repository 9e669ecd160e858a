"""The sampler on several ranks, each a thread of this process: they choose what one rank chooses."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanollm.distributed.partition import vocab_shard_size
from nanollm.distributed.tp_group import TPGroup
from nanollm.kernels.token_rules import SamplerState
from nanollm.layers.sampler import Filters, Sampler
from tests.kernels.sampling_checks import make_rules, make_state
from tests.kernels.test_filters_and_draws import COMBINATIONS, chi_squared_passes, probabilities_of

SIZE = 1000  # 3 ranks have 384, 384 and 232 of these tokens
NUM_ROWS = 300


class Meeting:
    """Lets threads exchange tensors as ranks do."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.given: list[Any] = [None] * size

    def exchange(self, rank: int, x: Tensor) -> Tensor:
        self.given[rank] = x.clone()
        self.barrier.wait(30)
        everything = torch.stack(self.given)
        self.barrier.wait(30)
        return everything


class Thread(TPGroup):
    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, len(meeting.given))
        self.meeting = meeting

    def all_gather(self, x: Tensor) -> Tensor:
        return self.meeting.exchange(self.rank, x)


def on_threads(size: int, run: Callable[[TPGroup], Any]) -> list[Any]:
    meeting, results = Meeting(size), [None] * size

    def start(rank: int) -> None:
        try:
            results[rank] = run(TPGroup() if size == 1 else Thread(rank, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert None not in results
    return results


def shard_of(state: SamplerState, start: int, length: int) -> SamplerState:
    words = torch.nn.functional.pad(state.words_RV[:, start : start + length], (0, length))[:, :length]
    tensors = {name: tensor.clone() for name, tensor in vars(state).items()}
    masks = torch.nn.functional.pad(state.masks_RW, (0, length // 32))[:, start // 32 :][:, : length // 32]
    return SamplerState(**(tensors | {"words_RV": words.contiguous(), "masks_RW": masks.contiguous()}))


def sample_on(
    size: int,
    logits: Tensor,
    state: SamplerState,
    filters: Filters,
    mode: str = "raw_logprobs",
    every: int = 3,
    num_top: int = 5,
) -> list[Any]:
    """(tokens of two steps, log probabilities of the second, of every few rows) on each rank."""
    length = vocab_shard_size(logits.shape[1], size)

    def run(tp: TPGroup) -> Any:
        start = min(tp.rank * length, logits.shape[1])
        ours = logits[:, start : start + length]
        vocab = range(start, start + ours.shape[1])
        ours = torch.nn.functional.pad(ours, (0, length - ours.shape[1]), value=float("-inf"))
        last = torch.zeros(len(state.params_RP), dtype=torch.int64)
        sampler = Sampler(shard_of(state, start, length), last, vocab, tp, mode)
        rows = torch.arange(len(logits))
        first, _ = sampler.sample(ours, rows, rows + 7, filters)
        second, logprobs = sampler.sample(ours, rows, rows + 8, filters, (rows[::every], num_top))
        assert torch.equal(last[:-1], second)
        return torch.stack((first, second)), logprobs

    return on_threads(size, run)


CASES: dict[str, tuple[dict[str, list[float]], Filters]] = {
    "greedy": ({"TEMPERATURE": [0.0], "TOP_P": [0.5]}, Filters.NONE),
    "temperature": ({"TEMPERATURE": [0.8]}, Filters.NONE),
    "min_p": ({"MIN_P": [0.05]}, Filters.LARGEST),
    "top_k": ({"TOP_K": [1, 20, 64] * 100}, Filters.LARGEST),
    "small top_k and all others": ({"TOP_K": [50], "TOP_P": [0.7], "MIN_P": [0.01]}, Filters.LARGEST),
    "large top_k": ({"TOP_K": [65, 500, 2000] * 100}, Filters.ALL),
    "top_p": ({"TOP_P": [0.9, 0.3, 1.0] * 100}, Filters.ALL),
    "all of it": ({"TOP_P": [0.9], "TOP_K": [0, 300, 10] * 100, "TEMPERATURE": [0, 1, 1.5] * 100}, Filters.ALL),
}


@pytest.mark.parametrize("rules", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_two_and_three_ranks_choose_what_one_chooses(name: str, rules: bool) -> None:
    columns, filters = CASES[name]
    torch.manual_seed(0)
    logits = torch.randn(NUM_ROWS, SIZE) * 2
    logits[::7] = logits[::7].round()  # ties, at the k-th largest too
    logits[5] = 1.0
    logits[8] = float("-inf")
    state = make_state(NUM_ROWS, SIZE, **columns)
    if rules:
        make_rules(state, NUM_ROWS, SIZE)
    ((expected, expected_logprobs),) = sample_on(1, logits, state, filters)
    assert (expected[:, 8] == -1).all() and len(expected.unique()) > 30
    for size in (2, 3):
        for tokens, logprobs in sample_on(size, logits, state, filters):
            assert torch.equal(tokens, expected)
            torch.testing.assert_close(logprobs[:, :7], expected_logprobs[:, :7], rtol=1e-6, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("size", "vocab_size"), [(2, 512), (3, 600)])  # of 600 the third rank has 88
@pytest.mark.parametrize("name", COMBINATIONS)
def test_draws_on_several_ranks_have_the_frequencies_of_the_softmax(name: str, size: int, vocab_size: int) -> None:
    """20,000 draws, which differ in nothing but their seed."""
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    columns = {"TEMPERATURE": [1.0], "TOP_K": [0], "TOP_P": [1.0], "MIN_P": [0.0]} | COMBINATIONS[name]
    state = make_state(20_000, 1, SEED_LOW=list(range(20_000)), **columns)
    filters = Filters.of(*(values[0] for values in columns.values()))  # type: ignore[arg-type]
    length = vocab_shard_size(vocab_size, size)

    def run(tp: TPGroup) -> Tensor:
        vocab = range(vocab_size)[tp.rank * length :][:length]
        ours = torch.full((1, length), float("-inf"))
        ours[0, : len(vocab)] = logits[vocab.start : vocab.stop]
        last = torch.zeros(len(state.params_RP), dtype=torch.int64)
        sampler = Sampler(state, last, vocab, tp, "raw_logprobs")
        for rows in torch.arange(20_000).split(2000):  # which fit a cache
            sampler.sample(ours.expand(len(rows), -1), rows, torch.full_like(rows, 5), filters)
        return last[:-1]

    first, *others = on_threads(size, run)
    assert all(torch.equal(first, other) for other in others)
    expected = probabilities_of(logits.numpy(), columns)
    assert chi_squared_passes(first, expected)
    wrong = expected * np.where(np.arange(vocab_size) % 2, 1.2, 1.0)
    assert not chi_squared_passes(first, wrong / wrong.sum()), "the test could fail"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_log_probabilities_are_those_of_log_softmax(size: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, SIZE) * 3
    state = make_state(9, SIZE, TEMPERATURE=[0.5], TOP_K=[30])
    for tokens, found in sample_on(size, logits, state, Filters.LARGEST):
        expected = logits[::3].double().log_softmax(-1)
        sampled = tokens[1, ::3]
        logprob, rank, top, ids = found.split([1, 1, 5, 5], -1)
        torch.testing.assert_close(logprob[:, 0], expected.gather(1, sampled[:, None])[:, 0], atol=1e-5, rtol=0)
        assert rank[:, 0].tolist() == [
            1 + int((row > row[i]).sum()) for row, i in zip(logits[::3], sampled, strict=True)
        ]
        torch.testing.assert_close(top, expected.topk(5).values, atol=1e-5, rtol=0)
        assert torch.equal(ids.long(), expected.topk(5).indices)


@pytest.mark.parametrize("size", [1, 2])
def test_processed_log_probabilities_are_of_what_was_drawn_from(size: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, SIZE) * 3
    state = make_state(3, SIZE, TEMPERATURE=[0.5, 2.0, 0.0], TOP_K=[3])
    for mode in ("processed_logprobs", "processed_logits", "raw_logits"):
        for tokens, found in sample_on(size, logits, state, Filters.LARGEST, mode):
            x = logits[0].double() / (0.5 if mode.startswith("processed") else 1)
            if mode == "processed_logprobs":
                x = x.where(x >= x.topk(3).values[-1], float("-inf")).log_softmax(-1)
            torch.testing.assert_close(found[0, 0], x[tokens[1, 0]], atol=1e-5, rtol=0)
            torch.testing.assert_close(found[0, 2:5], x.topk(3).values, atol=1e-5, rtol=0)
            assert torch.isinf(found[0, 5:7]).all() == mode.startswith("processed")


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("vocab_size", [300, 200])  # of 3 ranks the last has 44 tokens, or none
def test_impossible_tokens_among_the_likeliest_are_tokens_that_exist(size: int, vocab_size: int) -> None:
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(0))
    logits[1, 3:] = float("-inf")
    state = make_state(2, vocab_size, TOP_K=[3])
    for mode in ("processed_logprobs", "processed_logits", "raw_logprobs"):
        for _, found in sample_on(size, logits, state, Filters.LARGEST, mode, every=1, num_top=vocab_size):
            assert found[:, 2 : 2 + vocab_size].isfinite().sum(-1).tolist() == [vocab_size if "raw" in mode else 3, 3]
            assert (found[:, 2 + vocab_size :].sort(-1).values == torch.arange(vocab_size)).all()


@pytest.mark.parametrize(
    ("parameters", "filters"),
    [
        ((0.0, 5, 0.5, 0.5), Filters.NONE),
        ((1.0, 0, 1.0, 0.0), Filters.NONE),
        ((1.0, 0, 1.0, 0.1), Filters.LARGEST),
        ((1.0, 64, 0.5, 0.1), Filters.LARGEST),
        ((1.0, 65, 1.0, 0.0), Filters.ALL),
        ((1.0, 0, 0.5, 0.1), Filters.ALL),
    ],
)
def test_what_filters_need_of_other_ranks(parameters: tuple[float, int, float, float], filters: Filters) -> None:
    assert Filters.of(*parameters) is filters
