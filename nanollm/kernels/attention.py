"""Causal attention over a paged KV cache (Vaswani et al., 2017; paging: Kwon et al., 2023)."""

from collections.abc import Callable

from torch import Tensor

from nanollm.kernels.decode_attention import decode_attention
from nanollm.kernels.prefill_attention import prefill_attention


def paged_attention(
    q_TNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_BM: Tensor,
    context_lens_B: Tensor,
    decode_lens_C: Tensor | None,
    query_starts_B1: Tensor | None,
    decode: Callable[..., Tensor] = decode_attention,
    prefill: Callable[..., Tensor] = prefill_attention,
) -> Tensor:
    """Each row's queries are the last of its context_lens_B tokens and see those before them; returns [T, N, H].

    k_cache, v_cache: [blocks, block_size, K, H], the step's own tokens already written. block_tables_BM: block of each
    block_size tokens of a row. Lengths and tables are int32. Softmax scale: H ** -0.5.
    decode_lens_C: context lengths of the first C rows, 0 for those that don't decode; who does has one query, and these
    are the first in q_TNH. None if no row decodes.
    query_starts_B1: where each other row's queries start in q_TNH, and the end; rows that decode have none there. None
    if all decode. What tokens of no row get is undefined.
    decode, prefill: what computes the rows of one query, and the others; arguments as in decode_attention and
    prefill_attention.
    """
    if decode_lens_C is None:
        return prefill(q_TNH, k_cache, v_cache, block_tables_BM, query_starts_B1, context_lens_B)
    if query_starts_B1 is None:
        return decode(q_TNH, k_cache, v_cache, block_tables_BM, decode_lens_C)
    out_TNH = prefill(q_TNH, k_cache, v_cache, block_tables_BM, query_starts_B1, context_lens_B)
    first = slice(len(decode_lens_C))
    decode(q_TNH[first], k_cache, v_cache, block_tables_BM[first], decode_lens_C, out=out_TNH[first])
    return out_TNH
