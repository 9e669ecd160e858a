"""RMSNorm as a layer: it only says which norm comes next; the layer that reads the Hidden computes it."""

import torch
from torch import nn

from nanollm.layers.hidden import Hidden
from nanollm.layers.weights import TensorPart


class RMSNorm(nn.Module):
    """Attach this norm to a Hidden. weight_D is whole on every rank."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, hidden: Hidden) -> Hidden:
        return Hidden(hidden.residual_TD, hidden.pending_TD, self.weight, self.eps)

    def tensor_parts(self, path: str) -> list[TensorPart]:
        size = len(self.weight)
        return [TensorPart(f"{path}.weight", (size,), (slice(0, size),), self.weight)]
