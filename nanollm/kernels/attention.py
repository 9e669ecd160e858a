"""Causal attention over a paged KV cache (Vaswani et al., 2017; paging: Kwon et al., 2023)."""

import itertools

import torch
from torch import Tensor

from nanollm.kernels.decode_attention import decode_attention
from nanollm.kernels.prefill_attention import prefill_attention


def paged_attention(
    q_TNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_BM: Tensor,
    query_lens: list[int],
    context_lens: list[int],
    query_starts_B1: Tensor | None = None,
    context_lens_B: Tensor | None = None,
) -> Tensor:
    """Row b's queries are the last query_lens[b] of its context_lens[b] tokens; returns [T, N, H].

    q_TNH: flat queries, one row after another. k_cache, v_cache: [blocks, block_size, K, H], the step's own tokens
    already written. block_tables_BM: int32, block of each block_size tokens of a row. Softmax scale: H ** -0.5.
    query_starts_B1 (sums of query_lens from 0), context_lens_B: the same lengths as int32 tensors on q's device; left
    out, they are made here, which on a GPU means copies in every layer.
    """
    if query_starts_B1 is None:
        starts = [0, *itertools.accumulate(query_lens)]
        query_starts_B1 = torch.tensor(starts, dtype=torch.int32).to(q_TNH.device, non_blocking=True)
    if context_lens_B is None:
        context_lens_B = torch.tensor(context_lens, dtype=torch.int32).to(q_TNH.device, non_blocking=True)
    # Decodes come first in a step: one query each, so they go together, through the kernel that is made for them.
    decodes = next((row for row, query_len in enumerate(query_lens) if query_len > 1), len(query_lens))
    out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    if decodes:
        first = slice(decodes)
        decode_attention(
            q_TNH[first], k_cache, v_cache, block_tables_BM[first], context_lens_B[first], out=out_TNH[first]
        )
    if decodes < len(query_lens):
        rest = slice(decodes, None)
        prefill_attention(
            q_TNH[rest],
            k_cache,
            v_cache,
            block_tables_BM[rest],
            query_starts_B1[rest] - decodes if decodes else query_starts_B1,
            context_lens_B[rest],
            out=out_TNH[rest],
        )
    return out_TNH
