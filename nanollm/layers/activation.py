"""The feed-forward layer: down(silu(gate(x)) * up(x)), split over ranks by its inner dimension (Shazeer, 2020)."""

from torch import nn

from nanollm.config import ModelConfig
from nanollm.distributed.partition import mlp_split
from nanollm.distributed.tp_group import TPGroup
from nanollm.layers.hidden import Hidden
from nanollm.layers.linear import MergedColumnParallelLinear, RowParallelLinear


class GatedMLP(nn.Module):
    """SwiGLU: Hidden in, Hidden out, with the sum over ranks pending."""

    def __init__(self, config: ModelConfig, tp: TPGroup) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        split = mlp_split(inner, tp.size)
        self.gate_up_proj = MergedColumnParallelLinear(
            size, inner, ("gate_proj", "up_proj"), split, config.mlp_bias, tp
        )
        self.down_proj = RowParallelLinear(inner, size, split[tp.rank], config.mlp_bias, tp)

    def forward(self, hidden: Hidden) -> Hidden:
        gated_TF, residual_TD = self.gate_up_proj(hidden, gated=True)
        return self.down_proj(gated_TF, residual_TD)
