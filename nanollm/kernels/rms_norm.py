"""RMSNorm: y = x / rms(x) * weight, alone or after adding to the residual (Zhang & Sennrich, 2019)."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
from torch import Tensor

from nanollm.kernels.backend import gdc_launch_dependents, gdc_wait, overlap, power_of_2, runs_triton, tl, triton


def rms_norm_reference(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The definition. Sums in float32, rounds once at the end."""
    x = x_TD.float()
    scale_T1 = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale_T1 * weight_D).to(x_TD.dtype)


def add_rms_norm_reference(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The definition: (rms_norm(residual + x), residual + x); the norm reads the sum before it is rounded."""
    summed_TD = residual_TD.float() + (x_TD if x_TD.dim() == residual_TD.dim() else x_TD.sum(0, dtype=torch.float32))
    scale_T1 = torch.rsqrt(summed_TD.square().mean(-1, keepdim=True) + eps)
    return (summed_TD * scale_T1 * weight_D).to(residual_TD.dtype), summed_TD.to(residual_TD.dtype)


@triton.jit
def load_parts(x_ZTD, at, inside, part_stride, PARTS: tl.constexpr):
    """The sum of a row's parts, float32, in their order; part_stride elements apart."""
    x = tl.load(x_ZTD + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ZTD + part * tl.cast(part_stride, tl.int64) + at, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _rms_norm_kernel(
    y_TD, sum_TD, x_ZTD, residual_TD, weight_D, size, part_stride, eps,
    PARTS: tl.constexpr, ADD: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program a token: D is at most a few thousand, so a row stays in registers and is read once.
    start = tl.program_id(0).to(tl.int64) * size
    column_D = tl.arange(0, TILE)
    inside_D = column_D < size
    weight = tl.load(weight_D + column_D, mask=inside_D, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = load_parts(x_ZTD, start + column_D, inside_D, part_stride, PARTS)
    if ADD:
        x += tl.load(residual_TD + start + column_D, mask=inside_D, other=0.0).to(tl.float32)
        tl.store(sum_TD + start + column_D, x.to(sum_TD.dtype.element_ty), mask=inside_D)
    scale = tl.rsqrt(tl.sum(x * x) / size + eps)
    tl.store(y_TD + start + column_D, (x * scale * weight).to(y_TD.dtype.element_ty), mask=inside_D)


def _rms_norm_triton(x: Tensor, residual: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    x = x.contiguous()
    like = x if residual is None else residual.contiguous()
    y, summed = torch.empty_like(like), x if residual is None else torch.empty_like(like)
    tile = power_of_2(size)
    if x.numel():
        _rms_norm_kernel[(y.numel() // size,)](
            y,
            summed,
            x,
            like,
            weight_D,
            size,
            y.numel(),
            eps,
            PARTS=x.numel() // y.numel(),
            ADD=residual is not None,
            TILE=tile,
            num_warps=min(max(tile // 512, 1), 8),
            **overlap(x.device),
        )
    return y, summed


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, any leading shape. Floor on a GPU: one read and one write of x."""
    if runs_triton(x_TD):
        return _rms_norm_triton(x_TD, None, weight_D, eps)[0]
    return rms_norm_reference(x_TD, weight_D, eps)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(residual + x), residual + x), both new. Floor on a GPU: two reads and two writes of [T, D].

    x may also be parts [Z, T, D], which are added up first, in float32.
    """
    if runs_triton(x_TD):
        return _rms_norm_triton(x_TD, residual_TD, weight_D, eps)
    return add_rms_norm_reference(x_TD, residual_TD, weight_D, eps)
