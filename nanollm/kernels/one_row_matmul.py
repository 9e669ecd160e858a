"""Linear layers of one row, where reading the weights is all the work: norm, gate and residual come for free."""
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
    runs_triton,
    tl,
    triton,
)
from nanollm.kernels.rms_norm import rms_norm_reference
from nanollm.kernels.silu_mul import silu_mul_reference


def suits_one_row(num_rows: int, weight_OD: Tensor) -> bool:
    """Whether one_row_matmul can be used, which then beats the library's with separate kernels around it."""
    return num_rows == 1 and runs_triton(weight_OD) and len(weight_OD) % 16 == 0


@dataclass(frozen=True)
class OneRow:
    """How such a matmul is cut: a program reads outs rows of the weight, chunk inputs at a time.

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
            and (self.outs > 1 or not gated)
            and self.num_warps <= 32
            and self.outs * self.chunk <= 128 * 32 * self.num_warps
        )


@functools.cache
def one_row_cut(size_out: int, size_in: int, gated: bool, device: torch.device) -> OneRow:
    """As bench/tune.py measured it on this GPU, or by the rule."""
    measured = measured_cuts(size_out, size_in, device, gated=gated).get("1")
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


def one_row_matmul_reference(
    x_1D: Tensor,
    weight_OD: Tensor,
    norm_weight_D: Tensor | None = None,
    eps: float = 0.0,
    residual_1O: Tensor | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """The definition; arguments as in one_row_matmul."""
    if norm_weight_D is not None:
        x_1D = rms_norm_reference(x_1D, norm_weight_D, eps)
    y_1O = F.linear(x_1D, weight_OD)
    if gated:
        y_1O = silu_mul_reference(y_1O)
    return y_1O if residual_1O is None else residual_1O + y_1O


@triton.jit
def _one_row_kernel(
    y_O, x_D, weight_OD, norm_weight_D, residual_O, size_out, eps,
    SIZE_IN: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, OUTS: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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


def one_row_matmul(
    x_1D: Tensor,
    weight_OD: Tensor,
    norm_weight_D: Tensor | None = None,
    eps: float = 0.0,
    residual_1O: Tensor | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """y = x W^T for one row; [1, O], or [1, O / 2] if gated.

    norm_weight_D: x is normed first, x / rms(x) * norm_weight. gated: W is gate's rows, then up's, and y is
    SiLU(gate) * up. residual_1O: added to y. On a GPU, O must be a multiple of 16.
    Floor on a GPU: one read of W.
    """
    if not runs_triton(x_1D):
        return one_row_matmul_reference(x_1D, weight_OD, norm_weight_D, eps, residual_1O, gated=gated)
    return _one_row_triton(x_1D, weight_OD, norm_weight_D, eps, residual_1O, gated=gated)
