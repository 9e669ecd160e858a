"""The floors are those of the table that the project measures itself against."""

import pytest
import torch

from bench.floor import H200, ModelCost, measure_rates, workload_steps
from bench.workload import Workload
from nanollm.config import NAMED_SHAPES, ModelConfig

# (model, GPUs) -> output tokens per second on workload W, of H200s: known from a computation of its own.
WORKLOAD_FLOORS = {
    ("qwen3-0.6b", 1): 35_200,
    ("qwen3-8b", 1): 12_700,
    ("qwen3-8b", 2): 25_400,
    ("qwen3-14b", 1): 8_140,
    ("qwen3-32b", 2): 7_700,
}
# (model, GPUs, sequences) -> milliseconds of a decode step at context 640.
STEP_FLOORS = {
    ("qwen3-0.6b", 1, 1): 0.30,
    ("qwen3-0.6b", 1, 32): 0.85,
    ("qwen3-0.6b", 1, 256): 4.9,
    ("qwen3-8b", 1, 1): 3.67,
    ("qwen3-8b", 1, 32): 4.4,
    ("qwen3-8b", 1, 256): 10.7,
    ("qwen3-8b", 2, 1): 1.84,
    ("qwen3-8b", 2, 256): 5.4,
    ("qwen3-14b", 1, 1): 6.77,
    ("qwen3-14b", 1, 256): 15.5,
    ("qwen3-32b", 2, 32): 8.4,
}
# GB of weights that a step reads, KB of keys and values a token.
BYTES = {
    "qwen3-0.6b": (1.19, 112),
    "qwen3-1.7b": (3.44, 112),
    "qwen3-4b": (8.04, 144),
    "qwen3-8b": (15.1, 144),
    "qwen3-14b": (28.0, 160),
    "qwen3-32b": (64.0, 256),
}


def cost_of(shape: str) -> ModelCost:
    return ModelCost.of(ModelConfig.from_hf(NAMED_SHAPES[shape]))


def test_workload_w_is_the_published_one() -> None:
    workload = Workload.make(256)
    assert (sum(workload.prompt_lens), workload.num_output_tokens) == (142_827, 133_966)


@pytest.mark.parametrize("shape", BYTES)
def test_bytes_of_weights_and_of_a_token(shape: str) -> None:
    gigabytes, kilobytes = BYTES[shape]
    assert cost_of(shape).weight_bytes() == pytest.approx(gigabytes * 1e9, rel=0.005)
    assert cost_of(shape).kv_bytes_per_token == kilobytes * 1024


def test_experts_are_read_as_often_as_they_are_chosen() -> None:
    cost = cost_of("qwen3-30b-a3b")
    billions = cost.layer_weights / 1e9, cost.weight_bytes(10_000) / 2e9
    assert billions == (pytest.approx(2.72, rel=0.01), pytest.approx(30.2, rel=0.01))  # of the model's 3.3 and 30.5
    assert cost.weight_bytes(1) == 2 * (cost.layer_weights + cost.head_weights)
    both = 1 - (1 - 8 / 128) ** 2  # of the experts, by one row or the other
    assert cost.weight_bytes(2) - cost.weight_bytes(1) == pytest.approx(2 * cost.expert_weights * (128 * both - 8))


@pytest.mark.parametrize(("shape", "num_gpus", "num_sequences"), STEP_FLOORS)
def test_floor_of_a_decode_step(shape: str, num_gpus: int, num_sequences: int) -> None:
    seconds = cost_of(shape).decode_seconds([640] * num_sequences, H200, num_gpus)
    assert seconds * 1e3 == pytest.approx(STEP_FLOORS[shape, num_gpus, num_sequences], rel=0.03)


@pytest.mark.parametrize(("shape", "num_gpus"), WORKLOAD_FLOORS)
def test_floor_of_workload_w(shape: str, num_gpus: int) -> None:
    workload = Workload.make(256)
    prompt_lens = [len(prompt) for prompt in workload.prompts]
    steps = list(workload_steps(cost_of(shape), prompt_lens, workload.output_lens, H200, num_gpus))
    assert sum(tokens for _, tokens in steps) == workload.num_output_tokens
    tokens_per_second = workload.num_output_tokens / sum(seconds for seconds, _ in steps)
    assert tokens_per_second == pytest.approx(WORKLOAD_FLOORS[shape, num_gpus], rel=0.03)


def test_a_prompt_costs_its_matmuls_and_half_of_the_attention_matrix() -> None:
    # Two tokens, one layer of one head of size 2, model size 2, feed-forward size 1: 22 weights; 3 of the 4 pairs are
    # visible, which the formula for long prompts takes as 2; each pair is 2 products and 2 sums of 2.
    config = ModelConfig.from_hf(
        NAMED_SHAPES["qwen3-0.6b"]
        | {
            "hidden_size": 2,
            "intermediate_size": 1,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 2,
        }
    )
    assert ModelCost.of(config).layer_weights == 4 * 2 * 2 + 3 * 2
    assert ModelCost.of(config).prompt_flops(2) == 2 * 22 * 2 + 2 * (2 * 2 * 2)


def test_rates_of_this_machine_are_within_what_any_has() -> None:
    rates = measure_rates(torch.device("cpu"), torch.float32)
    assert 1e8 < rates.bytes_per_second < 1e13
    assert 1e8 < rates.flops_per_second < 1e15
    assert "CPU" in rates.source
