"""Attention of one new token a row over its paged KV cache, the cache split over programs (Dao et al., 2023).

It may start from the QKV projection: the program of a KV head then does what qkv_to_cache would for its heads, which
saves a kernel, and the new token's K and V needn't come back through the cache.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import functools
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nanollm.kernels.backend import (
    Gpu,
    gdc_launch_dependents,
    gdc_wait,
    gpu,
    overlap,
    power_of_2,
    runs_triton,
    tl,
    triton,
)
from nanollm.kernels.qkv_to_cache import qkv_to_cache
from nanollm.kernels.rms_norm import load_parts


def decode_attention_reference(
    q_BNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_BM: Tensor,
    context_lens_B: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """The definition: all rows at once, padded to the longest context; arguments as in decode_attention."""
    context_lens = context_lens_B.tolist()
    shortest, longest = min(context_lens), max(context_lens)
    num_blocks = -(-longest // k_cache.shape[1])
    shape = (len(context_lens), num_blocks * k_cache.shape[1], *k_cache.shape[2:])
    blocks = block_tables_BM[:, :num_blocks].flatten()
    # index_select is several times as quick on the CPU as k_cache[blocks].
    k_BCKH = k_cache.index_select(0, blocks).view(shape)[:, :longest]
    v_BCKH = v_cache.index_select(0, blocks).view(shape)[:, :longest]
    mask = None
    if shortest < longest:
        seen_BC = torch.arange(longest, device=q_BNH.device) < context_lens_B[:, None]
        k_BCKH.masked_fill_(~seen_BC[:, :, None, None], 0)  # what others left there may be NaN
        mask = seen_BC[:, None, None]
    q_BKGH = q_BNH.unflatten(1, (k_cache.shape[2], -1))
    out_BKGH = F.scaled_dot_product_attention(q_BKGH, k_BCKH.transpose(1, 2), v_BCKH.transpose(1, 2), attn_mask=mask)
    out_BNH = out_BKGH.flatten(1, 2)
    if not shortest:
        empty_B11 = (context_lens_B == 0)[:, None, None]
        out_BNH = out_BNH.masked_fill(empty_B11, 0) if out is None else torch.where(empty_B11, out, out_BNH)
    return out_BNH if out is None else out.copy_(out_BNH)


@triton.jit
def _combine(
    out_GH, partial_SGH, lse_SG, num_splits,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP_TILE: tl.constexpr, HEAD_TILE: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
):  # fmt: skip
    """The whole softmax from that of each split: weights in proportion to exp of the split's log-sum-exp."""
    head_G, dim_H = tl.arange(0, GROUP_TILE), tl.arange(0, HEAD_TILE)
    inside_G, inside_H = head_G < GROUP, dim_H < HEAD_DIM
    top_G = tl.full([GROUP_TILE], -1e30, tl.float32)  # below any; finite, for heads that aren't there
    total_G = tl.zeros([GROUP_TILE], tl.float32)
    acc_GH = tl.zeros([GROUP_TILE, HEAD_TILE], tl.float32)
    for first in range(0, num_splits, SPLIT_TILE):  # most often once: their loads are under way together
        split_S = first + tl.arange(0, SPLIT_TILE)
        at_SG = split_S[:, None] * GROUP + head_G[None, :]
        inside_SG = (split_S < num_splits)[:, None] & inside_G[None, :]
        at_SGH = at_SG[:, :, None] * HEAD_DIM + dim_H[None, None, :]
        inside_SGH = inside_SG[:, :, None] & inside_H[None, None, :]
        # From L2: others wrote them.
        part_SGH = tl.load(partial_SGH + at_SGH, mask=inside_SGH, other=0.0, cache_modifier=".cg")
        part_lse_SG = tl.load(lse_SG + at_SG, mask=inside_SG, other=float("-inf"), cache_modifier=".cg")
        new_top_G = tl.maximum(top_G, tl.max(part_lse_SG, 0))
        shrink_G, share_SG = tl.exp2(top_G - new_top_G), tl.exp2(part_lse_SG - new_top_G[None, :])
        total_G = total_G * shrink_G + tl.sum(share_SG, 0)
        acc_GH = acc_GH * shrink_G[:, None] + tl.sum(share_SG[:, :, None] * part_SGH, 0)
        top_G = new_top_G
    acc_GH /= tl.where(inside_G, total_G, 1.0)[:, None]
    offset_GH = head_G[:, None] * HEAD_DIM + dim_H[None, :]
    tl.store(out_GH + offset_GH, acc_GH.to(out_GH.dtype.element_ty), mask=inside_G[:, None] & inside_H[None, :])


