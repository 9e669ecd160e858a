"""A mixture of experts (Shazeer et al., 2017): each token through a few of many feed-forward layers.

Four kernels: `route` lets each token choose its experts and take a number in each one's queue; `place` lines the queues
up, each from the start of a block of rows on, so that a block's rows share their expert; then a matmul with gate and up
that ends with SiLU(gate) * up, and one with down that ends with the token's weight for this expert. What a token's
experts give is left in parts that are still to be added up: whoever reads them does so at no cost.

Which number a token gets in a queue depends on which program comes first, but no output does: a row of a matmul doesn't
depend on the rows beside it. P are pairs of a token and a chosen expert, token * C + choice, S places in the queues, B
blocks of them. All sizes depend on the step's number of tokens only, so CUDA graphs can hold them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanollm.kernels.backend import gdc_launch_dependents, gdc_wait, gpu, overlap, power_of_2, runs_triton, tl, triton
from nanollm.kernels.silu_mul import silu_mul_reference

_PLACE_TILE = 512


def choose_experts_reference(logits_TE: Tensor, num_chosen: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """The definition: (weights float32 [T, C], ids [T, C]) of the likeliest experts; of equals the first."""
    probabilities_TE = torch.softmax(logits_TE.float(), -1)
    weight_TC, id_TC = torch.sort(probabilities_TE, dim=-1, descending=True, stable=True)
    weight_TC, id_TC = weight_TC[:, :num_chosen], id_TC[:, :num_chosen]
    return (weight_TC / weight_TC.sum(-1, keepdim=True) if normalize else weight_TC), id_TC


def sparse_mlp_reference(
    x_TD: Tensor, logits_TE: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor, num_chosen: int, *, normalize: bool
) -> Tensor:
    """The definition: y [T, D], summed in float32."""
    weight_TC, id_TC = choose_experts_reference(logits_TE, num_chosen, normalize=normalize)
    y_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for expert in id_TC.unique().tolist():
        row, choice = (id_TC == expert).nonzero(as_tuple=True)
        out = F.linear(silu_mul_reference(F.linear(x_TD[row], gate_up_EGD[expert])), down_EDF[expert])
        y_TD.index_add_(0, row, out.float() * weight_TC[row, choice, None])
    return y_TD.to(x_TD.dtype)


@dataclass(frozen=True)
class Cut:
    """A program of the matmuls computes rows × outs outputs, chunk inputs at a time; of gate and up, outs of each."""

    rows: int
    outs: int
    chunk: int
    stages: int
    num_warps: int

    @staticmethod
    def of(num_pairs: int, num_experts: int, inner: int, itemsize: int, shared_bytes: int) -> "Cut":
        """num_pairs: tokens times experts chosen. Blocks hold about what an expert gets on average, or twice that; the
        rest as measured on an H200."""
        average = num_pairs // num_experts
        rows = next((rows for rows in (16, 32, 64) if average < rows), 128)
        if rows == 128:
            outs, chunk, num_warps = 128, 64, 8
        else:
            outs, chunk, num_warps = (64, 64, 4) if rows == 64 or inner % 128 else (32, 128, 4)
        chunk, stages = chunk // max(itemsize // 2, 1), 4
        while stages > 2 and stages * chunk * (rows + 2 * outs) * itemsize > shared_bytes - 2048:
            stages -= 1
        return Cut(rows, outs, chunk, stages, num_warps)


@triton.jit
def choose_experts(
    logits_E, num_experts,
    NORMALIZE: tl.constexpr, CHOSEN: tl.constexpr, LANES: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """(weights float32, expert ids) of one token's choices, [LANES] each, a power of two: the first CHOSEN count."""
    expert_E, choice_C = tl.arange(0, EXPERTS), tl.arange(0, LANES)
    logits = tl.load(logits_E + expert_E, mask=expert_E < num_experts, other=float("-inf")).to(tl.float32)
    exponent_E = tl.exp(logits - tl.max(logits, 0))
    # A row of NaN takes the first experts, and gets NaN of them.
    left_E = tl.where(expert_E < num_experts, tl.where(exponent_E == exponent_E, exponent_E, 0.0), -1.0)
    weight_C, chosen_C = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.int32)
    for i in tl.static_range(CHOSEN):
        most, likeliest = tl.max(left_E, 0, return_indices=True)
        weight_C = tl.where(choice_C == i, most, weight_C)
        chosen_C = tl.where(choice_C == i, likeliest, chosen_C)
        left_E = tl.where(expert_E == likeliest, -1.0, left_E)
    weight_C /= tl.sum(exponent_E, 0)
    return weight_C / tl.sum(weight_C, 0) if NORMALIZE else weight_C, chosen_C


