"""SiLU(gate) * up: the gate of the feed-forward layer (Shazeer, 2020)."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch.nn.functional as F
from torch import Tensor

from nanollm.kernels.backend import gdc_launch_dependents, gdc_wait, overlap, runs_triton, tl, triton

_TILE = 1024


def silu_mul_reference(gate_up_TF2: Tensor) -> Tensor:
    """The definition."""
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


@triton.jit
def _silu_mul_kernel(out_TF, gate_up_TF2, size, TILE: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column_F = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside_F = column_F < size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up_TF2 + token * 2 * size + column_F, mask=inside_F).to(tl.float32)
    up = tl.load(gate_up_TF2 + token * 2 * size + size + column_F, mask=inside_F).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out_TF + token * size + column_F, y.to(out_TF.dtype.element_ty), mask=inside_F)


def _silu_mul_triton(gate_up_TF2: Tensor) -> Tensor:
    num_tokens, size = gate_up_TF2.shape[0], gate_up_TF2.shape[1] // 2
    out_TF = gate_up_TF2.new_empty(num_tokens, size)
    if out_TF.numel():
        _silu_mul_kernel[(num_tokens, -(-size // _TILE))](
            out_TF, gate_up_TF2.contiguous(), size, TILE=_TILE, num_warps=4, **overlap(out_TF.device)
        )
    return out_TF


def silu_mul(gate_up_TF2: Tensor) -> Tensor:
    """[T, 2F], gate then up, to [T, F]. Floor on a GPU: one read of the input, one write of the output."""
    return _silu_mul_triton(gate_up_TF2) if runs_triton(gate_up_TF2) else silu_mul_reference(gate_up_TF2)
