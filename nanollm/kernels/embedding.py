"""Embedding from a shard of the vocabulary: ids outside this rank's rows give zeros, to be summed over ranks."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import torch.nn.functional as F
from torch import Tensor

from nanollm.kernels.backend import gdc_launch_dependents, gdc_wait, overlap, runs_triton, tl, triton

_TILE = 1024


def embedding_reference(token_ids_T: Tensor, weight_VD: Tensor, first_id: int, num_ids: int) -> Tensor:
    """The definition."""
    local_T = token_ids_T - first_id
    mine_T = (local_T >= 0) & (local_T < num_ids)
    return F.embedding(torch.where(mine_T, local_T, 0), weight_VD).masked_fill(~mine_T[:, None], 0)


@triton.jit(do_not_specialize_on_alignment=["token_ids_T"])
def _embedding_kernel(out_TD, token_ids_T, weight_VD, first_id, num_ids, size, TILE: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column_D = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside_D = column_D < size
    if PDL:  # in this order: what comes before the embedding is complete when any kernel after it starts
        gdc_wait()
        gdc_launch_dependents()
    local = tl.load(token_ids_T + token).to(tl.int64) - first_id
    mine = (local >= 0) & (local < num_ids)
    x = tl.load(weight_VD + local * size + column_D, mask=inside_D & mine, other=0.0)
    tl.store(out_TD + token * size + column_D, x, mask=inside_D)


def _embedding_triton(token_ids_T: Tensor, weight_VD: Tensor, first_id: int, num_ids: int) -> Tensor:
    num_tokens, size = len(token_ids_T), weight_VD.shape[1]
    out_TD = weight_VD.new_empty(num_tokens, size)
    if num_tokens:
        _embedding_kernel[(num_tokens, -(-size // _TILE))](
            out_TD, token_ids_T, weight_VD, first_id, num_ids, size, TILE=_TILE, num_warps=4, **overlap(out_TD.device)
        )
    return out_TD


def embedding(token_ids_T: Tensor, weight_VD: Tensor, first_id: int, num_ids: int) -> Tensor:
    """Row id - first_id of weight_VD for each id, zeros if that is not one of its first num_ids rows; [T, D]."""
    if runs_triton(weight_VD):
        return _embedding_triton(token_ids_T, weight_VD, first_id, num_ids)
    return embedding_reference(token_ids_T, weight_VD, first_id, num_ids)
