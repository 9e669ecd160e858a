"""Qwen3-MoE (Qwen Team, 2025), such as Qwen3-30B-A3B: Qwen3 with a mixture of experts in all or some of its layers."""

from torch import nn

from nanollm.config import ModelConfig
from nanollm.distributed.tp_group import TPGroup
from nanollm.models.qwen3 import DecoderLayer, Qwen3ForCausalLM


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    def make_layer(self, config: ModelConfig, tp: TPGroup, index: int) -> nn.Module:
        assert config.moe is not None
        return DecoderLayer(config, tp, qk_norm=True, sparse=index not in config.moe.dense_layers)
