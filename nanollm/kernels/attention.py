"""Causal attention over a paged KV cache (Vaswani et al., 2017; paging: Kwon et al., 2023)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def paged_attention(
    q_TNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_BM: Tensor,
    query_lens: list[int],
    context_lens: list[int],
) -> Tensor:
    """The definition. Row b's queries are the last query_lens[b] of its context_lens[b] tokens; returns [T, N, H].

    q_TNH: flat queries, one row after another. k_cache, v_cache: [blocks, block_size, K, H], the step's own tokens
    already written. block_tables_BM: int, block of each block_size tokens of a row. Softmax scale: H ** -0.5.
    """
    out_TNH = torch.empty_like(q_TNH)
    # Decodes come first in a step: one query each, so they go together.
    start = next((row for row, query_len in enumerate(query_lens) if query_len > 1), len(query_lens))
    if start:
        out_TNH[:start] = _decode(q_TNH[:start], k_cache, v_cache, block_tables_BM[:start], context_lens[:start])
    for row in range(start, len(query_lens)):
        query_len, context_len = query_lens[row], context_lens[row]
        blocks_M = block_tables_BM[row, : -(-context_len // k_cache.shape[1])]
        k_KCH, v_KCH = (cache[blocks_M].flatten(0, 1)[:context_len].transpose(0, 1) for cache in (k_cache, v_cache))
        q_NTH = q_TNH[start : start + query_len].transpose(0, 1)
        causal = query_len == context_len
        mask_TC = None
        if not causal and query_len > 1:
            mask_TC = torch.ones(query_len, context_len, dtype=torch.bool, device=q_TNH.device).tril(
                context_len - query_len
            )
        out_NTH = F.scaled_dot_product_attention(
            q_NTH[None], k_KCH[None], v_KCH[None], attn_mask=mask_TC, is_causal=causal, enable_gqa=True
        )
        out_TNH[start : start + query_len] = out_NTH[0].transpose(0, 1)
        start += query_len
    return out_TNH


def _decode(
    q_BNH: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables_BM: Tensor, context_lens: list[int]
) -> Tensor:
    """One query a row: all rows at once, padded to the longest context."""
    block_size, num_kv_heads = k_cache.shape[1:3]
    blocks_BM = block_tables_BM[:, : -(-max(context_lens) // block_size)]
    k_BCKH, v_BCKH = k_cache[blocks_BM].flatten(1, 2), v_cache[blocks_BM].flatten(1, 2)
    q_BKGH = q_BNH.unflatten(1, (num_kv_heads, -1))
    scores_BKGC = torch.matmul(q_BKGH, k_BCKH.permute(0, 2, 3, 1)).float() * q_BNH.shape[-1] ** -0.5
    lens_B = torch.tensor(context_lens, device=q_BNH.device)
    beyond_BC = torch.arange(k_BCKH.shape[1], device=q_BNH.device) >= lens_B[:, None]
    weights_BKGC = scores_BKGC.masked_fill(beyond_BC[:, None, None], float("-inf")).softmax(-1).to(q_BNH.dtype)
    return torch.matmul(weights_BKGC, v_BCKH.transpose(1, 2)).flatten(1, 2)
