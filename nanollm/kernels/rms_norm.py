"""RMSNorm: y = x / rms(x) * weight, alone or after adding to the residual (Zhang & Sennrich, 2019)."""

import torch
from torch import Tensor


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, any leading shape. Sums in float32, rounds once at the end."""
    x = x_TD.float()
    scale_T1 = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale_T1 * weight_D.float()).to(x_TD.dtype)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(residual + x), residual + x); the norm reads the sum before it is rounded."""
    summed_TD = residual_TD.float() + x_TD.float()
    scale_T1 = torch.rsqrt(summed_TD.square().mean(-1, keepdim=True) + eps)
    return (summed_TD * scale_T1 * weight_D.float()).to(x_TD.dtype), summed_TD.to(x_TD.dtype)
