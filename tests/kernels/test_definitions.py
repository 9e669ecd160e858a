"""The plain definitions against oracles that share nothing with them."""

import itertools

import pytest
import torch

from nanollm.kernels.all_reduce import all_reduce_reference, best_of_ranks_reference
from nanollm.kernels.attention import paged_attention
from nanollm.kernels.embedding import embedding
from nanollm.kernels.qkv_to_cache import qkv_to_cache
from tests.kernels import peers
from tests.kernels.checks import assert_close, attention_oracle, paged_cache


@pytest.mark.parametrize(
    "rows", [[(1, 1)], [(1, 40), (1, 16)], [(17, 17)], [(1, 33), (1, 1), (5, 21), (16, 16)]], ids=str
)
def test_paged_attention(rows: list[tuple[int, int]]) -> None:
    """Rows of (query length, context length), decodes first."""
    torch.manual_seed(0)
    queries, contexts = ([row[i] for row in rows] for i in (0, 1))
    k_cache, v_cache, tables_BM = paged_cache(contexts, 16, 2, 32, "cpu", torch.float32)
    k_cache, v_cache = k_cache.nan_to_num(0.0), v_cache.nan_to_num(0.0)  # the definition reads whole blocks
    q_TNH = torch.randn(sum(queries), 6, 32)
    starts_B1 = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
    lens_B = torch.tensor(contexts, dtype=torch.int32)
    num_decodes = next((i for i, query in enumerate(queries) if query > 1), len(queries))
    decode_lens_C = lens_B[:num_decodes] if num_decodes else None
    starts = None if num_decodes == len(queries) else starts_B1.clamp(min=num_decodes)
    out_TNH = paged_attention(q_TNH, k_cache, v_cache, tables_BM, lens_B, decode_lens_C, starts)
    for out_QNH, q_QNH, table_M, context in zip(
        out_TNH.split(queries), q_TNH.split(queries), tables_BM, contexts, strict=True
    ):
        assert_close(out_QNH, attention_oracle(q_QNH, k_cache, v_cache, table_M, context), 2e-6)


def test_slot_minus_one_writes_nothing() -> None:
    cache = torch.zeros(2, 2, 4, 1, 8)
    qkv_to_cache(
        torch.ones(3, 24), None, None, 1e-6, torch.ones(4, 8), torch.arange(3), torch.tensor([-1, 5, -1]), *cache
    )
    assert cache.flatten(1, 2)[1].any(dim=(-1, -2)).tolist() == [False] * 5 + [True] + [False] * 2


def test_embedding_of_ids_outside_the_shard_is_zero() -> None:
    weight = torch.arange(1.0, 9).view(4, 2)  # ids 10, 11, 12 and a row of padding
    assert embedding(torch.tensor([9, 10, 12, 13, 0]), weight, 10, 3).tolist() == [
        [0, 0],
        [1, 2],
        [5, 6],
        [0, 0],
        [0, 0],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_reduce_adds_and_norms_what_float64_does(dtype: torch.dtype) -> None:
    for call in peers.edge_calls([64, 33], [dtype], 9):
        if call.kind == "one_shot":  # the others round, or choose, as well
            inputs = peers.Inputs.of(call, 3, "cpu")
            inputs.check(call, list(all_reduce_reference(inputs.x, inputs.residual, inputs.weight, peers.EPS)))


def test_best_of_ranks_is_the_lowest_rank_of_equals() -> None:
    values = torch.tensor([[1.0, 0.0, -5.0], [2.0, -0.0, -4.0], [2.0, 0.0, -4.5]])
    ids = torch.tensor([[10, 11, 12], [20, 21, 22], [30, 31, 32]])
    assert best_of_ranks_reference(values, ids).tolist() == [20, 11, 22]
