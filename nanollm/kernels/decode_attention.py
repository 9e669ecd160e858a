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
    prefetch,
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
def _load_split(
    lse_SG,
    partial_SGH,
    split,
    num_splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    """A split's log-sum-exp and output, of weight 0 if there is no such split. From L2: others wrote them."""
    head_G, dim_H = tl.arange(0, GROUP_TILE), tl.arange(0, HEAD_TILE)
    inside_G = (head_G < GROUP) & (split < num_splits)
    inside_GH = inside_G[:, None] & (dim_H < HEAD_DIM)[None, :]
    offset_GH = (split * GROUP + head_G)[:, None] * HEAD_DIM + dim_H[None, :]
    lse_G = tl.load(lse_SG + split * GROUP + head_G, mask=inside_G, other=float("-inf"), cache_modifier=".cg")
    return lse_G, tl.load(partial_SGH + offset_GH, mask=inside_GH, other=0.0, cache_modifier=".cg")


@triton.jit
def _combine(
    out_GH,
    partial_SGH,
    lse_SG,
    num_splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    """The whole softmax from that of each split: weights in proportion to exp of the split's log-sum-exp."""
    head_G, dim_H = tl.arange(0, GROUP_TILE), tl.arange(0, HEAD_TILE)
    inside_G = head_G < GROUP
    inside_GH = inside_G[:, None] & (dim_H < HEAD_DIM)[None, :]
    offset_GH = head_G[:, None] * HEAD_DIM + dim_H[None, :]
    top_G = tl.full([GROUP_TILE], -1e30, tl.float32)  # below any; finite, for heads that aren't there
    total_G = tl.zeros([GROUP_TILE], tl.float32)
    acc_GH = tl.zeros([GROUP_TILE, HEAD_TILE], tl.float32)
    for first in range(0, num_splits, 4):  # four at a time, so that their loads are under way together
        lse_0, part_0 = _load_split(lse_SG, partial_SGH, first, num_splits, GROUP, HEAD_DIM, GROUP_TILE, HEAD_TILE)
        lse_1, part_1 = _load_split(lse_SG, partial_SGH, first + 1, num_splits, GROUP, HEAD_DIM, GROUP_TILE, HEAD_TILE)
        lse_2, part_2 = _load_split(lse_SG, partial_SGH, first + 2, num_splits, GROUP, HEAD_DIM, GROUP_TILE, HEAD_TILE)
        lse_3, part_3 = _load_split(lse_SG, partial_SGH, first + 3, num_splits, GROUP, HEAD_DIM, GROUP_TILE, HEAD_TILE)
        new_top_G = tl.maximum(top_G, tl.maximum(tl.maximum(lse_0, lse_1), tl.maximum(lse_2, lse_3)))
        shrink_G = tl.exp2(top_G - new_top_G)
        share_0, share_1 = tl.exp2(lse_0 - new_top_G), tl.exp2(lse_1 - new_top_G)
        share_2, share_3 = tl.exp2(lse_2 - new_top_G), tl.exp2(lse_3 - new_top_G)
        total_G = total_G * shrink_G + (share_0 + share_1) + (share_2 + share_3)
        acc_GH = acc_GH * shrink_G[:, None] + share_0[:, None] * part_0 + share_1[:, None] * part_1
        acc_GH += share_2[:, None] * part_2 + share_3[:, None] * part_3
        top_G = new_top_G
    acc_GH /= tl.where(inside_G, total_G, 1.0)[:, None]
    tl.store(out_GH + offset_GH, acc_GH.to(out_GH.dtype.element_ty), mask=inside_GH)


@triton.jit
def _rotated_heads(
    qkv_ZBX,
    start,
    inside,
    part_stride,
    norm_H,
    angles_H,
    eps,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    """Heads of q or k from the projection, normed and rotated as in qkv_to_cache: [heads, H]. start: where each is."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dim_H = tl.arange(0, HEAD_TILE)
    is_first_H = dim_H < HALF
    other_H = tl.where(is_first_H, dim_H + HALF, dim_H - HALF)  # that rope pairs it with
    x = load_parts(qkv_ZBX, start + dim_H[None, :], inside, part_stride, PARTS)
    other = load_parts(qkv_ZBX, start + other_H[None, :], inside, part_stride, PARTS)
    if QK_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x *= scale * tl.load(norm_H + dim_H, mask=dim_H < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
        other *= scale * tl.load(norm_H + other_H, mask=dim_H < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    cos_H = tl.load(angles_H + tl.minimum(dim_H, other_H), mask=dim_H < HEAD_DIM, other=0.0)
    sin_H = tl.load(angles_H + HALF + tl.minimum(dim_H, other_H), mask=dim_H < HEAD_DIM, other=0.0)
    return x * cos_H[None, :] + other * tl.where(is_first_H, -sin_H, sin_H)[None, :]


@triton.jit(do_not_specialize_on_alignment=["block_tables_BM", "context_lens_B", "positions_B", "slots_B"])
def _decode_attention_kernel(
    out_BNH,
    partial_BKSGH,
    lse_BKSG,
    arrived_BK,
    q_BNH,
    k_cache,
    v_cache,
    block_tables_BM,
    context_lens_B,
    q_norm_H,
    k_norm_H,
    rope_PH,
    positions_B,
    slots_B,
    q_stride,
    part_stride,
    table_stride,
    table_len,
    scale_log2,
    eps,
    FROM_QKV: tl.constexpr,
    PARTS: tl.constexpr,
    QK_NORM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    KEEP: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program takes one KV head of one row, with all query heads that share it, and every num_splits-th tile of its
    # tokens. The grid depends on the bucket alone; programs without a tile leave at once. FROM_QKV, q_BNH is the QKV
    # projection, and the new token is taken from there, by the first split.
    kv_head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    head_G, dim_H, token_C = tl.arange(0, GROUP_PAD), tl.arange(0, HEAD_TILE), tl.arange(0, TILE)
    inside_GH = (head_G < GROUP)[:, None] & (dim_H < HEAD_DIM)[None, :]
    offset_GH = head_G[:, None] * HEAD_DIM + dim_H[None, :]
    # Lengths and tables are complete before any attention starts (see the embedding), and the tokens of earlier steps
    # are nobody's output in this one: they start for the L2 cache while the kernel before this one still runs.
    context = tl.load(context_lens_B + row, cache_modifier=".cg")
    table = block_tables_BM + row * table_stride
    block_C = _blocks(table, split * TILE, table_len * BLOCK_SIZE, BLOCK_SIZE, TILE)
    num_splits = tl.minimum(NUM_SPLITS, tl.maximum(tl.cdiv(context, MIN_SPLIT), 0 if KEEP else 1))
    if PDL:
        gdc_launch_dependents()
        LINE: tl.constexpr = 1024 // k_cache.dtype.element_ty.primitive_bitwidth  # values in 128 bytes
        LINES: tl.constexpr = HEAD_TILE // LINE if HEAD_TILE > LINE else 1
        line_L = tl.minimum(tl.arange(0, LINES) * LINE, HEAD_DIM - 1)
        for tile in tl.static_range(EARLY):
            first = (split + tile * num_splits) * TILE
            if first < context:
                early_C = tl.minimum(first + token_C, context - 1)
                early_slot_C = tl.load(table + early_C // BLOCK_SIZE, cache_modifier=".cg").to(tl.int64) * BLOCK_SIZE
                early_slot_C += early_C % BLOCK_SIZE
                early_CL = (early_slot_C * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + line_L[None, :]
                prefetch(k_cache + early_CL)
                prefetch(v_cache + early_CL)
        gdc_wait()
    if not FROM_QKV:
        q_GH = tl.load(q_BNH + row * q_stride + kv_head * GROUP * HEAD_DIM + offset_GH, mask=inside_GH, other=0.0)

    if split >= num_splits:
        return
    top_G = tl.full([GROUP_PAD], float("-inf"), tl.float32)  # of scores, in units of log2
    total_GC = tl.zeros([GROUP_PAD, TILE], tl.float32)  # summed over C only at the end: warps would meet for each sum
    acc_GH = tl.zeros([GROUP_PAD, HEAD_TILE], tl.float32)
    if FROM_QKV:
        angles_H = rope_PH + tl.load(positions_B + row).to(tl.int64) * HEAD_DIM
        slot, one = tl.load(slots_B + row).to(tl.int64), tl.arange(0, 1)[:, None]
        start, inside_1H = row * q_stride, (dim_H < HEAD_DIM)[None, :]
        q_start = start + (kv_head * GROUP + head_G)[:, None] * HEAD_DIM
        k_start = start + (NUM_KV_HEADS * GROUP + kv_head + one) * HEAD_DIM
        q_GH = _rotated_heads(
            q_BNH, q_start, inside_GH, part_stride, q_norm_H, angles_H, eps, PARTS, HEAD_DIM, HEAD_TILE, QK_NORM
        ).to(k_cache.dtype.element_ty)
        context -= 1
        if (split == 0) & (context >= 0):
            k_1H = _rotated_heads(
                q_BNH, k_start, inside_1H, part_stride, k_norm_H, angles_H, eps, PARTS, HEAD_DIM, HEAD_TILE, QK_NORM
            ).to(k_cache.dtype.element_ty)
            v_1H = load_parts(q_BNH, k_start + NUM_KV_HEADS * HEAD_DIM + dim_H[None, :], inside_1H, part_stride, PARTS)
            v_1H = tl.where(tl.abs(v_1H) < float("inf"), v_1H, 0.0).to(v_cache.dtype.element_ty)
            at_1H = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM + dim_H[None, :]
            tl.store(k_cache + at_1H, k_1H, mask=inside_1H & (slot >= 0))
            tl.store(v_cache + at_1H, v_1H, mask=inside_1H & (slot >= 0))
            top_G = tl.sum(q_GH.to(tl.float32) * k_1H.to(tl.float32), 1) * scale_log2
            total_GC += (token_C == 0).to(tl.float32)[None, :]
            acc_GH += v_1H.to(tl.float32)
    for first in tl.range(split * TILE, context, num_splits * TILE, num_stages=STAGES):
        slot_C = block_C.to(tl.int64) * BLOCK_SIZE + (first + token_C) % BLOCK_SIZE
        # The next tile's blocks are looked up a tile ahead: the loads of K and V depend on them.
        block_C = _blocks(table, first + num_splits * TILE, context, BLOCK_SIZE, TILE)
        inside_C = first + token_C < context
        offset_CH = (slot_C * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim_H[None, :]
        inside_CH = inside_C[:, None] & (dim_H < HEAD_DIM)[None, :]
        k_CH = tl.load(k_cache + offset_CH, mask=inside_CH, other=0.0)
        v_CH = tl.load(v_cache + offset_CH, mask=inside_CH, other=0.0)
        score_GC = tl.dot(q_GH, tl.trans(k_CH), input_precision="tf32x3")
        score_GC = tl.where(inside_C[None, :], score_GC, float("-inf"))
        new_top_G = tl.maximum(top_G, tl.max(score_GC, 1) * scale_log2)
        weight_GC = tl.exp2(score_GC * scale_log2 - new_top_G[:, None])
        shrink_G = tl.exp2(top_G - new_top_G)
        total_GC = total_GC * shrink_G[:, None] + weight_GC
        acc_GH = acc_GH * shrink_G[:, None]
        acc_GH = tl.dot(weight_GC.to(v_CH.dtype), v_CH, acc_GH, input_precision="tf32x3")
        top_G = new_top_G

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
            _combine(out_GH, partial_SGH, lse_SG, num_splits, GROUP, HEAD_DIM, GROUP_TILE, HEAD_TILE)


@triton.jit
def _blocks(table, first, stop, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The blocks of tokens first … first + TILE of a row: one for all of them where a tile fits in a block."""
    token_C = first if BLOCK_SIZE % TILE == 0 else first + tl.arange(0, TILE)
    return tl.load(table + token_C // BLOCK_SIZE, mask=token_C < stop, other=0, cache_modifier=".cg")


@dataclass(frozen=True)
class Launch:
    """num_splits: programs a long row is split over; min_split: tokens worth a program of their own.

    early: a program's first tiles that are fetched before it waits for the kernel before.
    """

    num_splits: int
    min_split: int
    tile: int
    stages: int
    num_warps: int
    early: int = 1


def launch_for(num_rows: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, gpu: Gpu) -> Launch:
    """How to launch a bucket, as measured on an H200.

    Enough programs to fill the GPU if all rows are long; few more, since even those that leave at once cost time. From
    the bucket's rows alone, never from contexts, so that a row's result doesn't depend on its neighbours' lengths.
    """
    pairs = max(num_rows * num_kv_heads, 1)
    if pairs <= gpu.num_sms:
        wanted = min(gpu.num_sms // pairs, max(64 // pairs, 8), 32)
        num_splits = power_of_2(wanted + 1) // 2
        launch = Launch(num_splits, 128, 128, 3, 8) if num_splits > 1 else Launch(2, 2048, 128, 3, 8)
    elif pairs <= 2 * gpu.num_sms:
        launch = Launch(2, 2048, 64, 4, 4)
    else:
        launch = Launch(2 if pairs <= 4 * gpu.num_sms else 1, 2048, 64, 3, 4)
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
    return num_rows * num_kv_heads <= 4 * gpu(device).num_sms


@functools.cache
def _arrived(device: torch.device, size: int) -> Tensor:
    """Zeros, which every launch leaves as zeros. One for all launches: they follow one another in one stream."""
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
    partial = torch.empty(num_rows * num_heads * num_splits * head_dim, dtype=torch.float32, device=device)
    lse = torch.empty(num_rows * num_heads * num_splits, dtype=torch.float32, device=device)
    _decode_attention_kernel[(num_kv_heads, num_rows, num_splits)](
        out_BNH,
        partial,
        lse,
        _arrived(device, power_of_2(max(num_rows * num_kv_heads, 4096))),
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

    What is left in the caches, and the result, are those of the two to within rounding.
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
