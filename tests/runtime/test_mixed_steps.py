"""Steps with prompt chunks: padded to a shape that CUDA graphs can have, they compute the same."""

from typing import Any

import pytest
import torch

from nanollm import SamplingParams
from nanollm.runtime.mixed_steps import longest_padded, padded_length
from tests.conftest import random_prompt


@pytest.mark.parametrize("chunk", [0, 7])
def test_padded_steps_give_the_same_tokens(tiny: Any, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    prompts = [random_prompt(length, seed=2) for length in (1, 3, 16, 17, 40, 90, 5)]
    params = [SamplingParams(temperature=t, seed=1, max_tokens=n, ignore_eos=True) for t in (0, 0.8) for n in (3, 9)]
    params = (params * 2)[: len(prompts)]
    runs = []
    for padded in (False, True):
        with tiny("qwen3").llm(max_num_seqs=4, max_num_batched_tokens=64, long_prefill_token_threshold=chunk) as llm:
            mixed = llm._executor.runner.mixed
            shapes: set[Any] = set()
            if padded:
                largest = type(mixed)(mixed._model, mixed._rows, mixed._sampler, 4, 64, capture=False)
                monkeypatch.setattr(llm._executor.runner, "mixed", largest)
                shapes = largest._seen
            outputs = llm.generate(prompts, params, use_tqdm=False)
            runs.append([output.outputs[0].token_ids for output in outputs])
            # 4 rows of logits a step, so the last step of 1, 5 and 21 tokens computes a single one.
            runs[-1].append(torch.cat([llm.compute_logits([random_prompt(n)])[0] for n in (1, 5, 21, 40)]))
    torch.testing.assert_close(runs[1].pop(), runs[0].pop())
    assert runs[0] == runs[1]
    assert {shape.num_tokens for shape in shapes} <= {16, 32, 48, 64}
    assert {shape.num_rows for shape in shapes} == {1, 4}


def test_tokens_are_padded_by_an_eighth_at_most() -> None:
    for num_tokens in range(1, 9000):
        padded = padded_length(num_tokens)
        assert num_tokens <= padded <= max(num_tokens + 15, num_tokens * 9 / 8)
        assert padded_length(padded) == padded
    assert len({padded_length(n) for n in range(1, 8193)}) == 8 + 6 * 8


def test_large_models_are_captured_for_short_steps_only() -> None:
    assert longest_padded(16_000_000, 8192) == 8192  # Qwen3-0.6B
    assert longest_padded(193_000_000, 8192) == 1024  # Qwen3-8B
    assert longest_padded(193_000_000, 500) == padded_length(500) == 512  # a full step is padded, too


def test_of_experts_only_the_chosen_count_as_weights_of_a_token(tiny: Any) -> None:
    attention, norms, router, expert = 2 * 64 * (128 + 64), 2 * (64 + 32), 8 * 64, 3 * 64 * 48
    with tiny("qwen3_moe").llm() as llm:
        found = llm._executor.runner.model.weights_per_token()
    assert found == attention + norms + router + 3 * expert
