"""Linear layers of very few rows, where reading the weights is all the work: norm, gate and residual come for free."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanollm.kernels.backend import (
    gdc_launch_dependents,
    gdc_wait,
    gpu,
    measured_cuts,
    overlap,
    power_of_2,
    prefetch,
    runs_triton,
    tl,
    triton,
)
from nanollm.kernels.rms_norm import rms_norm_reference
from nanollm.kernels.silu_mul import silu_mul_reference

MAX_ROWS = 16


def suits_skinny_matmul(num_rows: int, weight_OD: Tensor) -> bool:
    """Whether skinny_matmul beats the library's matmul with separate kernels around it, as measured on an H200.

    One row: always. More: where there are few outputs, which the library has too few programs for.
    """
    if not runs_triton(weight_OD) or len(weight_OD) % 32:
        return False
    return num_rows == 1 or (1 < num_rows <= MAX_ROWS and len(weight_OD) <= 2048)


@dataclass(frozen=True)
class OneRow:
    """How a matmul of one row is cut: a program reads outs rows of the weight, chunk inputs at a time.

    Of a gated weight, half of these rows are gate's and half are up's.
    """

    outs: int
    chunk: int
    num_warps: int

    def suit(self, size_out: int, *, gated: bool) -> bool:
        """Whether a weight of size_out rows can be cut so, and registers hold a chunk: 128 values a thread at most."""
        sizes = (self.outs, self.chunk, self.num_warps)
        return (
            all(size == power_of_2(size) for size in sizes)
            and size_out % self.outs == 0
            and self.outs > gated
            and self.num_warps <= 32
            and self.outs * self.chunk <= 128 * 32 * self.num_warps
        )


@functools.cache
def one_row_cut(size_out: int, size_in: int, gated: bool, device: torch.device) -> OneRow:
    """As bench/tune.py measured it on this GPU, or by the rule."""
    measured = measured_cuts(size_out, size_in, device).get("1")
    if measured is not None and (cut := OneRow(*measured)).suit(size_out, gated=gated):
        return cut
    return default_one_row_cut(size_out, size_in, gated, gpu(device).num_sms)


def default_one_row_cut(size_out: int, size_in: int, gated: bool, num_sms: int) -> OneRow:
    """The rule for shapes that nobody measured, made from some that were on an H200."""
    halves = 2 if gated else 1
    if size_out < halves * 16 * num_sms:
        return OneRow(halves * 4, 2048, 8)
    if gated or size_in <= 1024:
        return OneRow(halves * 8, 512, 2)
    return OneRow(2, 1024, 2)


def skinny_matmul_reference(
    x_MD: Tensor,
    weight_OD: Tensor,
    norm_weight_D: Tensor | None = None,
    eps: float = 0.0,
    residual_MO: Tensor | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """The definition; arguments as in skinny_matmul."""
    if norm_weight_D is not None:
        x_MD = rms_norm_reference(x_MD, norm_weight_D, eps)
    y_MO = F.linear(x_MD, weight_OD)
    if gated:
        y_MO = silu_mul_reference(y_MO)
    return y_MO if residual_MO is None else residual_MO + y_MO


@triton.jit
def _one_row_kernel(
    y_O,
    x_D,
    weight_OD,
    norm_weight_D,
    residual_O,
    size_out,
    eps,
    SIZE_IN: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    OUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program computes OUTS outputs. Its loads of weights are always a chunk ahead, the first ones of all inputs:
    # weights are nobody's output, so they needn't wait for the kernel before this one.
    out_O = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    column_D = tl.arange(0, CHUNK)
    weight = weight_OD + out_O.to(tl.int64)[:, None] * SIZE_IN + column_D[None, :]
    up_weight = weight + size_out.to(tl.int64) * SIZE_IN
    w_OD = tl.load(weight, mask=(column_D < SIZE_IN)[None, :], other=0.0)
    up_OD = w_OD
    if GATED:
        up_OD = tl.load(up_weight, mask=(column_D < SIZE_IN)[None, :], other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc_OD = tl.zeros([OUTS, CHUNK], tl.float32)
    up_acc_OD = tl.zeros([OUTS, CHUNK], tl.float32)
    squares_D = tl.zeros([CHUNK], tl.float32)
    for first in tl.static_range(0, SIZE_IN, CHUNK):
        now_OD, up_now_OD = w_OD, up_OD
        if first + CHUNK < SIZE_IN:
            inside_D = first + CHUNK + column_D < SIZE_IN
            w_OD = tl.load(weight + first + CHUNK, mask=inside_D[None, :], other=0.0)
            if GATED:
                up_OD = tl.load(up_weight + first + CHUNK, mask=inside_D[None, :], other=0.0)
        column = first + column_D
        x = tl.load(x_D + column, mask=column < SIZE_IN, other=0.0).to(tl.float32)
        if NORM:  # rms(x) is known only after the last chunk, but it only scales the result
            squares_D += x * x
            x *= tl.load(norm_weight_D + column, mask=column < SIZE_IN, other=0.0).to(tl.float32)
        acc_OD += now_OD.to(tl.float32) * x[None, :]
        if GATED:
            up_acc_OD += up_now_OD.to(tl.float32) * x[None, :]
    y = tl.sum(acc_OD, 1)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares_D, 0) / SIZE_IN + eps)
        y *= scale
    if GATED:
        y *= tl.sigmoid(y) * tl.sum(up_acc_OD, 1) * scale
    if RESIDUAL:
        y += tl.load(residual_O + out_O).to(tl.float32)
    tl.store(y_O + out_O, y.to(y_O.dtype.element_ty))


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_matmul_kernel(
    y_MO,
    x_MD,
    weight_OD,
    norm_weight_D,
    residual_MO,
    num_rows,
    size_out,
    eps,
    SIZE_IN: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # One program computes OUTS outputs of every row. Each warp reads its own chunks of the input dimension, and warps
    # meet only at the end: dimensions are [W warps, O outputs, M rows, D inputs].
    out_1O1 = tl.program_id(0) * OUTS + tl.arange(0, OUTS)[None, :, None]
    row_1M1 = tl.arange(0, ROWS)[None, :, None]
    column_W1D = tl.arange(0, WARPS)[:, None, None] * CHUNK + tl.arange(0, CHUNK)[None, None, :]
    weight = weight_OD + out_1O1.to(tl.int64) * SIZE_IN
    up_weight = weight + size_out.to(tl.int64) * SIZE_IN
    if PDL:
        # Weights are nobody's output: they start for the L2 cache while the kernel before this one still runs.
        gdc_launch_dependents()
        for first in range(0, SIZE_IN, 64 * WARPS * 4):
            line = first + tl.arange(0, WARPS * 4)[None, None, :] * 64
            prefetch(weight + tl.minimum(line, SIZE_IN - 1))
            if GATED:
                prefetch(up_weight + tl.minimum(line, SIZE_IN - 1))
        gdc_wait()

    acc_WOM = tl.zeros([WARPS, OUTS, ROWS], tl.float32)
    up_acc_WOM = tl.zeros([WARPS, OUTS, ROWS], tl.float32)
    squares_WM = tl.zeros([WARPS, ROWS], tl.float32)
    for first in tl.range(0, SIZE_IN, WARPS * CHUNK, num_stages=STAGES):
        column = first + column_W1D
        if SIZE_IN % (WARPS * CHUNK) == 0:
            w_WOD = tl.load(weight + column)
            x_WMD = tl.load(x_MD + row_1M1 * SIZE_IN + column, mask=row_1M1 < num_rows, other=0.0)
        else:
            w_WOD = tl.load(weight + column, mask=column < SIZE_IN, other=0.0)
            x_WMD = tl.load(
                x_MD + row_1M1 * SIZE_IN + column, mask=(row_1M1 < num_rows) & (column < SIZE_IN), other=0.0
            )
        if NORM:
            # rms(x) is known only after the last chunk, but it only scales the result.
            x = x_WMD.to(tl.float32)
            squares_WM += tl.sum(x * x, 2)
            norm_weight = tl.load(norm_weight_D + column, mask=column < SIZE_IN, other=0.0).to(tl.float32)
            x_WMD = (x * norm_weight).to(x_MD.dtype.element_ty)
        acc_WOM = tl.dot(w_WOD, tl.permute(x_WMD, (0, 2, 1)), acc_WOM, input_precision="tf32x3")
        if GATED:
            if SIZE_IN % (WARPS * CHUNK) == 0:
                up_WOD = tl.load(up_weight + column)
            else:
                up_WOD = tl.load(up_weight + column, mask=column < SIZE_IN, other=0.0)
            up_acc_WOM = tl.dot(up_WOD, tl.permute(x_WMD, (0, 2, 1)), up_acc_WOM, input_precision="tf32x3")

    y_OM, up_OM = tl.sum(acc_WOM, 0), tl.sum(up_acc_WOM, 0)
    if NORM:
        scale_M = tl.rsqrt(tl.sum(squares_WM, 0) / SIZE_IN + eps)
        y_OM, up_OM = y_OM * scale_M[None, :], up_OM * scale_M[None, :]
    if GATED:
        y_OM = y_OM * tl.sigmoid(y_OM) * up_OM
    out_O1 = tl.program_id(0) * OUTS + tl.arange(0, OUTS)[:, None]
    row_1M = tl.arange(0, ROWS)[None, :]
    offset_OM = row_1M * size_out + out_O1
    if RESIDUAL:
        y_OM += tl.load(residual_MO + offset_OM, mask=row_1M < num_rows, other=0.0).to(tl.float32)
    tl.store(y_MO + offset_OM, y_OM.to(y_MO.dtype.element_ty), mask=row_1M < num_rows)


def _one_row_triton(
    x_1D: Tensor,
    weight_OD: Tensor,
    norm_weight_D: Tensor | None = None,
    eps: float = 0.0,
    residual_1O: Tensor | None = None,
    *,
    gated: bool = False,
    cut: OneRow | None = None,
) -> Tensor:
    if cut is None:
        cut = one_row_cut(*weight_OD.shape, gated, x_1D.device)
    halves, size_in = 2 if gated else 1, x_1D.shape[1]
    size_out = len(weight_OD) // halves
    y_1O = x_1D.new_empty(1, size_out)
    _one_row_kernel[(len(weight_OD) // cut.outs,)](
        y_1O,
        x_1D,
        weight_OD,
        x_1D if norm_weight_D is None else norm_weight_D,
        x_1D if residual_1O is None else residual_1O,
        size_out,
        eps,
        SIZE_IN=size_in,
        NORM=norm_weight_D is not None,
        GATED=gated,
        RESIDUAL=residual_1O is not None,
        OUTS=cut.outs // halves,
        CHUNK=cut.chunk,
        num_warps=cut.num_warps,
        **overlap(x_1D.device),
    )
    return y_1O


def _skinny_matmul_triton(
    x_MD: Tensor,
    weight_OD: Tensor,
    norm_weight_D: Tensor | None = None,
    eps: float = 0.0,
    residual_MO: Tensor | None = None,
    *,
    gated: bool = False,
    outs: int = 16,
    chunk: int = 256,
    num_warps: int = 4,
    stages: int = 3,
) -> Tensor:
    num_rows, size_in = x_MD.shape
    size_out = len(weight_OD) // (2 if gated else 1)
    y_MO = x_MD.new_empty(num_rows, size_out)
    found = gpu(x_MD.device)
    rows = 8 if num_rows <= 8 else 16
    stage_bytes = num_warps * chunk * (outs * (2 if gated else 1) + rows) * x_MD.element_size()
    while stages > 2 and (stages - 1) * stage_bytes > found.shared_bytes - 16 * 1024:
        stages -= 1
    _skinny_matmul_kernel[(size_out // outs,)](
        y_MO,
        x_MD,
        weight_OD,
        x_MD if norm_weight_D is None else norm_weight_D,
        x_MD if residual_MO is None else residual_MO,
        num_rows,
        size_out,
        eps,
        SIZE_IN=size_in,
        NORM=norm_weight_D is not None,
        GATED=gated,
        RESIDUAL=residual_MO is not None,
        ROWS=rows,
        OUTS=outs,
        CHUNK=chunk,
        WARPS=num_warps,
        STAGES=stages,
        num_warps=num_warps,
        **overlap(x_MD.device),
    )
    return y_MO


def skinny_matmul(
    x_MD: Tensor,
    weight_OD: Tensor,
    norm_weight_D: Tensor | None = None,
    eps: float = 0.0,
    residual_MO: Tensor | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """y = x W^T for at most 16 rows; [M, O], or [M, O / 2] if gated.

    norm_weight_D: x is normed first, x / rms(x) * norm_weight. gated: W is gate's rows, then up's, and y is
    SiLU(gate) * up. residual_MO: added to y. On a GPU, O (O / 2 if gated) must be a multiple of 16.
    Floor on a GPU: one read of W.
    """
    if not runs_triton(x_MD):
        return skinny_matmul_reference(x_MD, weight_OD, norm_weight_D, eps, residual_MO, gated=gated)
    if len(x_MD) == 1:
        return _one_row_triton(x_MD, weight_OD, norm_weight_D, eps, residual_MO, gated=gated)
    return _skinny_matmul_triton(x_MD, weight_OD, norm_weight_D, eps, residual_MO, gated=gated)
