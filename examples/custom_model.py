"""A model of your own, sharded over ranks by the layers it is made of: feed-forward on both sides of attention."""

from torch import Tensor, nn

from nanollm import LLM, SamplingParams
from nanollm.config import ModelConfig
from nanollm.distributed.tp_group import TPGroup
from nanollm.layers.activation import GatedMLP
from nanollm.layers.attention import Attention
from nanollm.layers.hidden import Hidden
from nanollm.layers.norm import RMSNorm
from nanollm.layers.step_batch import StepBatch
from nanollm.models.qwen3 import Qwen3ForCausalLM
from nanollm.models.registry import register


class MacaronLayer(nn.Module):  # Lu et al., 2019
    def __init__(self, config: ModelConfig, tp: TPGroup) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3))
        self.first_mlp = GatedMLP(config, tp)
        self.attention = Attention(config, tp, qk_norm=False)
        self.last_mlp = GatedMLP(config, tp)

    def forward(self, hidden: Hidden, batch: StepBatch, rope_PH: Tensor) -> Hidden:
        hidden = self.first_mlp(self.norms[0](hidden))
        hidden = self.attention(self.norms[1](hidden), batch, rope_PH)
        return self.last_mlp(self.norms[2](hidden))


@register
class MacaronForCausalLM(Qwen3ForCausalLM):
    def make_layer(self, config: ModelConfig, tp: TPGroup) -> nn.Module:
        return MacaronLayer(config, tp)


def main() -> None:
    # Random weights in a small shape. A directory whose config.json names MacaronForCausalLM would do as well.
    shape = {"architectures": ["MacaronForCausalLM"], "hidden_size": 128, "intermediate_size": 384}
    shape |= {"num_hidden_layers": 4, "vocab_size": 1000}
    settings = {"load_format": "dummy", "hf_overrides": shape, "device": "cpu"}
    for num_ranks in (1, 2):
        with LLM("qwen3-0.6b", tensor_parallel_size=num_ranks, **settings) as llm:
            output = llm.generate([[1, 2, 3]], SamplingParams(seed=0, max_tokens=12), use_tqdm=False)[0]
        print(f"tensor_parallel_size {num_ranks}:", *output.outputs[0].token_ids)


if __name__ == "__main__":
    main()
