"""Garbage collection beside generate: rare where it would hold steps up, and nothing of a program's is kept from it."""

import gc
from typing import Any

import pytest

from nanollm import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm(tiny: Any) -> Any:
    with tiny("qwen3").llm() as llm:
        yield llm


def test_collections_of_everything_are_rare_while_requests_run(llm: LLM) -> None:
    before = gc.get_threshold()
    first, second = (llm.generate_stream([[1, 2, 3]], SamplingParams(max_tokens=4)) for _ in range(2))
    next(first), next(second)
    assert gc.get_threshold() == (*before[:2], 10 * before[2])
    list(first)
    assert gc.get_threshold() != before  # the second still runs
    list(second)
    assert gc.get_threshold() == before


def test_thresholds_of_collections_that_a_program_sets_stay(llm: LLM) -> None:
    before = gc.get_threshold()
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    try:
        gc.set_threshold(700, 10, 2**29)  # ten times that is more than there can be
        llm.generate([[1, 2]], params, use_tqdm=False)
        assert gc.get_threshold() == (700, 10, 2**29)
        stream = llm.generate_stream([[1, 2]], params)
        next(stream)
        gc.set_threshold(5000, 20, 30)
        list(stream)
        assert gc.get_threshold() == (5000, 20, 30)
    finally:
        gc.set_threshold(*before)


class Node:
    """Of a program's own, in a cycle."""

    alive = 0

    def __init__(self) -> None:
        self.me = self
        Node.alive += 1

    def __del__(self) -> None:
        Node.alive -= 1


def test_garbage_of_programs_that_generate_again_and_again_is_collected(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for _ in range(300):
        node = Node()
        llm.generate([[1, 2]], params, use_tqdm=False)
    assert node.alive < 100, "collected by itself"
    del node
    stream = llm.generate_stream([[1, 2]], params)
    next(stream)
    gc.collect()
    assert not Node.alive, "or when the program asks for it, whatever runs"
    stream.close()


def test_finished_requests_leave_nothing_for_collections(llm: LLM) -> None:
    gc.collect()
    gc.disable()
    try:
        llm.generate([[1, 2]] * 8, SamplingParams(max_tokens=2, n=2, prompt_logprobs=2), use_tqdm=False)
        left = [each for each in gc.get_objects() if type(each).__module__ == "nanollm.text.output_processor"]
        assert not [each for each in left if type(each).__name__ in ("_Choice", "_Request")]
    finally:
        gc.enable()
