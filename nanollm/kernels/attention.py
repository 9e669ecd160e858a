"""Causal attention over a paged KV cache (Vaswani et al., 2017; paging: Kwon et al., 2023)."""

import torch
from torch import Tensor

from nanollm.kernels.decode_attention import decode_attention, decode_attention_reference
from nanollm.kernels.prefill_attention import prefill_attention, prefill_attention_reference


def paged_attention_reference(
    q_TNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_BM: Tensor,
    query_starts_B1: Tensor,
    context_lens_B: Tensor,
    num_decodes: int,
) -> Tensor:
    """The definition, on any device; arguments as in paged_attention."""
    n = num_decodes
    if n == len(context_lens_B):
        return decode_attention_reference(q_TNH, k_cache, v_cache, block_tables_BM, context_lens_B)
    starts_B1, tables_BM = query_starts_B1[n:] - n, block_tables_BM[n:]
    rest = prefill_attention_reference(q_TNH[n:], k_cache, v_cache, tables_BM, starts_B1, context_lens_B[n:])
    if not n:
        return rest
    first = decode_attention_reference(q_TNH[:n], k_cache, v_cache, block_tables_BM[:n], context_lens_B[:n])
    return torch.cat((first, rest))


def paged_attention(
    q_TNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_BM: Tensor,
    query_starts_B1: Tensor,
    context_lens_B: Tensor,
    num_decodes: int,
) -> Tensor:
    """Each row's queries are the last of its context_lens_B tokens and see those before them; returns [T, N, H].

    q_TNH: flat queries, row b's from query_starts_B1[b] to query_starts_B1[b + 1]. k_cache, v_cache: [blocks,
    block_size, K, H], the step's own tokens already written. block_tables_BM: block of each block_size tokens of a row.
    num_decodes: the first rows, of one query each: they go together, through the kernel that is made for them.
    Lengths and tables are int32. Softmax scale: H ** -0.5.
    """
    if num_decodes == len(context_lens_B):
        return decode_attention(q_TNH, k_cache, v_cache, block_tables_BM, context_lens_B)
    out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    first, rest = slice(num_decodes), slice(num_decodes, None)
    if num_decodes:
        decode_attention(
            q_TNH[first], k_cache, v_cache, block_tables_BM[first], context_lens_B[first], out=out_TNH[first]
        )
    if num_decodes < len(context_lens_B):
        starts_B1 = query_starts_B1[rest] - num_decodes if num_decodes else query_starts_B1
        prefill_attention(
            q_TNH[rest], k_cache, v_cache, block_tables_BM[rest], starts_B1, context_lens_B[rest], out=out_TNH[rest]
        )
    return out_TNH
