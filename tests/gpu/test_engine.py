"""The engine on a GPU gives the CPU's tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nanollm import LLM, SamplingParams
from nanollm.config import GPU_BLOCK_SIZE
from tests.conftest import VARIED, random_prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("qwen3", {}), ("qwen3_moe", {}), ("qwen3_moe", {"num_experts": 16}), ("qwen2", {}), ("llama", {})],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_tiny_models_give_the_tokens_of_the_cpu(tiny: Any, kind: str, shape: dict[str, int], overlap: bool) -> None:
    """Some requests at once, then one by itself, whose kernels for one row take 16 experts, but not 8."""
    prompts = [random_prompt(length, seed=9) for length in (1, 15, 16, 17, 60)]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=32, ignore_eos=True) for t in (0, 0.9, 0, 0.9, 0)]
    runs = []
    for device in ("cpu", "cuda"):
        with tiny(kind, **shape).llm(device=device, overlap=overlap, long_prefill_token_threshold=9) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            outputs += llm.generate(prompts[3:4], params[3], use_tqdm=False)
            runs.append([output.outputs[0].token_ids for output in outputs])
    assert runs[0] == runs[1]


def varied(**settings: Any) -> list[SamplingParams]:
    return [
        SamplingParams(**({"temperature": 0.9, "seed": 3, "ignore_eos": True} | settings | some)) for some in VARIED
    ]


def test_every_kind_of_sampling_gives_the_tokens_of_the_cpu(tiny: Any) -> None:
    prompts = [random_prompt(length, seed=9) for length in (1, 15, 16, 17, 60, 5, 33, 48)]
    runs = []
    for device in ("cpu", "cuda"):
        with tiny("qwen3").llm(device=device) as llm:
            outputs = llm.generate(prompts, varied(max_tokens=32, logprobs=3, prompt_logprobs=1, n=2), use_tqdm=False)
            runs.append([completion for output in outputs for completion in output.outputs])
            for output in outputs:
                assert len(output.prompt_logprobs or []) == len(output.prompt_token_ids)
    for ours, theirs in zip(*runs, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-2)


def test_bad_rows_end_alone(tiny: Any) -> None:
    stuck = SamplingParams(max_tokens=9, allowed_token_ids=[1], ignore_eos=True)
    with tiny("qwen3").llm(device="cuda") as llm:
        row = llm._engine.make_sequences([5, 6], stuck)[0]
        row.bad_words = [[1]]  # which check_rules would have refused
        llm._engine.add(row)
        assert llm.generate([[7, 8]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)[0].finished
    assert row.finish_reason == "error"


def test_smollm2_gives_the_tokens_of_the_cpu(smollm2_path: Path) -> None:
    prompts = ["Once upon a time", "The capital of France is", "def fibonacci(n):"]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    runs = []
    for device in ("cpu", "cuda"):
        with LLM(str(smollm2_path), device=device, dtype="float32", num_kv_blocks=64) as llm:
            runs.append([output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)])
    assert runs[0] == runs[1]


def test_memory_of_a_closed_engine_is_back(tiny: Any) -> None:
    free = []
    for _ in range(3):
        with tiny("qwen3").llm(device="cuda", num_kv_blocks=None, kv_cache_memory_bytes=2**31) as llm:
            llm.generate([[1, 2, 3]], use_tqdm=False)
            free.append(torch.cuda.mem_get_info()[0])
        free.append(torch.cuda.mem_get_info()[0])
    # Kernels and libraries that the first one loaded stay.
    assert all(after - during > 2**31 for during, after in zip(free[0::2], free[1::2], strict=True))
    assert free[5] > free[1] - 2**24


def test_cache_size_follows_gpu_memory_utilization() -> None:
    sizes = []
    for utilization in (0.2, 0.4):
        shape = {"num_hidden_layers": 2}
        with LLM("qwen3-0.6b", load_format="dummy", hf_overrides=shape, gpu_memory_utilization=utilization) as llm:
            sizes.append(llm.get_stats().num_total_blocks)
    block_bytes = 2 * 2 * GPU_BLOCK_SIZE * 8 * 128 * 2  # layers, k and v, tokens, heads, head_dim, bfloat16
    gained = (sizes[1] - sizes[0]) * block_bytes / torch.cuda.mem_get_info()[1]
    assert 0.15 < gained < 0.25


def test_graphs_equal_eager_and_overlapped_equals_synchronous_exactly() -> None:
    shape = {"num_hidden_layers": 4, "vocab_size": 32000}
    lengths = (1, 5, 16, 130, 250, 17, 90)
    # Steps with prompt chunks are captured when their shape comes again.
    rounds = [[random_prompt(length, seed) for length in lengths] for seed in (4, 5, 6)]
    params = [
        SamplingParams(temperature=t, seed=3, max_tokens=n, ignore_eos=True)
        for t, n in zip((0, 0.9, 0, 1.2, 0, 0.7, 0), (40, 33, 64, 50, 7, 64, 48), strict=True)
    ]
    runs = []
    for settings in ({}, {"enforce_eager": True}, {"overlap": False}, {"enforce_eager": True, "overlap": False}):
        with LLM(
            "qwen3-0.6b", load_format="dummy", hf_overrides=shape, num_kv_blocks=256, max_num_seqs=12, **settings
        ) as llm:
            outputs = [output for prompts in rounds for output in llm.generate(prompts, params, use_tqdm=False)]
            assert bool(llm._executor.runner.mixed._graphs) != settings.get("enforce_eager", False)
            outputs += llm.generate([rounds[0][3]] * 8, varied(max_tokens=48), use_tqdm=False)
            outputs += llm.generate([rounds[0][3]] * 8, varied(max_tokens=9, logprobs=1), use_tqdm=False)
            runs.append([output.outputs[0].token_ids for output in outputs])
    assert runs[1:] == [runs[0]] * 3
