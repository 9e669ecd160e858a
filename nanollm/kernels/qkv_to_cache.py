"""From the QKV projection to attention: QK-norm, rotary embedding, and the write of K and V to the paged cache."""

import torch
from torch import Tensor

from nanollm.kernels.rms_norm import rms_norm


def apply_rope(x_TNH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + H/2]) by the token's angles (Su et al., 2021). cos, sin: float32 [T, H/2]."""
    first, second = x_TNH.float().chunk(2, dim=-1)
    cos_T1R, sin_T1R = cos_TR[:, None], sin_TR[:, None]
    rotated = torch.cat((first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R), dim=-1)
    return rotated.to(x_TNH.dtype)


def qkv_to_cache(
    qkv_TX: Tensor,
    q_norm_H: Tensor | None,
    k_norm_H: Tensor | None,
    eps: float,
    rope_PH: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """Returns q_TNH, normed and rotated; writes k (normed and rotated) and v to the cache.

    qkv_TX: [T, (N + 2K) * H], heads of q, then k, then v.
    q_norm_H, k_norm_H: RMSNorm weights over the head dim, or None for models without.
    rope_PH: float32 [positions, H]: cos of the H/2 angles, then sin.
    slots_T: where each token's k and v go, block * block_size + offset.
    k_cache, v_cache: [blocks, block_size, K, H].
    """
    num_kv_heads, head_dim = k_cache.shape[-2:]
    qkv_TXH = qkv_TX.unflatten(-1, (-1, head_dim))
    q_TNH, k_TKH, v_TKH = qkv_TXH.split([qkv_TXH.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm_H is not None and k_norm_H is not None:
        q_TNH, k_TKH = rms_norm(q_TNH, q_norm_H, eps), rms_norm(k_TKH, k_norm_H, eps)
    cos_TR, sin_TR = rope_PH[positions_T].chunk(2, dim=-1)
    q_TNH, k_TKH = apply_rope(q_TNH, cos_TR, sin_TR), apply_rope(k_TKH, cos_TR, sin_TR)
    k_cache.view(-1, num_kv_heads, head_dim)[slots_T] = k_TKH
    v_cache.view(-1, num_kv_heads, head_dim)[slots_T] = v_TKH
    return q_TNH
