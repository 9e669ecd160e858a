"""Attention of one new token a row over its paged KV cache, the cache split over programs (Dao et al., 2023)."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import functools
import math

import torch
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


def decode_attention_reference(
    q_BNH: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables_BM: Tensor, context_lens_B: Tensor
) -> Tensor:
    """The definition: all rows at once, padded to the longest context. A row of context 0 gives zeros."""
    block_size, num_kv_heads = k_cache.shape[1:3]
    blocks_BM = block_tables_BM[:, : -(-int(context_lens_B.max()) // block_size)]
    k_BCKH, v_BCKH = k_cache[blocks_BM].flatten(1, 2), v_cache[blocks_BM].flatten(1, 2)
    q_BKGH = q_BNH.unflatten(1, (num_kv_heads, -1))
    scores_BKGC = torch.matmul(q_BKGH, k_BCKH.permute(0, 2, 3, 1)).float() * q_BNH.shape[-1] ** -0.5
    beyond_BC = torch.arange(k_BCKH.shape[1], device=q_BNH.device) >= context_lens_B[:, None]
    weights_BKGC = scores_BKGC.masked_fill(beyond_BC[:, None, None], float("-inf")).softmax(-1).to(q_BNH.dtype)
    out_BNH = torch.matmul(weights_BKGC, v_BCKH.transpose(1, 2)).flatten(1, 2)
    return out_BNH.masked_fill((context_lens_B == 0)[:, None, None], 0)


@triton.jit
def _combine(
    out_GH,
    partial_SGH,
    lse_SG,
    num_splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
):
    """The whole softmax from that of each range: weights in proportion to exp of the range's log-sum-exp."""
    head_G, dim_H, split_S = tl.arange(0, GROUP_TILE), tl.arange(0, HEAD_TILE), tl.arange(0, NUM_SPLITS)
    inside_G = head_G < GROUP
    inside_GH = inside_G[:, None] & (dim_H < HEAD_DIM)[None, :]
    offset_GH = head_G[:, None] * HEAD_DIM + dim_H[None, :]
    # Other multiprocessors wrote these: read them from the L2 cache.
    all_lse = tl.load(
        lse_SG + split_S[:, None] * GROUP + head_G[None, :],
        mask=(split_S < num_splits)[:, None] & inside_G[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    top_G = tl.where(inside_G, tl.max(all_lse, 0), 0.0)
    total_G = tl.where(inside_G, tl.sum(tl.exp2(all_lse - top_G[None, :]), 0), 1.0)
    acc_GH = tl.zeros([GROUP_TILE, HEAD_TILE], tl.float32)
    for first in range(0, num_splits, 4):  # four at a time, so that their loads are under way together
        for i in tl.static_range(4):
            s = first + i
            there = s < num_splits
            lse_G = tl.load(
                lse_SG + s * GROUP + head_G, mask=there & inside_G, other=float("-inf"), cache_modifier=".cg"
            )
            part = partial_SGH + s * GROUP * HEAD_DIM + offset_GH
            part_GH = tl.load(part, mask=there & inside_GH, other=0.0, cache_modifier=".cg")
            acc_GH += tl.exp2(lse_G - top_G)[:, None] * part_GH
    tl.store(out_GH + offset_GH, (acc_GH / total_G[:, None]).to(out_GH.dtype.element_ty), mask=inside_GH)


@triton.jit
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
    q_stride,
    table_stride,
    table_len,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    WARPS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program takes one KV head of one row, with all query heads that share it, and every num_splits-th tile of its
    # tokens. Each warp has its own part of a tile and its own softmax, so that warps meet only at the end: dimensions
    # are [W warps, G query heads, C tokens, H]. The grid depends on the bucket alone; programs without a tile leave.
    kv_head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    warp_W11 = tl.arange(0, WARPS)[:, None, None]
    head_1G1 = tl.arange(0, GROUP_PAD)[None, :, None]
    dim_11H = tl.arange(0, HEAD_TILE)[None, None, :]
    token_WC1 = warp_W11 * (TILE // WARPS) + tl.arange(0, TILE // WARPS)[None, :, None]
    inside_1GH = (head_1G1 < GROUP) & (dim_11H < HEAD_DIM)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # These loads don't wait for one another: the first tile is the same whatever the context.
    context = tl.load(context_lens_B + row)
    table = block_tables_BM + row * table_stride
    block_WC1 = _blocks(table, split * TILE, token_WC1, table_len * BLOCK_SIZE, BLOCK_SIZE, TILE)
    q = q_BNH + row * q_stride + (kv_head * GROUP + head_1G1) * HEAD_DIM + dim_11H
    q_WGH = tl.load(q + warp_W11 * 0, mask=inside_1GH & (warp_W11 >= 0), other=0.0)

    num_splits = tl.minimum(NUM_SPLITS, tl.cdiv(context, MIN_SPLIT))
    if context == 0:
        num_splits = 1  # which stores zeros
    if split >= num_splits:
        return
    top_WG = tl.full([WARPS, GROUP_PAD], float("-inf"), tl.float32)  # of scores, in units of log2
    total_WG = tl.zeros([WARPS, GROUP_PAD], tl.float32)
    acc_WGH = tl.zeros([WARPS, GROUP_PAD, HEAD_TILE], tl.float32)
    for first in tl.range(split * TILE, context, num_splits * TILE, num_stages=STAGES):
        slot_WC1 = block_WC1.to(tl.int64) * BLOCK_SIZE + (first + token_WC1) % BLOCK_SIZE
        # The next tile's blocks are looked up a tile ahead: the loads of K and V depend on them.
        block_WC1 = _blocks(table, first + num_splits * TILE, token_WC1, context, BLOCK_SIZE, TILE)
        inside_WC1 = first + token_WC1 < context
        offset_WCH = (slot_WC1 * NUM_KV_HEADS + kv_head) * HEAD_DIM + dim_11H
        inside_WCH = inside_WC1 & (dim_11H < HEAD_DIM)
        k_WCH = tl.load(k_cache + offset_WCH, mask=inside_WCH, other=0.0)
        v_WCH = tl.load(v_cache + offset_WCH, mask=inside_WCH, other=0.0)
        score_WGC = tl.dot(q_WGH, tl.permute(k_WCH, (0, 2, 1)), input_precision="tf32x3")
        score_WGC = tl.where(tl.permute(inside_WC1, (0, 2, 1)), score_WGC, float("-inf"))
        new_top_WG = tl.maximum(top_WG, tl.max(score_WGC, 2) * scale_log2)
        # A warp that has seen no token yet has nothing to weigh; -inf - -inf must not make NaN of it.
        base_WG = tl.where(new_top_WG == float("-inf"), 0.0, new_top_WG)
        weight_WGC = tl.exp2(score_WGC * scale_log2 - base_WG[:, :, None])
        shrink_WG = tl.exp2(top_WG - base_WG)
        total_WG = total_WG * shrink_WG + tl.sum(weight_WGC, 2)
        acc_WGH = acc_WGH * shrink_WG[:, :, None]
        acc_WGH = tl.dot(weight_WGC.to(v_WCH.dtype), v_WCH, acc_WGH, input_precision="tf32x3")
        top_WG = new_top_WG

    top_G = tl.max(top_WG, 0)
    share_WG = tl.exp2(top_WG - tl.where(top_G == float("-inf"), 0.0, top_G)[None, :])
    total_G = tl.sum(total_WG * share_WG, 0)
    acc_GH = tl.sum(acc_WGH * share_WG[:, :, None], 0) / tl.where(total_G == 0, 1.0, total_G)[:, None]
    head_G, dim_H = tl.arange(0, GROUP_PAD), tl.arange(0, HEAD_TILE)
    inside_GH = (head_G < GROUP)[:, None] & (dim_H < HEAD_DIM)[None, :]
    offset_GH = head_G[:, None] * HEAD_DIM + dim_H[None, :]
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
            _combine(out_GH, partial_SGH, lse_SG, num_splits, GROUP, HEAD_DIM, NUM_SPLITS, GROUP_TILE, HEAD_TILE)


@triton.jit
def _blocks(table, first, token_WC1, stop, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The blocks of tokens first + token_WC1 of a row: one for all of them where a tile fits in a block."""
    token = first if BLOCK_SIZE % TILE == 0 else first + token_WC1
    return tl.load(table + token // BLOCK_SIZE, mask=token < stop, other=0)


def splits_for(num_rows: int, num_kv_heads: int, gpu: Gpu) -> tuple[int, int]:
    """(programs a long row is split over, a power of two; tokens that are worth a program of their own).

    Enough to fill the GPU if all rows are long. From the bucket's rows alone, never from contexts, so that a row's
    result doesn't depend on its neighbours' lengths.
    """
    pairs = max(num_rows * num_kv_heads, 1)
    wanted = min(max(4 * gpu.num_sms // pairs, 1), 16)
    return power_of_2(wanted + 1) // 2, 128 if wanted == 16 else 256 if wanted > 2 else 1024


def warps_for(head_dim: int, dtype: torch.dtype, gpu: Gpu, stages: int) -> int:
    """Warps a program, each with 16 tokens of a tile: 4 unless the shared memory is too small for their K and V."""
    warp_bytes = 16 * power_of_2(head_dim) * 2 * dtype.itemsize
    warps = 4
    while warps > 1 and stages * warps * warp_bytes > gpu.shared_bytes:
        warps //= 2
    return warps


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
    *,
    num_splits: int | None = None,
    min_split: int | None = None,
    tile: int | None = None,
    stages: int = 3,
    num_warps: int | None = None,
) -> None:
    num_rows, num_heads, head_dim = q_BNH.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    device = q_BNH.device
    if num_splits is None or min_split is None:
        num_splits, min_split = splits_for(num_rows, num_kv_heads, gpu(device))
    if num_warps is None:
        num_warps = warps_for(head_dim, k_cache.dtype, gpu(device), stages)
    if not num_rows:
        return
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
        q_BNH.stride(0),
        block_tables_BM.stride(0),
        block_tables_BM.shape[1],
        head_dim**-0.5 * math.log2(math.e),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        NUM_SPLITS=num_splits,
        MIN_SPLIT=min_split,
        GROUP_PAD=max(power_of_2(group), 16),  # what tl.dot takes
        GROUP_TILE=power_of_2(group),
        HEAD_TILE=max(power_of_2(head_dim), 16),
        WARPS=num_warps,
        TILE=tile or 16 * num_warps,
        STAGES=stages,
        num_warps=num_warps,
        **overlap(device),
    )


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
    of two; H up to 256. block_tables_BM, context_lens_B: int32. A row of context 0 (padding of a CUDA graph) gives
    zeros and reads nothing.
    Softmax scale: H ** -0.5. Launches depend on the number of rows only, so a captured one serves all contexts.
    Floor on a GPU: one read of every row's K and V.
    """
    out_BNH = torch.empty_like(q_BNH, memory_format=torch.contiguous_format) if out is None else out
    if runs_triton(q_BNH):
        _decode_attention_triton(out_BNH, q_BNH, k_cache, v_cache, block_tables_BM, context_lens_B)
    else:
        out_BNH.copy_(decode_attention_reference(q_BNH, k_cache, v_cache, block_tables_BM, context_lens_B))
    return out_BNH
