"""The feed-forward layer as a mixture of experts, each sliced over ranks (Rajbhandari et al., 2022)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanollm.config import ModelConfig
from nanollm.distributed.partition import mlp_split
from nanollm.distributed.tp_group import TPGroup
from nanollm.kernels.one_row_experts import one_row_experts, suits_one_row_experts
from nanollm.kernels.one_row_matmul import one_row_matmul
from nanollm.kernels.sparse_mlp import sparse_mlp
from nanollm.layers.hidden import Hidden
from nanollm.layers.weights import TensorPart


class SparseMLP(nn.Module):
    """A router and SwiGLU experts: Hidden in, Hidden out, with the sum over ranks pending.

    Every rank has the whole router and a share of every expert, so that all have the same work whatever is chosen:
    gate_ED [E, D]; gate_up_EGD [E, 2 F_r, D], gate then up, and down_EDF [E, D, F_r]. count_E is sparse_mlp's scratch.
    """

    def __init__(self, config: ModelConfig, tp: TPGroup) -> None:
        super().__init__()
        assert config.moe is not None
        self.moe, self.tp = config.moe, tp
        size, num_experts = config.hidden_size, self.moe.num_experts
        self.kept = mlp_split(self.moe.expert_size, tp.size)[tp.rank]
        inner = len(self.kept)
        self.gate_ED = nn.Parameter(torch.empty(num_experts, size), requires_grad=False)
        self.gate_up_EGD = nn.Parameter(torch.empty(num_experts, 2 * inner, size), requires_grad=False)
        self.down_EDF = nn.Parameter(torch.empty(num_experts, size, inner), requires_grad=False)
        self.count_E = nn.Buffer(torch.zeros(num_experts, dtype=torch.int32), persistent=False)

    def forward(self, hidden: Hidden) -> Hidden:
        assert hidden.residual_TD is not None, "attention comes before"
        if suits_one_row_experts(len(hidden.residual_TD), self.gate_ED, self.down_EDF):
            return self._one_row(hidden, hidden.residual_TD)
        x_TD, residual_TD = hidden.resolve(self.tp)
        logits_TE = F.linear(x_TD, self.gate_ED)
        experts, moe = (self.gate_up_EGD, self.down_EDF), self.moe
        y_ZTD = sparse_mlp(x_TD, logits_TE, *experts, self.count_E, moe.num_chosen, normalize=moe.normalize)
        return Hidden(residual_TD, y_ZTD)

    def _one_row(self, hidden: Hidden, residual_1D: Tensor) -> Hidden:
        """The same for one row: norm and residual, where nothing is pending, are part of the matmuls."""
        x_1D, norm_D, eps = residual_1D, hidden.norm_weight_D, hidden.norm_eps
        if hidden.pending_TD is not None:
            (x_1D, residual_1D), norm_D = hidden.resolve(self.tp), None
        logits_1E = one_row_matmul(x_1D, self.gate_ED, norm_D, eps)
        added_1D = residual_1D if self.tp.size == 1 else None
        experts, moe = (self.gate_up_EGD, self.down_EDF), self.moe
        y_1D = one_row_experts(
            x_1D, logits_1E, *experts, moe.num_chosen, norm_D, eps, added_1D, normalize=moe.normalize
        )
        return Hidden(residual_1D, y_1D) if added_1D is None else Hidden(y_1D, None)

    @property
    def idle_weights(self) -> int:
        """How many of this rank's weights are of experts that a token doesn't go through."""
        num_experts, per_expert = self.moe.num_experts, self.gate_up_EGD[0].numel() + self.down_EDF[0].numel()
        return (num_experts - self.moe.num_chosen) * per_expert

    def tensor_parts(self, path: str) -> list[TensorPart]:
        (num_experts, size), inner, whole = self.gate_ED.shape, len(self.kept), self.moe.expert_size
        all_D, kept_F = slice(0, size), slice(self.kept.start, self.kept.stop)
        parts = [TensorPart(f"{path}.gate.weight", (num_experts, size), (slice(0, num_experts), all_D), self.gate_ED)]
        for expert in range(num_experts):
            gate_FD, up_FD = self.gate_up_EGD[expert].split(inner)
            name = f"{path}.experts.{expert}"
            parts += [
                TensorPart(f"{name}.gate_proj.weight", (whole, size), (kept_F, all_D), gate_FD),
                TensorPart(f"{name}.up_proj.weight", (whole, size), (kept_F, all_D), up_FD),
                TensorPart(f"{name}.down_proj.weight", (size, whole), (all_D, kept_F), self.down_EDF[expert]),
            ]
        return parts
