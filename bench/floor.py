"""How fast could it be? The time that a workload's bytes and operations take at the rates the hardware really reaches.

A decode step reads every weight once, and all keys and values of the sequences it advances; it multiplies each weight
with each of its rows. Of a mixture of experts it reads those that its rows choose, as many as when all are as likely.
Reading the weights and multiplying overlap, so the longer of the two counts; the KV cache comes on top. A prompt costs
its operations, 2 for each weight of the layers and token and those of causal attention, or reading the weights. Nothing
else is counted (no launch, no communication, no sampling), so no engine gets there, unless tokens prefer some experts.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from nanollm.config import ModelConfig


@dataclass(frozen=True)
class Rates:
    """What one device reaches: reading memory, and multiplying matrices in the model's dtype. source: who says so."""

    bytes_per_second: float
    flops_per_second: float
    source: str


H200 = Rates(4.15e12, 790e12, "rates measured on an H200 in bfloat16")


@dataclass(frozen=True)
class ModelCost:
    """What a model costs, of its whole or of all ranks together.

    dense_weights, head_weights: how many there are in matrix multiplications of every token; an input embedding of its
    own is only looked up. expert_weights: of one expert in each of the layers that have experts, where a token goes
    through num_chosen of num_experts. value_bytes: bytes of a weight, and of a value in the KV cache.
    """

    dense_weights: int
    head_weights: int
    kv_values_per_token: int
    attention_flops_per_pair: int  # of one query token and one key token, all layers
    value_bytes: int
    expert_weights: int = 0
    num_experts: int = 1
    num_chosen: int = 0

    @staticmethod
    def of(config: ModelConfig, value_bytes: int = 2) -> "ModelCost":
        size, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
        attention = size * config.head_dim * (2 * heads + 2 * kv_heads)
        moe = config.moe
        num_dense = config.num_layers if moe is None else len(moe.dense_layers)
        cost = ModelCost(
            dense_weights=config.num_layers * attention + num_dense * 3 * size * config.intermediate_size,
            head_weights=config.vocab_size * size,
            kv_values_per_token=config.num_layers * 2 * kv_heads * config.head_dim,
            attention_flops_per_pair=config.num_layers * heads * config.head_dim * 4,
            value_bytes=value_bytes,
        )
        if moe is None:
            return cost
        num_sparse = config.num_layers - num_dense
        return replace(
            cost,
            dense_weights=cost.dense_weights + num_sparse * size * moe.num_experts,  # and the routers
            expert_weights=num_sparse * 3 * size * moe.expert_size,
            num_experts=moe.num_experts,
            num_chosen=moe.num_chosen,
        )

    @property
    def layer_weights(self) -> int:
        """How many weights a token is multiplied with, without the head's."""
        return self.dense_weights + self.num_chosen * self.expert_weights

    def weight_bytes(self, num_rows: int = 1) -> float:
        """Read in a step of num_rows tokens: on average, if all experts are as likely."""
        read_experts = self.num_experts * (1 - (1 - self.num_chosen / self.num_experts) ** num_rows)
        weights = self.dense_weights + self.head_weights + read_experts * self.expert_weights
        return weights * self.value_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self.kv_values_per_token * self.value_bytes

    def prompt_flops(self, length: int) -> float:
        """A token attends to those before it and itself: half of all pairs."""
        return 2 * self.layer_weights * length + self.attention_flops_per_pair * length**2 / 2

    def decode_seconds(self, contexts: Sequence[int], rates: Rates, num_devices: int = 1) -> float:
        """One step that advances a sequence for each entry of `contexts`, its length so far."""
        reading = self.weight_bytes(len(contexts)) / rates.bytes_per_second
        multiplying = 2 * (self.layer_weights + self.head_weights) * len(contexts) / rates.flops_per_second
        kv_cache = sum(contexts) * self.kv_bytes_per_token / rates.bytes_per_second
        return (max(reading, multiplying) + kv_cache) / num_devices

    def prompt_seconds(self, lengths: Sequence[int], rates: Rates, num_devices: int = 1) -> float:
        """Of prompts of these many tokens, computed together."""
        reading = self.weight_bytes(sum(lengths)) / rates.bytes_per_second
        return max(sum(map(self.prompt_flops, lengths)) / rates.flops_per_second, reading) / num_devices


def workload_steps(
    cost: ModelCost, prompt_lens: Sequence[int], output_lens: Sequence[int], rates: Rates, num_devices: int = 1
) -> Iterator[tuple[float, int]]:
    """(seconds, output tokens) of each step when all prompts come at once: they are computed together, which gives
    every sequence its first token; then one step for each further token, while sequences end one by one."""
    yield cost.prompt_seconds(prompt_lens, rates, num_devices), len(prompt_lens)
    for done in range(1, max(output_lens)):
        contexts = [prompt + done for prompt, output in zip(prompt_lens, output_lens, strict=True) if output > done]
        yield cost.decode_seconds(contexts, rates, num_devices), len(contexts)


def device_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The known rates of an H200, else measured ones: takes a second, and needs the device to itself."""
    if device.type == "cuda" and dtype == torch.bfloat16 and "H200" in torch.cuda.get_device_name(device):
        return H200
    return measure_rates(device, dtype)


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measured by reading a buffer far larger than any cache, and by multiplying square matrices."""
    on_gpu = device.type == "cuda"
    buffer = torch.ones((2**32 if on_gpu else 2**29) // 4, device=device)
    bytes_per_second = buffer.nbytes / _best_seconds(buffer.sum, device)
    size = 8192 if on_gpu else 1024
    square = torch.randn(size, size, device=device).to(dtype)
    flops_per_second = 2 * size**3 / _best_seconds(lambda: square @ square, device)
    where = torch.cuda.get_device_name(device) if on_gpu else f"this CPU with {torch.get_num_threads()} threads"
    return Rates(bytes_per_second, flops_per_second, f"rates measured now on {where}")


def _best_seconds(function: Callable[[], object], device: torch.device) -> float:
    """Of the quickest call: what the hardware can do, not what else it is doing."""
    seconds = []
    for _ in range(6):  # the first one warms up
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