@triton.jit
def _partner(HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr):
    """For each dimension the one that rope pairs it with."""
    dim_H = tl.arange(0, HEAD_TILE)
    return tl.where(dim_H < HEAD_DIM // 2, dim_H + HEAD_DIM // 2, dim_H - HEAD_DIM // 2)


@triton.jit
def _rotation(rope_PH, norm_H, position, HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr, QK_NORM: tl.constexpr):
    """What a head's dimensions and their partners are multiplied by: cosine, signed sine, each by the norm's weight."""
    dim_H, partner_H = tl.arange(0, HEAD_TILE), _partner(HEAD_DIM, HEAD_TILE)
    angle_H = rope_PH + position * HEAD_DIM + tl.minimum(dim_H, partner_H)
    cos_H = tl.load(angle_H, mask=dim_H < HEAD_DIM, other=0.0)
    sin_H = tl.load(angle_H + HEAD_DIM // 2, mask=dim_H < HEAD_DIM, other=0.0)
    sin_H = tl.where(dim_H < HEAD_DIM // 2, -sin_H, sin_H)
    if QK_NORM:
        cos_H *= tl.load(norm_H + dim_H, mask=dim_H < HEAD_DIM, other=0.0).to(tl.float32)
        sin_H *= tl.load(norm_H + partner_H, mask=dim_H < HEAD_DIM, other=0.0).to(tl.float32)
    return cos_H, sin_H


@triton.jit
def _rotated_heads(
    qkv_ZBX, start, inside, part_stride, cos_H, sin_H, eps,
    PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr, QK_NORM: tl.constexpr,
):  # fmt: skip
    """Heads of q or k from the projection, normed and rotated as in qkv_to_cache: [heads, H]. start: where each is."""
    dim_H, partner_H = tl.arange(0, HEAD_TILE), _partner(HEAD_DIM, HEAD_TILE)
    x = load_parts(qkv_ZBX, start + dim_H[None, :], inside, part_stride, PARTS)
    other = load_parts(qkv_ZBX, start + partner_H[None, :], inside, part_stride, PARTS)
    rotated = x * cos_H[None, :] + other * sin_H[None, :]
    if QK_NORM:
        rotated *= tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
    return rotated


@triton.jit
def _load_tile(
    k_cache, v_cache, block_C, first, context, kv_head,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_TILE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """K and V of tokens first … first + TILE, in these blocks, and which of them there are."""
    token_C, dim_H = first + tl.arange(0, TILE), tl.arange(0, HEAD_TILE)
    slot_C = block_C.to(tl.int64) * BLOCK_SIZE + token_C % BLOCK_SIZE
    offset_CH = (slot_C * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim_H[None, :]
    inside_C = token_C < context
    inside_CH = inside_C[:, None] & (dim_H < HEAD_DIM)[None, :]
    # Each is read once, so past the L1 cache, where a program that started early might find what was there before.
    k_CH = tl.load(k_cache + offset_CH, mask=inside_CH, other=0.0, cache_modifier=".cg")
    v_CH = tl.load(v_cache + offset_CH, mask=inside_CH, other=0.0, cache_modifier=".cg")
    return k_CH, v_CH, inside_C


@triton.jit
def _attend(q_GH, k_CH, v_CH, inside_C, top_G, total_GC, acc_GH, scale_log2):
    """One more tile of tokens in a softmax that is under way."""
    score_GC = tl.dot(q_GH, tl.trans(k_CH), input_precision="tf32x3")
    score_GC = tl.where(inside_C[None, :], score_GC, float("-inf"))
    new_top_G = tl.maximum(top_G, tl.max(score_GC, 1) * scale_log2)
    weight_GC = tl.exp2(score_GC * scale_log2 - new_top_G[:, None])
    shrink_G = tl.exp2(top_G - new_top_G)
    acc_GH = tl.dot(weight_GC.to(v_CH.dtype), v_CH, acc_GH * shrink_G[:, None], input_precision="tf32x3")
    return new_top_G, total_GC * shrink_G[:, None] + weight_GC, acc_GH


@triton.jit(do_not_specialize_on_alignment=["block_tables_BM", "context_lens_B", "positions_B", "slots_B"])
def _decode_attention_kernel(
    out_BNH, partial_BKSGH, lse_BKSG, arrived_BK, q_BNH, k_cache, v_cache, block_tables_BM, context_lens_B, q_norm_H,
    k_norm_H, rope_PH, positions_B, slots_B, q_stride, part_stride, table_stride, table_len, scale_log2, eps,
    FROM_QKV: tl.constexpr, PARTS: tl.constexpr, QK_NORM: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, NUM_SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr,
    GROUP_PAD: tl.constexpr, GROUP_TILE: tl.constexpr, HEAD_TILE: tl.constexpr, SPLIT_TILE: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, KEEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program takes one KV head of one row, with all query heads that share it, and every num_splits-th tile of its
    # tokens. The grid depends on the bucket alone; programs without a tile leave at once. FROM_QKV, q_BNH is the QKV
    # projection, and the new token is taken from there, by the first split.
    kv_head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    head_G, dim_H, token_C = tl.arange(0, GROUP_PAD), tl.arange(0, HEAD_TILE), tl.arange(0, TILE)
    inside_GH = (head_G < GROUP)[:, None] & (dim_H < HEAD_DIM)[None, :]
    offset_GH = head_G[:, None] * HEAD_DIM + dim_H[None, :]
    if PDL:
        gdc_launch_dependents()
        if not FROM_QKV:
            gdc_wait()
    # These loads don't wait for one another: the first tile is the same whatever the context. FROM_QKV, they don't wait
    # for the projection either: lengths and tables are complete before any attention starts (see overlap()), and the
    # tokens of earlier steps are in the cache.
    context = tl.load(context_lens_B + row, cache_modifier=".cg")
    table = block_tables_BM + row * table_stride
    block_C = load_blocks(table, split * TILE, table_len * BLOCK_SIZE, BLOCK_SIZE, TILE, ".cg")
    num_splits = tl.minimum(NUM_SPLITS, tl.maximum(tl.cdiv(context, MIN_SPLIT), 0 if KEEP else 1))
    if FROM_QKV:
        position = tl.load(positions_B + row, cache_modifier=".cg").to(tl.int64)
        slot = tl.load(slots_B + row, cache_modifier=".cg").to(tl.int64)
        q_cos_H, q_sin_H = _rotation(rope_PH, q_norm_H, position, HEAD_DIM, HEAD_TILE, QK_NORM)
        k_cos_H, k_sin_H = _rotation(rope_PH, k_norm_H, position, HEAD_DIM, HEAD_TILE, QK_NORM)
        context -= 1
        if EARLY:
            early_k_CH, early_v_CH, early_C = _load_tile(
                k_cache, v_cache, block_C, split * TILE, tl.where(split < num_splits, context, 0), kv_head,
                NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, HEAD_TILE, TILE,
            )  # fmt: skip
            block_C = load_blocks(table, (split + num_splits) * TILE, context, BLOCK_SIZE, TILE, ".cg")
        if PDL:
            gdc_wait()
    else:
        q_GH = tl.load(q_BNH + row * q_stride + kv_head * GROUP * HEAD_DIM + offset_GH, mask=inside_GH, other=0.0)

    if split >= num_splits:
        return
    top_G = tl.full([GROUP_PAD], float("-inf"), tl.float32)  # of scores, in units of log2
    total_GC = tl.zeros([GROUP_PAD, TILE], tl.float32)  # summed over C only at the end: warps would meet for each sum
    acc_GH = tl.zeros([GROUP_PAD, HEAD_TILE], tl.float32)
    first = split * TILE
    if FROM_QKV:
        start, one, inside_1H = row * q_stride, tl.arange(0, 1)[:, None], (dim_H < HEAD_DIM)[None, :]
        q_start = start + (kv_head * GROUP + head_G)[:, None] * HEAD_DIM
        k_start = start + (NUM_KV_HEADS * GROUP + kv_head + one) * HEAD_DIM
        q_GH = _rotated_heads(
            q_BNH, q_start, inside_GH, part_stride, q_cos_H, q_sin_H, eps, PARTS, HEAD_DIM, HEAD_TILE, QK_NORM
        ).to(k_cache.dtype.element_ty)
        if (split == 0) & (context >= 0):
            k_1H = _rotated_heads(
                q_BNH, k_start, inside_1H, part_stride, k_cos_H, k_sin_H, eps, PARTS, HEAD_DIM, HEAD_TILE, QK_NORM
            ).to(k_cache.dtype.element_ty)
            v_1H = load_parts(q_BNH, k_start + NUM_KV_HEADS * HEAD_DIM + dim_H[None, :], inside_1H, part_stride, PARTS)
            v_1H = tl.where(tl.abs(v_1H) < float("inf"), v_1H, 0.0).to(v_cache.dtype.element_ty)
            at_1H = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM + dim_H[None, :]
            tl.store(k_cache + at_1H, k_1H, mask=inside_1H & (slot >= 0))
            tl.store(v_cache + at_1H, v_1H, mask=inside_1H & (slot >= 0))
            top_G = tl.sum(q_GH.to(tl.float32) * k_1H.to(tl.float32), 1) * scale_log2
            total_GC += (token_C == 0).to(tl.float32)[None, :]
            acc_GH += v_1H.to(tl.float32)
        if EARLY:
            if first < context:
                top_G, total_GC, acc_GH = _attend(
                    q_GH, early_k_CH, early_v_CH, early_C, top_G, total_GC, acc_GH, scale_log2
                )
            first += num_splits * TILE
    for tile in tl.range(first, context, num_splits * TILE, num_stages=STAGES):
        k_CH, v_CH, inside_C = _load_tile(
            k_cache, v_cache, block_C, tile, context, kv_head,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, HEAD_TILE, TILE,
        )  # fmt: skip
        # The next tile's blocks are looked up a tile ahead: the loads of K and V depend on them.
        block_C = load_blocks(table, tile + num_splits * TILE, context, BLOCK_SIZE, TILE, ".cg")
        top_G, total_GC, acc_GH = _attend(q_GH, k_CH, v_CH, inside_C, top_G, total_GC, acc_GH, scale_log2)

    total_G = tl.sum(total_GC, 1)
    acc_GH /= tl.where(total_G == 0, 1.0, total_G)[:, None]  # 0 where the context is
    pair = row * NUM_KV_HEADS + kv_head
    out_GH = out_BNH + pair * GROUP * HEAD_DIM
    if num_splits == 1:
        tl.store(out_GH + offset_GH, acc_GH.to(out_BNH.dtype.element_ty), mask=inside_GH)
    else:
        # The program that arrives last adds up the splits, in their order whoever is last.
        partial_SGH = partial_BKSGH + pair * NUM_SPLITS * GROUP * HEAD_DIM
        lse_SG = lse_BKSG + pair * NUM_SPLITS * GROUP
        tl.store(partial_SGH + split * GROUP * HEAD_DIM + offset_GH, acc_GH, mask=inside_GH)
        tl.store(lse_SG + split * GROUP + head_G, top_G + tl.log2(total_G), mask=head_G < GROUP)
        tl.debug_barrier()  # all threads have stored before one of them says so
        if tl.atomic_add(arrived_BK + pair, 1, sem="acq_rel") == num_splits - 1:
            tl.store(arrived_BK + pair, 0)  # for the next launch
            _combine(out_GH, partial_SGH, lse_SG, num_splits, GROUP, HEAD_DIM, GROUP_TILE, HEAD_TILE, SPLIT_TILE)


@triton.jit
def load_blocks(table, first, stop, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, CACHE: tl.constexpr):
    """The blocks of tokens first … first + TILE of a row: one for all of them where a tile fits in a block."""
    token_C = first if BLOCK_SIZE % TILE == 0 else first + tl.arange(0, TILE)
    return tl.load(table + token_C // BLOCK_SIZE, mask=token_C < stop, other=0, cache_modifier=CACHE)


@dataclass(frozen=True)
class Launch:
    """num_splits: programs a long row is split over; min_split: tokens worth a program of their own.

    early: a program's first tile is loaded before it waits for the projection.
    """

    num_splits: int
    min_split: int
    tile: int
    stages: int
    num_warps: int
    early: bool = True


def launch_for(num_rows: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, gpu: Gpu) -> Launch:
    """How to launch a bucket, as measured on an H200.

    Enough programs to fill the GPU if all rows are long; few more, since even those that leave at once cost time. Where
    few rows have the GPU, waits are most of a program's time, so its tiles are small. From the bucket's rows alone,
    never from contexts, so that a row's result doesn't depend on its neighbours' lengths.
    """
    pairs = max(num_rows * num_kv_heads, 1)
    num_splits = min(power_of_2(gpu.num_sms // pairs + 1) // 2, 32)
    if num_splits > 2:
        launch = Launch(num_splits, 64, 64, 2, 4)
    elif pairs <= gpu.num_sms:
        launch = Launch(2, 128 if num_splits == 2 else 2048, 128, 3, 8)
    elif pairs <= 2 * gpu.num_sms:
        launch = Launch(2, 2048, 64, 4, 4)
    elif pairs <= 4 * gpu.num_sms:
        launch = Launch(1, 2048, 64, 4, 4, early=False)
    else:
        launch = Launch(1, 2048, 64, 3, 4)
    row_bytes = 2 * power_of_2(head_dim) * dtype.itemsize  # K and V of a token
    room = gpu.shared_bytes - (40 if dtype == torch.float32 else 16) * 1024
    while (launch.stages - 1) * launch.tile * row_bytes > room and launch.tile > 16:
        launch = replace(launch, tile=launch.tile // 2, num_warps=4)
    if (launch.stages - 1) * launch.tile * row_bytes > room:
        launch = replace(launch, stages=2)
    return launch


@dataclass(frozen=True)
class NewTokens:
    """What qkv_to_cache needs beside the projection and the caches; named as there."""

    q_norm_H: Tensor | None
    k_norm_H: Tensor | None
    eps: float
    rope_PH: Tensor
    positions_B: Tensor
    slots_B: Tensor


def starts_from_qkv(num_rows: int, num_kv_heads: int, device: torch.device) -> bool:
    """Whether decode_attention_from_qkv is the better way: where launches take the time, not reading the cache."""
    return 2 * num_rows * num_kv_heads <= 7 * gpu(device).num_sms


@functools.cache
def _arrival_counts(device: torch.device, size: int) -> Tensor:
    """int32 zeros, which every launch leaves as zeros. One for all launches: they follow one another in one stream."""
    return torch.zeros(size, dtype=torch.int32, device=device)


def _decode_attention_triton(
    out_BNH: Tensor,
    q_BNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_BM: Tensor,
    context_lens_B: Tensor,
    launch: Launch | None = None,
    *,
    keep: bool = False,
    source: NewTokens | None = None,
) -> None:
    num_rows, num_heads, head_dim = out_BNH.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    device = q_BNH.device
    if not num_rows:
        return
    launch = launch or launch_for(num_rows, num_kv_heads, head_dim, k_cache.dtype, gpu(device))
    num_splits = launch.num_splits
    partial = lse = out_BNH
    if num_splits > 1:
        partial = torch.empty(num_rows * num_heads * num_splits * head_dim, dtype=torch.float32, device=device)
        lse = torch.empty(num_rows * num_heads * num_splits, dtype=torch.float32, device=device)
    _decode_attention_kernel[(num_kv_heads, num_rows, num_splits)](
        out_BNH,
        partial,
        lse,
        _arrival_counts(device, power_of_2(max(num_rows * num_kv_heads, 4096))),
        q_BNH,
        k_cache,
        v_cache,
        block_tables_BM,
        context_lens_B,
        q_BNH if source is None or source.q_norm_H is None else source.q_norm_H,
        q_BNH if source is None or source.k_norm_H is None else source.k_norm_H,
        q_BNH if source is None else source.rope_PH,
        context_lens_B if source is None else source.positions_B,
        context_lens_B if source is None else source.slots_B,
        q_BNH.stride(-2 if source is not None else 0),
        q_BNH.stride(0),
        block_tables_BM.stride(0),
        block_tables_BM.shape[1],
        head_dim**-0.5 * math.log2(math.e),
        0.0 if source is None else source.eps,
        FROM_QKV=source is not None,
        PARTS=len(q_BNH) if source is not None and q_BNH.dim() == 3 else 1,
        QK_NORM=source is not None and source.q_norm_H is not None,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        NUM_SPLITS=num_splits,
        MIN_SPLIT=launch.min_split,
        GROUP_PAD=max(power_of_2(group), 16),  # what tl.dot takes
        GROUP_TILE=power_of_2(group),
        HEAD_TILE=max(power_of_2(head_dim), 16),
        SPLIT_TILE=min(power_of_2(num_splits), max(16384 // (power_of_2(group) * power_of_2(head_dim)), 1)),
        TILE=launch.tile,
        STAGES=launch.stages,
        EARLY=launch.early,
        KEEP=keep,
        num_warps=launch.num_warps,
        **overlap(device),
    )


def decode_attention_from_qkv(
    qkv_BX: Tensor,
    source: NewTokens,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_BM: Tensor,
    context_lens_B: Tensor,
) -> Tensor:
    """qkv_to_cache, then decode_attention, in one kernel on a GPU. qkv_BX: as qkv_to_cache takes it. Returns [B, N, H].

    What is left in the caches, and the result, are those of the two to within rounding. All but qkv_BX must be complete
    before the step's embedding (see overlap()), and no row may read what another row writes in this step.
    """
    if not runs_triton(qkv_BX):
        q_BNH = qkv_to_cache(
            qkv_BX, source.q_norm_H, source.k_norm_H, source.eps, source.rope_PH, source.positions_B, source.slots_B,
            k_cache, v_cache,
        )  # fmt: skip
        return decode_attention(q_BNH, k_cache, v_cache, block_tables_BM, context_lens_B)
    num_rows, num_all = qkv_BX.shape[-2:]
    num_kv_heads, head_dim = k_cache.shape[2:]
    out_BNH = k_cache.new_empty(num_rows, num_all // head_dim - 2 * num_kv_heads, head_dim)
    _decode_attention_triton(
        out_BNH, qkv_BX.contiguous(), k_cache, v_cache, block_tables_BM, context_lens_B, source=source
    )
    return out_BNH


def decode_attention(
    q_BNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_BM: Tensor,
    context_lens_B: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Row b's query over the first context_lens_B[b] tokens of its cache, its own among them.

    Returns [B, N, H], in `out` if given. k_cache, v_cache: contiguous [blocks, block_size, K, H]; block_size a power
    of two; H up to 256. block_tables_BM, context_lens_B: int32. A row of context 0 (padding of a CUDA graph) reads
    nothing and gives zeros, or what is in `out` already.
    Softmax scale: H ** -0.5. Launches depend on the number of rows only, so a captured one serves all contexts.
    Floor on a GPU: one read of every row's K and V.
    """
    if not runs_triton(q_BNH):
        return decode_attention_reference(q_BNH, k_cache, v_cache, block_tables_BM, context_lens_B, out)
    out_BNH = torch.empty_like(q_BNH, memory_format=torch.contiguous_format) if out is None else out
    keep = out is not None
    _decode_attention_triton(out_BNH, q_BNH, k_cache, v_cache, block_tables_BM, context_lens_B, keep=keep)
    return out_BNH
