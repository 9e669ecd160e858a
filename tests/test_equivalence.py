"""The engine computes what transformers computes, however the work is cut into steps."""

import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanollm import LLM, SamplingParams
from nanollm.distributed.tp_group import TPGroup
from nanollm.models.loader import load_weights
from nanollm.models.registry import import_model
from nanollm.models.source import resolve_model
from tests.conftest import DEVICE, VOCAB_SIZE, hf_greedy, random_prompt

GREEDY_64 = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
LENGTHS = (1, 2, 15, 16, 17, 33, 64)
KINDS = ("qwen3", "qwen3_moe", "qwen2", "llama")


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_at_every_position_and_greedy_tokens_equal_transformers(tiny: Any, kind: str) -> None:
    model = tiny(kind)
    prompts = [random_prompt(length) for length in LENGTHS]
    with model.llm() as llm:
        for prompt, logits in zip(prompts, llm.compute_logits(prompts), strict=True):
            assert logits.shape == (len(prompt), VOCAB_SIZE) and logits.dtype == torch.float32
            torch.testing.assert_close(logits, model.logits(prompt), atol=1e-4, rtol=0)
        outputs = llm.generate(prompts, GREEDY_64, use_tqdm=False)
    assert tokens(outputs) == [model.greedy(prompt, 64) for prompt in prompts]


def test_layers_without_experts_and_weights_that_are_not_normalized(tiny: Any) -> None:
    model = tiny("qwen3_moe", norm_topk_prob=False, decoder_sparse_step=2, num_hidden_layers=4, mlp_only_layers=[3])
    prompt = random_prompt(20)
    with model.llm() as llm:
        (logits,) = llm.compute_logits([prompt])
        kinds = [type(layer.mlp).__name__ for layer in llm._executor.runner.model.model.layers]
    assert kinds == ["GatedMLP", "SparseMLP", "GatedMLP", "GatedMLP"]
    torch.testing.assert_close(logits, model.logits(prompt), atol=1e-4, rtol=0)


def test_a_head_of_its_own_counts_where_config_json_says_it_is_tied(tiny: Any, tmp_path: Path) -> None:
    shutil.copytree(tiny("qwen2").path, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1] += 1  # so the first of two ranks has nothing to untie
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert expected.config.tie_word_embeddings
    prompt = random_prompt(20)
    with LLM(str(tmp_path), device=DEVICE, dtype="float32", num_kv_blocks=8, skip_tokenizer_init=True) as llm:
        (logits,) = llm.compute_logits([prompt])
    torch.testing.assert_close(logits, expected(torch.tensor([prompt])).logits[0].detach(), atol=1e-4, rtol=0)

    source, rows = resolve_model(str(tmp_path)), []
    for rank in range(2):
        model = import_model(source.model_class)(source.config, TPGroup(rank, 2), max_position=8)
        model.untie_if_heads_differ(checkpoint := source.open_checkpoint({}))
        assert model.lm_head.tied == (rank == 0)
        load_weights(model, checkpoint)
        rows.append(model.lm_head.weight[: model.lm_head.num_rows])
    assert torch.equal(torch.cat(rows), head)


def test_changing_a_later_token_leaves_earlier_logits_equal(tiny: Any) -> None:
    prompt = random_prompt(40)
    changed = [*prompt[:20], (prompt[20] + 1) % VOCAB_SIZE, *prompt[21:]]
    with tiny("qwen3").llm(max_num_seqs=128) as llm:  # both whole in one step, whose logits max_num_seqs bounds
        before, after = llm.compute_logits([prompt, changed])
    assert torch.equal(before[:20], after[:20])
    assert not torch.allclose(before[20:], after[20:], atol=1e-3)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 15, 16, 17, 0])
