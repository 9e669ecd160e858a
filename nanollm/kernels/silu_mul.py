"""SiLU(gate) * up: the gate of the feed-forward layer (Shazeer, 2020)."""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up_TF2: Tensor) -> Tensor:
    """[T, 2F], gate then up, to [T, F]."""
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF
