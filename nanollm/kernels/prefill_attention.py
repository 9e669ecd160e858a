"""Causal attention of any number of new tokens a row over its paged KV cache (FlashAttention: Dao et al., 2022)."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import math

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
from nanollm.kernels.decode_attention import load_blocks

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4
    TensorDescriptor = None


def prefill_attention_reference(
    q_TNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_BM: Tensor,
    query_starts_B1: Tensor,
    context_lens_B: Tensor,
) -> Tensor:
    """The definition, row by row; tokens of no row get zeros."""
    out_TNH = torch.zeros_like(q_TNH)
    starts = query_starts_B1.tolist()
    for row, context in enumerate(context_lens_B.tolist()):
        start, stop = starts[row : row + 2]
        if start == stop:
            continue
        query_len = stop - start
        blocks_M = block_tables_BM[row, : -(-context // k_cache.shape[1])]
        k_KCH, v_KCH = (cache[blocks_M].flatten(0, 1)[:context].transpose(0, 1) for cache in (k_cache, v_cache))
        q_NTH = q_TNH[start:stop].transpose(0, 1)
        causal = query_len == context
        mask_TC = None
        if not causal and query_len > 1:
            mask_TC = torch.ones(query_len, context, dtype=torch.bool, device=q_TNH.device).tril(context - query_len)
        out_NTH = F.scaled_dot_product_attention(
            q_NTH[None], k_KCH[None], v_KCH[None], attn_mask=mask_TC, is_causal=causal, enable_gqa=True
        )
        out_TNH[start:stop] = out_NTH[0].transpose(0, 1)
    return out_TNH


@triton.jit
def _attend_tile(
    q_MH, top_M, total_M, acc_MH, k_cache, v_cache, block_C, first, stop, position_M, kv_head, scale_log2,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_C: tl.constexpr, BY_COPY_ENGINE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: tokens first … first + TILE_C of a row, which are in the blocks block_C.

    MASKED: some are beyond `stop` or after some query's position.
    """
    token_C = tl.arange(0, TILE_C)
    dim_H = tl.arange(0, HEAD_TILE)
    if BY_COPY_ENGINE:  # whole tiles: v_cache must be finite beyond `stop` too, for a weight of 0 to take it away
        slot = block_C * BLOCK_SIZE + first % BLOCK_SIZE
        k_CH = k_cache.load([slot, kv_head * HEAD_DIM])
        v_CH = v_cache.load([slot, kv_head * HEAD_DIM])
    else:
        slot_C = block_C.to(tl.int64) * BLOCK_SIZE + (first + token_C) % BLOCK_SIZE
        offset_CH = (slot_C * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim_H[None, :]
        if MASKED:
            inside_CH = (first + token_C < stop)[:, None] & (dim_H < HEAD_DIM)[None, :]
            k_CH = tl.load(k_cache + offset_CH, mask=inside_CH, other=0.0)
            v_CH = tl.load(v_cache + offset_CH, mask=inside_CH, other=0.0)
        elif HEAD_TILE == HEAD_DIM:
            k_CH = tl.load(k_cache + offset_CH)
            v_CH = tl.load(v_cache + offset_CH)
        else:
            k_CH = tl.load(k_cache + offset_CH, mask=(dim_H < HEAD_DIM)[None, :], other=0.0)
            v_CH = tl.load(v_cache + offset_CH, mask=(dim_H < HEAD_DIM)[None, :], other=0.0)
    score_MC = tl.dot(q_MH, tl.trans(k_CH), input_precision="tf32x3")
    if MASKED:
        visible_MC = (first + token_C)[None, :] <= position_M[:, None]
        score_MC = tl.where(visible_MC, score_MC, float("-inf"))
    new_top_M = tl.maximum(top_M, tl.max(score_MC, 1) * scale_log2)
    weight_MC = tl.exp2(score_MC * scale_log2 - new_top_M[:, None])
    shrink_M = tl.exp2(top_M - new_top_M)
    total_M = total_M * shrink_M + tl.sum(weight_MC, 1)
    acc_MH = acc_MH * shrink_M[:, None]
    acc_MH = tl.dot(weight_MC.to(v_CH.dtype), v_CH, acc_MH, input_precision="tf32x3")
    return new_top_M, total_M, acc_MH


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["block_tables_BM", "query_starts_B1", "context_lens_B"],
)
def _prefill_attention_kernel(
    out_TNH, q_TNH, k_cache, v_cache, block_tables_BM, query_starts_B1, context_lens_B, num_rows, q_stride,
    table_stride, scale_log2,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_M: tl.constexpr, TILE_C: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    BY_COPY_ENGINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program takes one KV head and TOKENS new tokens of one row, times the query heads that share it: TILE_M
    # queries, one after another in m. Programs that see the most tokens go first, so that short ones fill the gaps.
    TOKENS: tl.constexpr = TILE_M // GROUP
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # Row b's tiles begin at query_starts[b] // TOKENS + b: there is always room, and no list has to be made.
    row = -1
    for first in range(0, num_rows, ROWS):
        row_B = first + tl.arange(0, ROWS)
        start_B = tl.load(query_starts_B1 + row_B, mask=row_B < num_rows, other=0)
        row += tl.sum(((start_B // TOKENS + row_B <= tile) & (row_B < num_rows)).to(tl.int32))
    if row < 0:  # before the first row's queries come those of rows that decode
        return
    start = tl.load(query_starts_B1 + row)
    query_len = tl.load(query_starts_B1 + row + 1) - start
    first_query = (tile - (start // TOKENS + row)) * TOKENS
    if first_query >= query_len:
        return
    context = tl.load(context_lens_B + row)
    past = context - query_len

    m = tl.arange(0, TILE_M)
    dim_H = tl.arange(0, HEAD_TILE)
    token_M, head_M = first_query + m // GROUP, kv_head * GROUP + m % GROUP
    position_M = past + token_M
    inside_MH = ((m < TOKENS * GROUP) & (token_M < query_len))[:, None] & (dim_H < HEAD_DIM)[None, :]
    query_M = (start + token_M).to(tl.int64)
    q = q_TNH + (query_M * q_stride + head_M * HEAD_DIM)[:, None] + dim_H[None, :]
    q_MH = tl.load(q, mask=inside_MH, other=0.0)

    table = block_tables_BM + tl.cast(row, tl.int64) * table_stride
    top_M = tl.full([TILE_M], float("-inf"), tl.float32)  # of scores, in units of log2
    total_M = tl.zeros([TILE_M], tl.float32)
    acc_MH = tl.zeros([TILE_M, HEAD_TILE], tl.float32)
    # Tokens up to the first query's are visible to every query; only the tiles after them need a mask.
    unmasked = (past + first_query + 1) // TILE_C * TILE_C
    stop = past + tl.minimum(first_query + TOKENS, query_len)
    # The next tile's blocks are looked up a tile ahead: the loads of K and V depend on them.
    block_C = load_blocks(table, 0, stop, BLOCK_SIZE, TILE_C, "")
    for first in tl.range(0, unmasked, TILE_C, num_stages=STAGES):
        now_C, block_C = block_C, load_blocks(table, first + TILE_C, stop, BLOCK_SIZE, TILE_C, "")
        top_M, total_M, acc_MH = _attend_tile(
            q_MH, top_M, total_M, acc_MH, k_cache, v_cache, now_C, first, stop, position_M, kv_head, scale_log2,
            NUM_KV_HEADS, HEAD_DIM, HEAD_TILE, BLOCK_SIZE, TILE_C, BY_COPY_ENGINE, MASKED=False,
        )  # fmt: skip
    for first in tl.range(unmasked, stop, TILE_C, num_stages=STAGES):
        now_C, block_C = block_C, load_blocks(table, first + TILE_C, stop, BLOCK_SIZE, TILE_C, "")
        top_M, total_M, acc_MH = _attend_tile(
            q_MH, top_M, total_M, acc_MH, k_cache, v_cache, now_C, first, stop, position_M, kv_head, scale_log2,
            NUM_KV_HEADS, HEAD_DIM, HEAD_TILE, BLOCK_SIZE, TILE_C, BY_COPY_ENGINE, MASKED=True,
        )  # fmt: skip
    acc_MH /= total_M[:, None]
    out = out_TNH + (query_M * NUM_KV_HEADS * GROUP + head_M)[:, None] * HEAD_DIM + dim_H[None, :]
    tl.store(out, acc_MH.to(out_TNH.dtype.element_ty), mask=inside_MH)


def copies_tiles(head_dim: int, block_size: int, dtype: torch.dtype, gpu: Gpu) -> bool:
    """Whether Hopper's bulk copy engine brings the tiles of K and V: it copies boxes, so a block must hold a tile."""
    boxes = head_dim in (64, 128, 256) and block_size >= 64 and dtype.itemsize == 2
    return boxes and gpu.capability[0] == 9 and TensorDescriptor is not None


def tiles_for(
    head_dim: int, block_size: int, tokens_per_row: int, dtype: torch.dtype, gpu: Gpu
) -> tuple[int, int, int, int]:
    """(queries, tokens, warps, stages) of a program, measured on Hopper, as large as the shared memory lets them be."""
    row_bytes = power_of_2(head_dim) * dtype.itemsize
    choices = [(128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)]
    if copies_tiles(head_dim, block_size, dtype, gpu):
        long = block_size >= 128 and tokens_per_row >= 2048
        choices = [(128, 128, 8, 3), (128, 64, 8, 2)] if long else [(64, 64, 4, 3), (64, 64, 4, 2)]
    elif gpu.capability[0] == 9:
        choices = [(128, 128, 8, 2), *choices]
        if dtype == torch.float32:
            row_bytes *= 2  # three TF32 products stand for one: Hopper keeps each number as two
    for queries, tokens, warps, stages in choices:
        if (queries + 2 * stages * tokens) * row_bytes <= gpu.shared_bytes - 2 * 1024:
            return queries, tokens, warps, stages
    return 16, 16, 2, 2


def _prefill_attention_triton(
    out_TNH: Tensor,
    q_TNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_BM: Tensor,
    query_starts_B1: Tensor,
    context_lens_B: Tensor,
    *,
    tiles: tuple[int, int, int, int] | None = None,
    by_copy_engine: bool | None = None,
) -> None:
    num_tokens, num_heads, head_dim = q_TNH.shape
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    num_rows, group = len(context_lens_B), num_heads // num_kv_heads
    if not num_tokens or not num_rows:
        return
    found = gpu(q_TNH.device)
    if tiles is None:
        tiles = tiles_for(head_dim, block_size, num_tokens // num_rows, k_cache.dtype, found)
    queries, tokens, num_warps, stages = tiles
    if by_copy_engine is None:
        by_copy_engine = copies_tiles(head_dim, block_size, k_cache.dtype, found) and tokens <= block_size
    queries = max(queries, power_of_2(group))
    k, v = k_cache, v_cache
    if by_copy_engine:
        flat = (num_blocks * block_size, num_kv_heads * head_dim)
        k, v = (TensorDescriptor.from_tensor(cache.view(flat), [tokens, head_dim]) for cache in (k_cache, v_cache))
    _prefill_attention_kernel[(num_tokens // (queries // group) + num_rows, num_kv_heads)](
        out_TNH,
        q_TNH,
        k,
        v,
        block_tables_BM,
        query_starts_B1,
        context_lens_B,
        num_rows,
        q_TNH.stride(0),
        block_tables_BM.stride(0),
        head_dim**-0.5 * math.log2(math.e),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_TILE=max(power_of_2(head_dim), 16),
        BLOCK_SIZE=block_size,
        TILE_M=queries,
        TILE_C=tokens,
        ROWS=128,
        STAGES=stages,
        BY_COPY_ENGINE=by_copy_engine,
        num_warps=num_warps,
        **overlap(q_TNH.device),
    )


def prefill_attention(
    q_TNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_BM: Tensor,
    query_starts_B1: Tensor,
    context_lens_B: Tensor,
) -> Tensor:
    """Row b's queries, query_starts_B1[b] to query_starts_B1[b + 1], are the last of its context_lens_B[b] tokens.

    Each sees its own token and those before it. Returns [T, N, H].

    k_cache, v_cache: contiguous [blocks, block_size, K, H]; block_size a power of two; H up to 256. block_tables_BM,
    query_starts_B1, context_lens_B: int32. Rows may have no queries; what tokens of no row get is undefined. Softmax
    scale: H ** -0.5. Launches depend on the numbers of tokens and rows only.
    Floor on a GPU: 4 * H operations for each query head and visible token.
    """
    if not runs_triton(q_TNH):
        return prefill_attention_reference(q_TNH, k_cache, v_cache, block_tables_BM, query_starts_B1, context_lens_B)
    out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    _prefill_attention_triton(out_TNH, q_TNH, k_cache, v_cache, block_tables_BM, query_starts_B1, context_lens_B)
    return out_TNH