@triton.jit
def _route_kernel(
    weight_P, id_P, turn_P, count_E, logits_TE, num_experts,
    NORMALIZE: tl.constexpr, CHOSEN: tl.constexpr, LANES: tl.constexpr, EXPERTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    weight_C, chosen_C = choose_experts(logits_TE + token * num_experts, num_experts, NORMALIZE, CHOSEN, LANES, EXPERTS)
    choice_C = tl.arange(0, LANES)
    inside_C = choice_C < CHOSEN
    pair_C = token * CHOSEN + choice_C
    tl.store(weight_P + pair_C, weight_C, mask=inside_C)
    tl.store(id_P + pair_C, chosen_C, mask=inside_C)
    tl.store(turn_P + pair_C, tl.atomic_add(count_E + chosen_C, 1, mask=inside_C, sem="relaxed"), mask=inside_C)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _place_kernel(
    pair_S, expert_B, end_B, id_P, turn_P, count_E, num_pairs, num_experts, num_blocks,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Program i places TILE pairs; each finds out for itself where the queues start. The first names the blocks too.
    pair = tl.program_id(0) * TILE + tl.arange(0, TILE)
    expert_E = tl.arange(0, EXPERTS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    count = tl.load(count_E + expert_E, mask=expert_E < num_experts, other=0)
    blocks = (count + ROWS - 1) // ROWS
    first = tl.cumsum(blocks, 0) - blocks
    inside = pair < num_pairs
    expert = tl.load(id_P + pair, mask=inside, other=0)
    start = tl.gather(first, expert, 0) * ROWS
    tl.store(pair_S + start + tl.load(turn_P + pair, mask=inside, other=0), pair, mask=inside)
    if tl.program_id(0) == 0:
        for i in range(tl.max(blocks, 0)):
            tl.store(expert_B + first + i, expert_E, mask=i < blocks)
            tl.store(end_B + first + i, first * ROWS + count, mask=i < blocks)
        for i in range(tl.sum(blocks, 0), num_blocks):
            tl.store(end_B + i, 0)


@triton.jit
def _block_of_rows(pair_S, expert_B, end_B, ROWS: tl.constexpr):
    """(expert, places [ROWS] of its rows, which of them are taken, and by which pair) of this program's block."""
    block = tl.program_id(1)
    place = block * ROWS + tl.arange(0, ROWS)
    taken = place < tl.load(end_B + block)
    expert = tl.load(expert_B + block).to(tl.int64)
    return expert, place, taken, tl.load(pair_S + place, mask=taken, other=0)


@triton.jit
def _product(
    x_at, weight_at, taken, row_inside, size_in,
    OUTS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """x W^T, [ROWS, OUTS], float32; x_at, weight_at: pointers to the rows. WHOLE: chunks divide the inputs."""
    column_D = tl.arange(0, CHUNK)
    # Tensor cores take 64 rows of their first operand at a time: outputs, unless there are as many rows.
    acc = tl.zeros([ROWS, OUTS] if ROWS >= 128 else [OUTS, ROWS], tl.float32)
    for first in tl.range(0, size_in, CHUNK, num_stages=STAGES):
        inside = (WHOLE | (first + column_D < size_in))[None, :]
        w_OD = tl.load(weight_at[:, None] + (first + column_D)[None, :], mask=inside & row_inside[:, None], other=0.0)
        x_RD = tl.load(x_at[:, None] + (first + column_D)[None, :], mask=inside & taken[:, None], other=0.0)
        if ROWS >= 128:
            acc = tl.dot(x_RD, w_OD.T, acc, input_precision="tf32x3")
        else:
            acc = tl.dot(w_OD, x_RD.T, acc, input_precision="tf32x3")
    return acc if ROWS >= 128 else acc.T


@triton.jit
def _gate_up_kernel(
    h_SF, x_TD, gate_up_EGD, pair_S, expert_B, end_B, count_E, num_experts, size_in, size_out,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):  # for the next step's tokens: nobody needs the counts now
        expert_E = tl.arange(0, EXPERTS)
        tl.store(count_E + expert_E, 0, mask=expert_E < num_experts)
    if tl.load(end_B + tl.program_id(1)) != 0:
        expert, place, taken, pair = _block_of_rows(pair_S, expert_B, end_B, ROWS)
        lane = tl.arange(0, 2 * OUTS)  # gate's outputs, then up's
        out = tl.program_id(0) * OUTS + lane % OUTS
        weight_at = gate_up_EGD + (expert * 2 * size_out + lane // OUTS * size_out + out) * size_in
        x_at = x_TD + (pair // CHOSEN).to(tl.int64) * size_in
        y = _product(x_at, weight_at, taken, out < size_out, size_in, 2 * OUTS, ROWS, CHUNK, STAGES, WHOLE)
        gate, up = tl.split(y.reshape(ROWS, 2, OUTS).permute(0, 2, 1))
        y = gate * tl.sigmoid(gate) * up
        out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
        at = place.to(tl.int64)[:, None] * size_out + out[None, :]
        tl.store(h_SF + at, y.to(h_SF.dtype.element_ty), mask=taken[:, None] & (out < size_out)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _down_kernel(
    y_CTD, h_SF, down_EDF, weight_P, pair_S, expert_B, end_B, num_tokens, size_in, size_out,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
    WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tl.load(end_B + tl.program_id(1)) != 0:
        expert, place, taken, pair = _block_of_rows(pair_S, expert_B, end_B, ROWS)
        out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
        weight_at = down_EDF + (expert * size_out + out) * size_in
        h_at = h_SF + place.to(tl.int64) * size_in
        y = _product(h_at, weight_at, taken, out < size_out, size_in, OUTS, ROWS, CHUNK, STAGES, WHOLE)
        y *= tl.load(weight_P + pair, mask=taken, other=0.0)[:, None]
        row = (pair % CHOSEN).to(tl.int64) * num_tokens + pair // CHOSEN
        at = row[:, None] * size_out + out[None, :]
        tl.store(y_CTD + at, y.to(y_CTD.dtype.element_ty), mask=taken[:, None] & (out < size_out)[None, :])


def _sparse_mlp_triton(
    x_TD: Tensor,
    logits_TE: Tensor,
    gate_up_EGD: Tensor,
    down_EDF: Tensor,
    count_E: Tensor,
    num_chosen: int,
    *,
    normalize: bool,
) -> Tensor:
    (num_tokens, size), (num_experts, _, inner) = x_TD.shape, down_EDF.shape
    num_pairs = num_tokens * num_chosen
    cut = Cut.of(num_pairs, num_experts, inner, x_TD.element_size(), gpu(x_TD.device).shared_bytes)
    num_blocks = min(num_pairs, num_pairs // cut.rows + num_experts)  # at most: each expert's last one is not full
    pdl = overlap(x_TD.device)

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return x_TD.new_empty(shape, dtype=dtype)

    weight_P, id_P, turn_P = new(num_pairs, dtype=torch.float32), new(num_pairs), new(num_pairs)
    pair_S, expert_B, end_B = new(num_blocks * cut.rows), new(num_blocks), new(num_blocks)
    experts = power_of_2(num_experts)
    _route_kernel[(num_tokens,)](
        weight_P, id_P, turn_P, count_E, logits_TE.contiguous(), num_experts, NORMALIZE=normalize,
        CHOSEN=num_chosen, LANES=power_of_2(num_chosen), EXPERTS=experts, num_warps=1, **pdl,
    )  # fmt: skip
    _place_kernel[(-(-num_pairs // _PLACE_TILE),)](
        pair_S, expert_B, end_B, id_P, turn_P, count_E, num_pairs, num_experts, num_blocks,
        ROWS=cut.rows, EXPERTS=experts, TILE=_PLACE_TILE, num_warps=4, **pdl,
    )  # fmt: skip
    shape = {"CHOSEN": num_chosen, "ROWS": cut.rows, "OUTS": cut.outs, "CHUNK": cut.chunk, "STAGES": cut.stages}
    h_SF = new(num_blocks * cut.rows, inner, dtype=x_TD.dtype)
    _gate_up_kernel[(-(-inner // cut.outs), num_blocks)](
        h_SF, x_TD.contiguous(), gate_up_EGD, pair_S, expert_B, end_B, count_E, num_experts, size, inner,
        **shape, EXPERTS=experts, WHOLE=size % cut.chunk == 0, num_warps=cut.num_warps, **pdl,
    )  # fmt: skip
    y_CTD = new(num_chosen, num_tokens, size, dtype=x_TD.dtype)
    shape["OUTS"] *= 2  # as many rows of a weight as gate and up have together
    _down_kernel[(-(-size // shape["OUTS"]), num_blocks)](
        y_CTD, h_SF, down_EDF, weight_P, pair_S, expert_B, end_B, num_tokens, inner, size,
        **shape, WHOLE=inner % cut.chunk == 0, num_warps=cut.num_warps, **pdl,
    )  # fmt: skip
    return y_CTD


def sparse_mlp(
    x_TD: Tensor,
    logits_TE: Tensor,
    gate_up_EGD: Tensor,
    down_EDF: Tensor,
    count_E: Tensor,
    num_chosen: int,
    *,
    normalize: bool,
) -> Tensor:
    """sparse_mlp_reference: y [T, D], or on a GPU num_chosen parts of it that are still to be added up, [C, T, D].

    logits_TE: the router's. gate_up_EGD: each expert's gate, then up, [E, 2F, D]. down_EDF: [E, D, F]. count_E: int32,
    scratch, zeros before and after. normalize: whether a token's weights are scaled to add up to one.
    Floor on a GPU: one read of the chosen experts' weights.
    """
    if not runs_triton(x_TD):
        return sparse_mlp_reference(x_TD, logits_TE, gate_up_EGD, down_EDF, num_chosen, normalize=normalize)
    return _sparse_mlp_triton(x_TD, logits_TE, gate_up_EGD, down_EDF, count_E, num_chosen, normalize=normalize)
