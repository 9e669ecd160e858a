"""Linear layers of some rows, where reading the weights is most of the work: spread evenly over the whole GPU.

A library's matmul has a program for each tile of outputs, which are too few to keep the memory busy where the layer is
small or is one rank's share. Here the input dimension is split too, and whoever reads the result adds the parts up in
fixed order: the norm that follows, and the kernel that writes K and V, do so at no cost. Gate and up are not split, and
a program has rows of both, so that it ends with SiLU(gate) * up. The first weights are on their way to the L2 cache
while the kernel before this one still runs. From about 100 rows on the library multiplies all but small layers better,
here and there in two halves.
"""
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
    runs_triton,
    tl,
    triton,
)
from nanollm.kernels.silu_mul import silu_mul_reference

MAX_ROWS = 256
# Each row of the table: what is measured up to this many rows. One row alone has a kernel of its own.
ROW_BUCKETS = (2, 4, 8, 16, 32, 64, 128, 192, 256)
HAS_FLOAT32_BMM = hasattr(torch.ops.aten.bmm, "dtype")  # PyTorch 2.8
_PREFETCHED = tl.constexpr(512)  # inputs of each output


@dataclass(frozen=True)
class Tiles:
    """How a matmul is cut: a program computes rows × outs outputs, from 1 / splits of the inputs, chunk at a time.

    rows 0: the library multiplies each part of the inputs, as a batch. Of a gated weight, half of the outs are gate's.
    """

    rows: int
    outs: int
    chunk: int
    stages: int
    num_warps: int
    splits: int = 1

    def suit(self, size_out: int, size_in: int, *, gated: bool = False) -> bool:
        if gated and self.splits > 1:
            return False
        if not self.rows:
            return HAS_FLOAT32_BMM and size_in % (self.splits * 64) == 0
        return size_out % self.outs == 0 and size_in % (self.splits * self.chunk) == 0

    def fit(self, shared_bytes: int) -> bool:
        """Whether that much shared memory is enough for values of 16 bits."""
        return 2 * self.stages * self.chunk * (self.rows + self.outs) < shared_bytes - 2048


LIBRARY_HALVES = Tiles(0, 0, 0, 0, 0, 2)


def tiles_for(num_rows: int, weight_OD: Tensor, *, gated: bool = False) -> Tiles | None:
    """How to multiply, or None where the library is faster; bench/tune.py measured it, or a rule made from that."""
    if not runs_triton(weight_OD) or not 1 < num_rows <= MAX_ROWS or weight_OD.dtype == torch.float32:
        return None
    return _tiles_for(num_rows, *weight_OD.shape, gated, weight_OD.device)


@functools.cache
def _tiles_for(num_rows: int, size_out: int, size_in: int, gated: bool, device: torch.device) -> Tiles | None:
    bucket = next(most for most in ROW_BUCKETS if num_rows <= most)
    measured = measured_cuts(size_out, size_in, device, gated=gated)
    if str(bucket) in measured:
        cut = measured[str(bucket)]
        return None if cut is None or not Tiles(*cut).suit(size_out, size_in, gated=gated) else Tiles(*cut)
    tiles = None if gated else default_tiles(bucket, size_out, size_in, gpu(device).num_sms)
    return tiles if tiles is not None and tiles.fit(gpu(device).shared_bytes) else None


def default_tiles(num_rows: int, size_out: int, size_in: int, num_sms: int) -> Tiles | None:
    """The rule for shapes that nobody measured: split what has too few outputs, and leave the rest to the library."""
    if num_rows > 64 or size_out // 64 >= num_sms:
        return None
    splits = 1
    while (
        splits < 8 and size_out // 64 * splits < num_sms and size_in // splits >= 1024 and not size_in % (256 * splits)
    ):
        splits *= 2
    tiles = Tiles(max(num_rows, 16), 64, 128, 4, 4, splits)
    return tiles if tiles.suit(size_out, size_in) else None


def split_matmul_reference(x_MD: Tensor, weight_OD: Tensor, splits: int, *, gated: bool = False) -> Tensor:
    """The definition; as split_matmul."""
    if splits == 1:
        y_MO = F.linear(x_MD, weight_OD)
        return silu_mul_reference(y_MO) if gated else y_MO
    parts = zip(x_MD.chunk(splits, 1), weight_OD.chunk(splits, 1), strict=True)
    return torch.stack([F.linear(x_Md, weight_Od) for x_Md, weight_Od in parts])


