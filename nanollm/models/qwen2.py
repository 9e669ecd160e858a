"""Qwen2 and Qwen2.5 (Qwen Team, 2024): Qwen3 with biases on Q, K and V (ModelConfig.qkv_bias) and without QK-norm."""

from nanollm.models.qwen3 import Qwen3ForCausalLM


class Qwen2ForCausalLM(Qwen3ForCausalLM):
    qk_norm = False
