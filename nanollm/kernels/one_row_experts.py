"""A mixture of experts for one row, where reading the chosen experts' weights is all the work.

Two kernels: gate and up, each of whose programs works out for itself which experts are chosen, then down. Norm and
residual come for free, as in one_row_matmul.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
from torch import Tensor

from nanollm.kernels.backend import gdc_launch_dependents, gdc_wait, gpu, overlap, power_of_2, runs_triton, tl, triton
from nanollm.kernels.one_row_matmul import suits_one_row
from nanollm.kernels.rms_norm import rms_norm_reference
from nanollm.kernels.sparse_mlp import choose_experts, sparse_mlp_reference


def suits_one_row_experts(num_rows: int, gate_ED: Tensor, down_EDF: Tensor) -> bool:
    """Whether one_row_experts can be used, and one_row_matmul for the router before it: E, D and F in sixteens."""
    size, inner = down_EDF.shape[1:]
    return suits_one_row(num_rows, gate_ED) and size % 16 == 0 and inner % 16 == 0


def one_row_experts_reference(
    x_1D: Tensor,
    logits_1E: Tensor,
    gate_up_EGD: Tensor,
    down_EDF: Tensor,
    num_chosen: int,
    norm_weight_D: Tensor | None = None,
    eps: float = 0.0,
    residual_1D: Tensor | None = None,
    *,
    normalize: bool,
) -> Tensor:
    """The definition; arguments as in one_row_experts."""
    if norm_weight_D is not None:
        x_1D = rms_norm_reference(x_1D, norm_weight_D, eps)
    y_1D = sparse_mlp_reference(x_1D, logits_1E, gate_up_EGD, down_EDF, num_chosen, normalize=normalize)
    return y_1D if residual_1D is None else residual_1D + y_1D


@triton.jit
def _one_row_gate_up_kernel(
    h_CF, expert_C, x_D, logits_E, gate_up_EGD, norm_weight_D, num_experts, inner, eps,
    SIZE: tl.constexpr, NORMALIZE: tl.constexpr, CHOSEN: tl.constexpr, LANES: tl.constexpr, EXPERTS: tl.constexpr,
    NORM: tl.constexpr, OUTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One program computes OUTS outputs of the expert that is the token's choice number `choice`, times its weight.
    choice = tl.program_id(1)
    out_O, column_D = tl.program_id(0) * OUTS + tl.arange(0, OUTS), tl.arange(0, CHUNK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    weight_C, chosen_C = choose_experts(logits_E, num_experts, NORMALIZE, CHOSEN, LANES, EXPERTS)
    mine_C = tl.arange(0, LANES) == choice
    expert = tl.sum(tl.where(mine_C, chosen_C, 0), 0)
    gate_at = gate_up_EGD + (expert.to(tl.int64) * 2 * inner + out_O)[:, None] * SIZE + column_D[None, :]
    up_at = gate_at + inner.to(tl.int64) * SIZE
    gate_OD = tl.zeros([OUTS, CHUNK], tl.float32)
    up_OD = tl.zeros([OUTS, CHUNK], tl.float32)
    squares_D = tl.zeros([CHUNK], tl.float32)
    for first in tl.static_range(0, SIZE, CHUNK):
        column = first + column_D
        inside = column < SIZE
        w_OD = tl.load(gate_at + first, mask=inside[None, :], other=0.0)
        up_w_OD = tl.load(up_at + first, mask=inside[None, :], other=0.0)
        x = tl.load(x_D + column, mask=inside, other=0.0).to(tl.float32)
        if NORM:  # rms(x) is known only after the last chunk, but it only scales the result
            squares_D += x * x
            x *= tl.load(norm_weight_D + column, mask=inside, other=0.0).to(tl.float32)
        gate_OD += w_OD.to(tl.float32) * x[None, :]
        up_OD += up_w_OD.to(tl.float32) * x[None, :]
    gate, up = tl.sum(gate_OD, 1), tl.sum(up_OD, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares_D, 0) / SIZE + eps)
        gate, up = gate * scale, up * scale
    h = gate * tl.sigmoid(gate) * up * tl.sum(tl.where(mine_C, weight_C, 0.0), 0)
    tl.store(h_CF + choice * inner + out_O, h)
    if tl.program_id(0) == 0:
        tl.store(expert_C + choice, expert)


@triton.jit
def _one_row_down_kernel(
    y_D, h_CF, expert_C, down_EDF, residual_D, size,
    INNER: tl.constexpr, CHOSEN: tl.constexpr, RESIDUAL: tl.constexpr, OUTS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # One program computes OUTS outputs: down is one matmul, whose inputs are the chosen experts' F, one after another.
    out_O = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc_OF = tl.zeros([OUTS, CHUNK], tl.float32)
    for first in tl.static_range(0, CHOSEN * INNER, CHUNK):
        column_F = first + tl.arange(0, CHUNK)
        inside = column_F < CHOSEN * INNER
        expert = tl.load(expert_C + column_F // INNER, mask=inside, other=0).to(tl.int64)
        at = (expert * size)[None, :] * INNER + out_O[:, None] * INNER + (column_F % INNER)[None, :]
        w_OF = tl.load(down_EDF + at, mask=inside[None, :], other=0.0)
        acc_OF += w_OF.to(tl.float32) * tl.load(h_CF + column_F, mask=inside, other=0.0)[None, :]
    y = tl.sum(acc_OF, 1)
    if RESIDUAL:
        y += tl.load(residual_D + out_O).to(tl.float32)
    tl.store(y_D + out_O, y.to(y_D.dtype.element_ty))


def _one_row_experts_triton(
    x_1D: Tensor,
    logits_1E: Tensor,
    gate_up_EGD: Tensor,
    down_EDF: Tensor,
    num_chosen: int,
    norm_weight_D: Tensor | None = None,
    eps: float = 0.0,
    residual_1D: Tensor | None = None,
    *,
    normalize: bool,
) -> Tensor:
    num_experts, size, inner = down_EDF.shape
    pdl = overlap(x_1D.device)
    h_CF = x_1D.new_empty(num_chosen, inner, dtype=torch.float32)
    expert_C = x_1D.new_empty(num_chosen, dtype=torch.int32)
    few = num_chosen * inner < 32 * gpu(x_1D.device).num_sms  # outputs of gate and up; cuts as measured on an H200
    outs, chunk, num_warps = (2, 1024, 1) if few else (8, 512, 2)
    down_outs, down_chunk, down_warps = (2, 1024, 4) if few else (2, 2048, 1)
    _one_row_gate_up_kernel[(inner // outs, num_chosen)](
        h_CF, expert_C, x_1D, logits_1E, gate_up_EGD, x_1D if norm_weight_D is None else norm_weight_D, num_experts,
        inner, eps, SIZE=size, NORMALIZE=normalize, CHOSEN=num_chosen, LANES=power_of_2(num_chosen),
        EXPERTS=power_of_2(num_experts), NORM=norm_weight_D is not None, OUTS=outs, CHUNK=chunk, num_warps=num_warps,
        **pdl,
    )  # fmt: skip
    y_1D = torch.empty_like(x_1D)
    _one_row_down_kernel[(size // down_outs,)](
        y_1D, h_CF, expert_C, down_EDF, x_1D if residual_1D is None else residual_1D, size, INNER=inner,
        CHOSEN=num_chosen, RESIDUAL=residual_1D is not None, OUTS=down_outs, CHUNK=down_chunk, num_warps=down_warps,
        **pdl,
    )  # fmt: skip
    return y_1D


def one_row_experts(
    x_1D: Tensor,
    logits_1E: Tensor,
    gate_up_EGD: Tensor,
    down_EDF: Tensor,
    num_chosen: int,
    norm_weight_D: Tensor | None = None,
    eps: float = 0.0,
    residual_1D: Tensor | None = None,
    *,
    normalize: bool,
) -> Tensor:
    """y [1, D] of one row; arguments as in sparse_mlp, and norm_weight_D, eps, residual_1D as in one_row_matmul.

    The norm is of x only: logits_1E are of the normed x already. On a GPU, D and F must be multiples of 16.
    Floor on a GPU: one read of the chosen experts' weights.
    """
    given = (x_1D, logits_1E, gate_up_EGD, down_EDF, num_chosen, norm_weight_D, eps, residual_1D)
    run = _one_row_experts_triton if runs_triton(x_1D) else one_row_experts_reference
    return run(*given, normalize=normalize)
