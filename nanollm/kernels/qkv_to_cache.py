"""From the QKV projection to attention: QK-norm, rotary embedding, and the write of K and V to the paged cache."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
from torch import Tensor

from nanollm.kernels.backend import gdc_launch_dependents, gdc_wait, overlap, power_of_2, runs_triton, tl, triton
from nanollm.kernels.rms_norm import load_parts, rms_norm_reference

_HEADS = 8  # heads a program


def apply_rope(x_TNH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + H/2]) by the token's angles (Su et al., 2021). cos, sin: float32 [T, H/2]."""
    first, second = x_TNH.float().chunk(2, dim=-1)
    cos_T1R, sin_T1R = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    rotated = torch.cat((first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R), dim=-1)
    return rotated.to(x_TNH.dtype)


def qkv_to_cache_reference(
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
    """The definition; arguments as in qkv_to_cache."""
    num_kv_heads, head_dim = k_cache.shape[-2:]
    qkv_TXH = (qkv_TX if qkv_TX.dim() == 2 else qkv_TX.sum(0).to(k_cache)).unflatten(-1, (-1, head_dim))
    num_heads = qkv_TXH.shape[1] - 2 * num_kv_heads
    qk_TXH, v_TKH = qkv_TXH[:, :-num_kv_heads], qkv_TXH[:, -num_kv_heads:].nan_to_num(0.0, 0.0, 0.0)
    if q_norm_H is not None and k_norm_H is not None:
        q_TNH, k_TKH = qk_TXH[:, :num_heads], qk_TXH[:, num_heads:]
        qk_TXH = torch.cat((rms_norm_reference(q_TNH, q_norm_H, eps), rms_norm_reference(k_TKH, k_norm_H, eps)), dim=1)
    qk_TXH = apply_rope(qk_TXH, *rope_PH.index_select(0, positions_T).chunk(2, dim=-1))
    q_TNH, k_TKH = qk_TXH[:, :num_heads], qk_TXH[:, num_heads:]
    if len(slots_T) and int(slots_T.min()) < 0:
        kept_T = slots_T >= 0
        slots_T, k_TKH, v_TKH = slots_T[kept_T], k_TKH[kept_T], v_TKH[kept_T]
    k_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slots_T, k_TKH)
    v_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slots_T, v_TKH)
    return q_TNH


@triton.jit(do_not_specialize_on_alignment=["positions_T", "slots_T"])
def _qkv_to_cache_kernel(
    q_TNH, k_cache, v_cache, qkv_ZTX, q_norm_H, k_norm_H, rope_PH, positions_T, slots_T, part_stride, eps,
    PARTS: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr, QK_NORM: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # A program takes HEADS heads of one token, as two tiles: the halves that rope pairs. Q, K and V heads may meet in
    # one program; V's are neither normed nor rotated.
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, HALF_PAD)[None, :]
    is_q, is_v = head < NUM_HEADS, head >= NUM_HEADS + NUM_KV_HEADS
    is_k = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (dim < HALF)
    if QK_NORM:
        q_weight_1 = tl.load(q_norm_H + dim, mask=dim < HALF, other=0.0).to(tl.float32)
        q_weight_2 = tl.load(q_norm_H + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)
        k_weight_1 = tl.load(k_norm_H + dim, mask=dim < HALF, other=0.0).to(tl.float32)
        k_weight_2 = tl.load(k_norm_H + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = token * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM + head * HEAD_DIM + dim
    x1 = load_parts(qkv_ZTX, source, inside, part_stride, PARTS)
    x2 = load_parts(qkv_ZTX, source + HALF, inside, part_stride, PARTS)
    angles = rope_PH + tl.load(positions_T + token).to(tl.int64) * HEAD_DIM + dim
    cos = tl.load(angles, mask=dim < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=dim < HALF, other=0.0)
    y1, y2 = x1, x2
    if QK_NORM:
        scale = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / HEAD_DIM + eps)[:, None]
        y1 = x1 * scale * tl.where(is_q, q_weight_1, k_weight_1)
        y2 = x2 * scale * tl.where(is_q, q_weight_2, k_weight_2)
    v1, v2 = tl.where(tl.abs(x1) < float("inf"), x1, 0.0), tl.where(tl.abs(x2) < float("inf"), x2, 0.0)
    z1 = tl.where(is_v, v1, y1 * cos - y2 * sin).to(q_TNH.dtype.element_ty)
    z2 = tl.where(is_v, v2, y2 * cos + y1 * sin).to(q_TNH.dtype.element_ty)

    q = q_TNH + (token * NUM_HEADS + head) * HEAD_DIM + dim
    tl.store(q, z1, mask=inside & is_q)
    tl.store(q + HALF, z2, mask=inside & is_q)
    slot = tl.load(slots_T + token).to(tl.int64)
    k = k_cache + (slot * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_DIM + dim
    v = v_cache + (slot * NUM_KV_HEADS + head - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM + dim
    tl.store(k, z1, mask=inside & is_k & (slot >= 0))
    tl.store(k + HALF, z2, mask=inside & is_k & (slot >= 0))
    tl.store(v, z1, mask=inside & is_v & (slot >= 0))
    tl.store(v + HALF, z2, mask=inside & is_v & (slot >= 0))


def _qkv_to_cache_triton(
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
    num_kv_heads, head_dim = k_cache.shape[-2:]
    num_tokens, all_heads = qkv_TX.shape[-2], qkv_TX.shape[-1] // head_dim
    num_heads = all_heads - 2 * num_kv_heads
    q_TNH = k_cache.new_empty(num_tokens, num_heads, head_dim)
    if num_tokens:
        _qkv_to_cache_kernel[(num_tokens, -(-all_heads // _HEADS))](
            q_TNH,
            k_cache,
            v_cache,
            qkv_TX.contiguous(),
            q_norm_H if q_norm_H is not None else qkv_TX,
            k_norm_H if k_norm_H is not None else qkv_TX,
            rope_PH,
            positions_T,
            slots_T,
            num_tokens * all_heads * head_dim,
            eps,
            PARTS=1 if qkv_TX.dim() == 2 else len(qkv_TX),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HALF_PAD=power_of_2(head_dim // 2),
            QK_NORM=q_norm_H is not None and k_norm_H is not None,
            HEADS=_HEADS,
            num_warps=4,
            **overlap(qkv_TX.device),
        )
    return q_TNH


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

    qkv_TX: [T, (N + 2K) * H], heads of q, then k, then v; or float32 parts of it, [Z, T, (N + 2K) * H].
    q_norm_H, k_norm_H: RMSNorm weights over the head dim, or None for models without.
    rope_PH: float32 [positions, H]: cos of the H/2 angles, then sin.
    slots_T: where each token's k and v go, block * block_size + offset; -1 for nowhere.
    k_cache, v_cache: contiguous [blocks, block_size, K, H]. A v that is NaN or infinite is stored as 0: attention reads
    whole blocks and gives what a row doesn't see, such as what was left in a block by another row, a weight of 0, and
    0 * NaN is NaN. The row itself still ends in NaN, through k.
    Floor on a GPU: one read of qkv_TX, one write of as much. The kernel rounds once, after the rotation.
    """
    run = _qkv_to_cache_triton if runs_triton(qkv_TX) else qkv_to_cache_reference
    return run(qkv_TX, q_norm_H, k_norm_H, eps, rope_PH, positions_T, slots_T, k_cache, v_cache)
