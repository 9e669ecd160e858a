"""The same model at any tensor-parallel degree: its layers, its hidden states, its logits, its tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanollm import LLM, SamplingParams
from nanollm.distributed.tp_group import TPGroup
from tests.conftest import assert_sure_tokens_agree, random_prompt
from tests.distributed import lockstep
from tests.distributed.on_ranks import on_ranks


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads wait for each other at every step, which takes long where cores are busy with other ranks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Whole models, and the degrees at which each is checked inside the ranks.
SHAPES: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "8 KV heads": ("qwen3", {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 301}, [3, 5, 8]),
    "4 KV heads": ("qwen3", {"num_attention_heads": 8, "num_key_value_heads": 4}, [6, 7, 8]),
    "QKV bias, tied": ("qwen2", {"vocab_size": 1000}, [2, 3]),
    "experts": ("qwen3_moe", {"num_attention_heads": 8}, [2, 3, 5]),
    "all biases": ("llama", {"attention_bias": True, "mlp_bias": True}, [2, 4]),
}


def test_inside_the_ranks_of_every_degree_up_to_eight(tiny: Any, tmp_path: Path) -> None:
    """Logits within 1e-5, KV contents, hidden states bitwise equal across ranks, greedy and seeded tokens."""
    models = {}
    for name, (kind, overrides, degrees) in SHAPES.items():
        path = tiny(kind, **overrides).path
        expected = lockstep.results(path, TPGroup())
        del expected["kv_heads"]
        file = tmp_path / f"{name}.pt"
        torch.save(expected, file)
        models[name] = (path, str(file), degrees)
    on_ranks(8, lockstep.check_degrees, models)


GREEDY_64 = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
PROMPTS = [random_prompt(length) for length in (1, 16, 17, 40)]
SEEDED = [SamplingParams(temperature=0.8, seed=i, max_tokens=32, ignore_eos=True) for i in range(len(PROMPTS))]
BIASES = {"attention_bias": True, "mlp_bias": True}


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_empty(llm: LLM) -> None:
    stats = llm.get_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_total_blocks)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [("qwen3", {}), ("qwen3_moe", {"intermediate_size": 1}), ("qwen2", {"vocab_size": 301}), ("llama", BIASES)],
)
def test_two_and_three_ranks_give_what_one_gives(tiny: Any, kind: str, overrides: dict[str, Any]) -> None:
    model = tiny(kind, **overrides)
    with model.llm() as llm:
        expected_logits = llm.compute_logits(PROMPTS)
        expected_samples = tokens(llm.generate(PROMPTS, SEEDED, use_tqdm=False))
    for size in (2, 3):
        with model.llm(tensor_parallel_size=size) as llm:
            for ours, theirs in zip(llm.compute_logits(PROMPTS), expected_logits, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
            assert tokens(llm.generate(PROMPTS, SEEDED, use_tqdm=False)) == expected_samples
            outputs = tokens(llm.generate(PROMPTS, GREEDY_64, use_tqdm=False))
            assert outputs == [model.greedy(prompt, 64) for prompt in PROMPTS]


@pytest.mark.parametrize(("size", "overlap"), [(2, True), (3, False)])
def test_preempted_cached_chunked_and_aborted_requests(tiny: Any, size: int, overlap: bool) -> None:
    """A cache too small for what runs, blocks of 4 tokens, chunks of 7, prompts that share a prefix."""
    model = tiny("qwen3")
    shared = random_prompt(24, seed=4)
    prompts = [shared + random_prompt(n, seed=5) for n in (1, 5, 9, 14)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = [model.greedy(prompt, 20) for prompt in prompts]
    settings = {"block_size": 4, "num_kv_blocks": 24, "long_prefill_token_threshold": 7, "max_num_seqs": 4}
    with model.llm(tensor_parallel_size=size, overlap=overlap, **settings) as llm:
        assert tokens(llm.generate(prompts, params, use_tqdm=False)) == expected
        again = llm.generate(prompts[::-1], params, use_tqdm=False)
        assert tokens(again) == expected[::-1]
        assert again[0].num_cached_tokens >= 20
        stats = llm.get_stats()
        assert stats.num_preemptions > 0 and stats.prefix_hits > 0
        for num_outputs in range(4):  # abort while steps are in flight
            stream = llm.generate_stream(prompts, params)
            for _ in range(num_outputs):
                next(stream)
            stream.close()  # type: ignore[attr-defined]
            assert_empty(llm)
        assert tokens(llm.generate(prompts, params, use_tqdm=False)) == expected
        with pytest.raises(ValueError, match="prompt 1: prompt token 0 must be from 0 to 299"):
            llm.generate([[1], [300]], params)
        assert_empty(llm)


@pytest.mark.parametrize(
    ("size", "num_kv_heads", "vocab_size"), [(4, 8, 301), (8, 4, 1100)], ids=["a rank of padding only", "replicated"]
)
def test_four_and_eight_ranks(tiny: Any, size: int, num_kv_heads: int, vocab_size: int) -> None:
    model = tiny("qwen3", num_attention_heads=8, num_key_value_heads=num_kv_heads, vocab_size=vocab_size)
    # So hot that every id is as likely as any other: padding would be drawn.
    hot = [SamplingParams(temperature=100, seed=i, max_tokens=8, ignore_eos=True) for i in range(12)]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = PROMPTS * 3
    with model.llm() as llm:
        expected = tokens(llm.generate(prompts, hot, use_tqdm=False))
    assert len({token_id for ids in expected for token_id in ids}) > 50
    with model.llm(tensor_parallel_size=size) as llm:
        assert tokens(llm.generate(prompts, hot, use_tqdm=False)) == expected
        outputs = tokens(llm.generate(PROMPTS[:2], greedy, use_tqdm=False))
    assert outputs == [model.greedy(prompt, 4) for prompt in PROMPTS[:2]]


@pytest.mark.parametrize("size", [2, 3])
def test_smollm2_writes_the_greedy_tokens_of_transformers(
    smollm2_path: Path, smollm2_says: dict[str, Any], size: int
) -> None:
    with LLM(str(smollm2_path), tensor_parallel_size=size, num_kv_blocks=64, device="cpu", dtype="float32") as llm:
        outputs = llm.generate(smollm2_says["asked"], GREEDY_64, use_tqdm=False)
    assert tokens(outputs) == smollm2_says["answers"]


@pytest.mark.parametrize("size", [2, 3])
def test_smollm2_in_bfloat16_prefers_the_same_token_wherever_float32_is_sure(
    smollm2_path: Path, smollm2_says: dict[str, Any], size: int
) -> None:
    with LLM(str(smollm2_path), tensor_parallel_size=size, num_kv_blocks=256, device="cpu", dtype="bfloat16") as llm:
        ours = torch.cat(llm.compute_logits(smollm2_says["texts"]))
    assert_sure_tokens_agree(ours, smollm2_says["logits"])