@triton.jit
def _prefetch(pointers):
    """Start the cache lines of these pointers on their way to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["num_rows"])
def _split_matmul_kernel(
    y_ZMO, x_MD, weight_OD, num_rows, size_out, size_in, split_size,
    ROWS: tl.constexpr, OUTS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # Programs of the same weights follow each other, so that the later ones find them in the L2 cache.
    row_M = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out_O = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    row_O = out_O
    if GATED:  # the weight's rows are gate's, then up's
        lane_O = tl.arange(0, 2 * OUTS)
        row_O = tl.program_id(1) * OUTS + lane_O % OUTS + lane_O // OUTS * size_out
    split = tl.program_id(2).to(tl.int64)
    column_D = tl.arange(0, CHUNK)
    weight = weight_OD + row_O.to(tl.int64)[:, None] * size_in + split * split_size
    x = x_MD + tl.minimum(row_M, num_rows - 1).to(tl.int64)[:, None] * size_in + split * split_size + column_D[None, :]
    if PDL:
        # Weights are nobody's output, so they needn't wait for the kernel before this one.
        gdc_launch_dependents()
        line = tl.minimum(tl.arange(0, _PREFETCHED // 64) * 64, split_size - 1)[None, :]
        _prefetch(weight + line)
        gdc_wait()
    # Tensor cores take 64 rows of their first operand at a time: outputs, unless there are as many rows.
    acc = tl.zeros([ROWS, row_O.shape[0]] if ROWS >= 128 else [row_O.shape[0], ROWS], tl.float32)
    for first in tl.range(0, split_size, CHUNK, num_stages=STAGES):
        w_OD = tl.load(weight + (first + column_D)[None, :])
        x_MC = tl.load(x + first)
        if ROWS >= 128:
            acc = tl.dot(x_MC, w_OD.T, acc, input_precision="tf32x3")
        else:
            acc = tl.dot(w_OD, x_MC.T, acc, input_precision="tf32x3")
    y_MO = acc if ROWS >= 128 else acc.T
    if GATED:
        gate_MO, up_MO = tl.split(y_MO.reshape(ROWS, 2, OUTS).permute(0, 2, 1))
        y_MO = gate_MO * tl.sigmoid(gate_MO) * up_MO
    at_MO = (split * num_rows + row_M)[:, None] * size_out + out_O[None, :]
    tl.store(y_ZMO + at_MO, y_MO.to(y_ZMO.dtype.element_ty), mask=(row_M < num_rows)[:, None])


def _split_by_library(x_MD: Tensor, weight_OD: Tensor, splits: int) -> Tensor:
    x_ZMd = x_MD.unflatten(1, (splits, -1)).transpose(0, 1)
    weight_ZdO = weight_OD.unflatten(1, (splits, -1)).permute(1, 2, 0)
    return torch.bmm(x_ZMd, weight_ZdO, out_dtype=torch.float32)


def _split_matmul_gpu(x_MD: Tensor, weight_OD: Tensor, tiles: Tiles, *, gated: bool = False) -> Tensor:
    if not tiles.rows:
        return _split_by_library(x_MD, weight_OD, tiles.splits)
    num_rows, size_in, halves = *x_MD.shape, 2 if gated else 1
    size_out = len(weight_OD) // halves
    shape = (tiles.splits, num_rows, size_out)
    y_ZMO = x_MD.new_empty(shape, dtype=torch.float32 if tiles.splits > 1 else None)
    _split_matmul_kernel[(triton.cdiv(num_rows, tiles.rows), len(weight_OD) // tiles.outs, tiles.splits)](
        y_ZMO,
        x_MD.contiguous(),
        weight_OD,
        num_rows,
        size_out,
        size_in,
        size_in // tiles.splits,
        ROWS=tiles.rows,
        OUTS=tiles.outs // halves,
        CHUNK=tiles.chunk,
        STAGES=tiles.stages,
        GATED=gated,
        num_warps=tiles.num_warps,
        **overlap(x_MD.device),
    )
    return y_ZMO if tiles.splits > 1 else y_ZMO[0]


def split_matmul(x_MD: Tensor, weight_OD: Tensor, tiles: Tiles, *, gated: bool = False) -> Tensor:
    """y = x W^T: [M, O] or, in parts that are still to be added up, float32 [Z, M, O]. tiles: of tiles_for.

    gated: W is gate's rows, then up's, and y is SiLU(gate) * up, [M, O / 2].
    Floor on a GPU: one read of W.
    """
    assert not gated or tiles.splits == 1, "SiLU needs whole sums"
    if not runs_triton(x_MD):
        return split_matmul_reference(x_MD, weight_OD, tiles.splits, gated=gated)
    return _split_matmul_gpu(x_MD, weight_OD, tiles, gated=gated)
