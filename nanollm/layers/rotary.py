"""Rotary position embedding: the table of cos and sin, for every scaling that RopeConfig knows."""

import math

import torch
from torch import Tensor

from nanollm.config import RopeConfig


def rope_table(rope: RopeConfig, head_dim: int, max_position: int) -> Tensor:
    """float32 [max_position, head_dim]: cos of the head_dim / 2 angles of each position, then sin (Su et al., 2021)."""
    frequencies_R, scale = _frequencies(rope, head_dim)
    angles_PR = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies_R)
    return torch.cat((angles_PR.cos(), angles_PR.sin()), dim=-1) * scale


def _frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Angle a position adds to each pair, radians, float32 [head_dim / 2]; and the factor on cos and sin."""
    base_R = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.rope_type == "linear":
        return base_R / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, base_R), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, base_R, head_dim), _yarn_attention_factor(rope)
    return base_R, 1.0


def _llama3(rope: RopeConfig, base_R: Tensor) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between interpolated (Llama 3.1)."""
    turns_R = rope.original_max_position * base_R / (2 * math.pi)  # over the original context
    keep_R = ((turns_R - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return keep_R * base_R + (1 - keep_R) * base_R / rope.factor


def _yarn(rope: RopeConfig, base_R: Tensor, head_dim: int) -> Tensor:
    """Dimensions that turn more than beta_fast times over the original context are kept, those below beta_slow
    stretched by the factor, with a linear ramp between (Peng et al., 2023)."""

    def dimension(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp_R = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretch_R = ramp_R.clamp(0, 1)
    return stretch_R * base_R / rope.factor + (1 - stretch_R) * base_R


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Scale of cos and sin, so its square scales the attention logits."""

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