def test_any_chunk_size_overlapped_or_not_gives_the_same_tokens(tiny: Any, overlap: bool, chunk: int) -> None:
    model = tiny("qwen3")
    prompts = [random_prompt(length, seed=1) for length in LENGTHS]
    expected = [model.greedy(prompt, 12) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with model.llm(overlap=overlap, long_prefill_token_threshold=chunk) as llm:
        assert tokens(llm.generate(prompts, params, use_tqdm=False)) == expected
        assert tokens(llm.generate(prompts[::-1], params, use_tqdm=False)) == expected[::-1]  # now from cached prefixes


@pytest.mark.parametrize("overlap", [False, True])
def test_seeded_samples_are_the_same_alone_and_in_any_batch(tiny: Any, overlap: bool) -> None:
    prompts = [random_prompt(length, seed=2) for length in LENGTHS]
    params = [SamplingParams(temperature=0.8, seed=i - 3, max_tokens=20, ignore_eos=True) for i in range(len(prompts))]
    with tiny("qwen3").llm(overlap=overlap) as llm:
        together = tokens(llm.generate(prompts, params, use_tqdm=False))
        alone = [tokens(llm.generate([p], q, use_tqdm=False))[0] for p, q in zip(prompts, params, strict=True)]
    assert together == alone
    with tiny("qwen3").llm(overlap=not overlap, long_prefill_token_threshold=7, max_num_seqs=2) as llm:
        assert tokens(llm.generate(prompts, params, use_tqdm=False)) == together


def test_greedy_rows_are_exact_beside_sampled_ones(tiny: Any) -> None:
    model = tiny("qwen3")
    prompts = [random_prompt(length, seed=3) for length in (5, 9, 12)]
    params = [SamplingParams(temperature=t, max_tokens=16, ignore_eos=True, seed=7) for t in (0, 1.5, 0)]
    with model.llm() as llm:
        greedy, sampled, greedy_too = tokens(llm.generate(prompts, params, use_tqdm=False))
    assert (greedy, greedy_too) == (model.greedy(prompts[0], 16), model.greedy(prompts[2], 16))
    assert sampled != model.greedy(prompts[1], 16)


def test_same_seed_draws_different_tokens_at_different_positions_and_for_different_prompts(tiny: Any) -> None:
    params = SamplingParams(temperature=5.0, seed=1, max_tokens=48, ignore_eos=True)
    with tiny("qwen3").llm() as llm:
        a, b = tokens(llm.generate([random_prompt(4), random_prompt(5)], params, use_tqdm=False))
    assert a != b and len(set(a)) > 24


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_any_head_dim_that_is_not_hidden_over_heads(tiny: Any, model_type: str, head_dim: int) -> None:
    model = tiny(model_type, head_dim=head_dim, num_attention_heads=3, num_key_value_heads=1, vocab_size=301)
    prompt = random_prompt(20)
    with model.llm() as llm:
        torch.testing.assert_close(llm.compute_logits([prompt])[0], model.logits(prompt), atol=1e-4, rtol=0)


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn with its attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
}


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("rope", ROPES)
def test_scaled_rope_past_the_original_length(tiny: Any, kind: str, rope: str) -> None:
    model = tiny(kind, rope_parameters={"rope_theta": 10000.0} | ROPES[rope])
    prompt = random_prompt(200, seed=8)
    with model.llm() as llm:
        (logits,) = llm.compute_logits([prompt])
        outputs = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    torch.testing.assert_close(logits, model.logits(prompt), atol=1e-4, rtol=0)
    assert tokens(outputs) == [model.greedy(prompt, 16)]
    plain = tiny(kind).logits(prompt)
    assert not torch.allclose(logits, plain, atol=1e-2)  # the scaling did something


def test_float32_layers_do_not_change_their_input(tiny: Any) -> None:
    prompt = random_prompt(20)
    with tiny("qwen3").llm(enable_prefix_caching=False) as llm:
        first, second = llm.compute_logits([prompt])[0], llm.compute_logits([prompt])[0]
    assert torch.equal(first, second)


def test_smollm2_writes_the_greedy_tokens_of_transformers(smollm2_path: Path) -> None:
    chats = [
        "What is the capital of France?",
        "Write a short poem about the sea.",
        "List three prime numbers and explain why they are prime.",
    ]
    with LLM(str(smollm2_path), device=DEVICE, dtype="float32", num_kv_blocks=64) as llm:
        prompts = [llm.apply_chat_template([{"role": "user", "content": text}]) for text in chats]
        outputs = llm.generate(
            [{"prompt_token_ids": llm.tokenizer.encode(text, add_special_tokens=False)} for text in prompts],
            GREEDY_64,
            use_tqdm=False,
        )
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()
    for output in outputs:
        assert output.outputs[0].token_ids == hf_greedy(oracle, output.prompt_token_ids, 64)
    del oracle
    gc.collect()
