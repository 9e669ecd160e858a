"""A model of your own, sharded over ranks by the layers it is made of: feed-forward on both sides of attention."""

from torch import Tensor, nn

from nanollm import LLM, SamplingParams
from nanollm.config import ModelConfig
from nanollm.distributed.tp_group import TPGroup
from nanollm.layers.activation import GatedMLP
from nanollm.layers.hidden import Hidden
from nanollm.layers.norm import RMSNorm
from nanollm.layers.step_batch import StepBatch
from nanollm.models.qwen3 import DecoderLayer, Qwen3ForCausalLM
from nanollm.models.registry import register


class MacaronLayer(DecoderLayer):  # Lu et al., 2019
    def __init__(self, config: ModelConfig, tp: TPGroup) -> None:
        super().__init__(config, tp, qk_norm=False)
        self.first_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.first_mlp = GatedMLP(config, tp)

    def forward(self, hidden: Hidden, batch: StepBatch, rope_PH: Tensor) -> Hidden:
        return super().forward(self.first_mlp(self.first_norm(hidden)), batch, rope_PH)


@register
class MacaronForCausalLM(Qwen3ForCausalLM):
    def make_layer(self, config: ModelConfig, tp: TPGroup, index: int) -> nn.Module:
        return MacaronLayer(config, tp)


if __name__ == "__main__":  # rank 1 is a new process that imports this file
    # Random weights in a small shape. A directory whose config.json names MacaronForCausalLM would do as well.
    shape = {"architectures": ["MacaronForCausalLM"], "hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 1000}
    settings = {"load_format": "dummy", "hf_overrides": shape, "device": "cpu"}
    for num_ranks in (1, 2):
        with LLM("qwen3-0.6b", tensor_parallel_size=num_ranks, **settings) as llm:
            output = llm.generate([[1, 2, 3]], SamplingParams(seed=0, max_tokens=12), use_tqdm=False)[0]
        print(f"tensor_parallel_size {num_ranks}:", *output.outputs[0].token_ids)
