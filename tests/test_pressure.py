"""A cache that is too small, prompts cut anywhere, prefixes shared or not: the tokens are those of transformers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nanollm import LLM, SamplingParams
from tests.conftest import VARIED, random_prompt
from tests.soak import Soak, soak_seconds

NUM_NEW = 9
_expected: dict[tuple[int, ...], list[int]] = {}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tests are thousands of tiny steps, in which threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """What transformers generates; each prompt once."""
    key = tuple(prompt)
    if key not in _expected:
        _expected[key] = model.greedy(prompt, NUM_NEW)
    return _expected[key]


def prompts_around(block_size: int) -> list[list[int]]:
    """Prefixes of one text, and one of another, with lengths around whole blocks."""
    text = random_prompt(2 * block_size + 1, seed=20)
    lengths = [block_size - 1, block_size, block_size + 1, 1, 2 * block_size, 2 * block_size + 1]
    return [text[:length] for length in lengths if length] + [random_prompt(block_size + 1, seed=21)]


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_preempted_and_resumed_with_any_chunk_size(tiny: Any, block_size: int, overlap: bool) -> None:
    model = tiny("qwen3")
    prompts = prompts_around(block_size)
    expected = [greedy(model, prompt) for prompt in prompts]
    num_kv_blocks = -(-(2 * block_size + 1 + NUM_NEW) // block_size)  # just enough for the longest alone
    for i, chunk in enumerate(sorted({1, 7, 16, block_size - 1, block_size, block_size + 1, 0})):
        caching = (i + overlap) % 2 == 0  # each chunk size has it once
        with model.llm(
            num_kv_blocks=num_kv_blocks,
            block_size=block_size,
            long_prefill_token_threshold=chunk,
            enable_prefix_caching=caching,
            overlap=overlap,
        ) as llm:
            assert generate(llm, prompts) == expected
            assert generate(llm, prompts[::-1]) == expected[::-1]
            stats = llm.get_stats()
            assert stats.num_preemptions > 0 and (stats.prefix_hits > 0) == caching
            assert stats.num_free_blocks == stats.num_total_blocks


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [8, 16, 40])
def test_prompts_that_share_a_step_are_cut_where_it_is_full(tiny: Any, budget: int, overlap: bool) -> None:
    model = tiny("llama")
    prompts = [random_prompt(length, seed=23) for length in (15, 16, 17, 1, 33, 38)]
    with model.llm(num_kv_blocks=3, max_num_batched_tokens=budget, overlap=overlap) as llm:
        for order in (prompts, prompts[::-1], prompts):  # the last time from what is cached of other cuts
            assert generate(llm, order) == [model.greedy(prompt, NUM_NEW) for prompt in order]
        assert llm.get_stats().num_preemptions > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_preempted_request_draws_the_samples_that_it_draws_alone(tiny: Any, overlap: bool) -> None:
    prompts = prompts_around(16)
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True) for seed in range(len(prompts))
    ]
    with tiny("qwen3").llm() as roomy, tiny("qwen3").llm(num_kv_blocks=5, overlap=overlap) as tight:
        alone = [roomy.generate([p], q, use_tqdm=False)[0] for p, q in zip(prompts, params, strict=True)]
        together = tight.generate(prompts, params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
        assert tight.get_stats().num_preemptions > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_logits_of_a_prompt_that_was_preempted_come_once(tiny: Any, overlap: bool) -> None:
    model = tiny("qwen3")
    story, prompt = random_prompt(15, seed=24), random_prompt(40, seed=25)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with model.llm(num_kv_blocks=6, long_prefill_token_threshold=1, overlap=overlap) as llm:
        stream = llm.generate_stream([story], params)
        next(stream)
        (logits,) = llm.compute_logits([prompt])  # the story grows meanwhile
        assert llm.get_stats().num_preemptions == 1
        torch.testing.assert_close(logits, model.logits(prompt), atol=1e-4, rtol=0)
        *_, last = stream
        assert last.outputs[0].token_ids == model.greedy(story, 40)


def test_reset_prefix_cache_makes_prompts_be_computed_anew(tiny: Any) -> None:
    prompt = random_prompt(40, seed=26)
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    with tiny("qwen3").llm() as llm:
        outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2)]
        stream = llm.generate_stream([prompt], params)
        next(stream)
        llm.reset_prefix_cache()  # while a request runs
        outputs.append(llm.generate([prompt], params, use_tqdm=False)[0])
        *_, last = stream
        outputs.append(last)
    assert [output.num_cached_tokens for output in outputs] == [0, 32, 0, 32]
    assert {tuple(output.outputs[0].token_ids) for output in outputs} == {tuple(tiny("qwen3").greedy(prompt, NUM_NEW))}


@pytest.mark.timeout(soak_seconds(15) + 120)
def test_bursts_and_aborts_leave_nothing_behind(tiny: Any) -> None:
    model = tiny("qwen3", max_position_embeddings=2048)
    settings = {
        "block_size": 4,
        "num_kv_blocks": 384,
        "max_num_batched_tokens": 256,
        "long_prefill_token_threshold": 64,
        "max_num_seqs": 32,
        "overlap": True,
        "device": "cpu",
    }
    with model.llm(**settings) as llm:
        soak = Soak(llm, probes_in_crowd=True)
        assert soak.expected[VARIED.index({"temperature": 0})] == [model.greedy(soak.probe_prompt, 24)]
        soak.run(soak_seconds(15))
    soak.check()
