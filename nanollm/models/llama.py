"""Llama (Touvron et al., 2023) and the models that share its layers, such as SmolLM2: Qwen3 without QK-norm."""

from nanollm.models.qwen3 import Qwen3ForCausalLM


class LlamaForCausalLM(Qwen3ForCausalLM):
    qk_norm = False
