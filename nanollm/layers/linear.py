"""Linear layers split over tensor-parallel ranks (Shoeybi et al., 2019): by output columns, or by input rows."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanollm.distributed.partition import HeadPartition
from nanollm.distributed.tp_group import TPGroup
from nanollm.kernels.backend import runs_triton
from nanollm.kernels.one_row_matmul import one_row_matmul, suits_one_row
from nanollm.kernels.silu_mul import silu_mul
from nanollm.kernels.split_matmul import Tiles, split_matmul, tiles_for
from nanollm.layers.hidden import Hidden
from nanollm.layers.weights import TensorPart


class LinearBase(nn.Module):
    """Holds this rank's weight [out_r, in_r] and, if asked for, its bias [out_r]."""

    def __init__(self, size_in: int, size_out: int, bias: bool, tp: TPGroup) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(size_out, size_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size_out), requires_grad=False) if bias else None

    def suits_one_row(self, num_rows: int) -> bool:
        """Whether to read the weights with the kernel for one row, which norm, gate and residual are folded into."""
        return self.bias is None and suits_one_row(num_rows, self.weight)

    def tiles(self, num_rows: int, *, gated: bool = False) -> Tiles | None:
        """How to read the weights with the kernel for some rows, which may leave parts to be added up; None: don't."""
        return None if self.bias is not None else tiles_for(num_rows, self.weight, gated=gated)


class ColumnParallelLinear(LinearBase):
    """y_r = norm(x) W_r^T + b_r: each rank holds some of the output features. No communication of its own.

    Reads a Hidden, so the pending all-reduce, residual add and norm are done here, in whatever way is best. On a GPU
    y_r may come as float32 parts [Z, T, out_r] that are still to be added up.
    outputs: (checkpoint name, whole size, this rank's range of it) for each projection that is fused into this one.
    """

    def __init__(self, size_in: int, outputs: Sequence[tuple[str, int, range]], bias: bool, tp: TPGroup) -> None:
        self.outputs = list(outputs)
        super().__init__(size_in, sum(len(kept) for _, _, kept in outputs), bias, tp)

    def forward(self, hidden: Hidden, *, gated: bool = False) -> tuple[Tensor, Tensor]:
        """Returns (y_r, residual_TD): this rank's output features, and the residual stream for the layer after.

        gated: of two projections gate and up, y_r is SiLU(gate) * up, [T, out_r / 2].
        """
        x_TD, norm_D = hidden.residual_TD, hidden.norm_weight_D
        if x_TD is not None and hidden.pending_TD is None and self.suits_one_row(len(x_TD)):
            return one_row_matmul(x_TD, self.weight, norm_D, hidden.norm_eps, gated=gated), x_TD
        normed_TD, residual_TD = hidden.resolve(self.tp)
        if self.suits_one_row(len(normed_TD)):
            return one_row_matmul(normed_TD, self.weight, gated=gated), residual_TD
        if tiles := self.tiles(len(normed_TD), gated=gated):
            return split_matmul(normed_TD, self.weight, tiles, gated=gated), residual_TD
        y_r = F.linear(normed_TD, self.weight, self.bias)
        return silu_mul(y_r) if gated else y_r, residual_TD

    def tensor_parts(self, path: str) -> list[TensorPart]:
        parent, size_in, start, parts = path.rpartition(".")[0], self.weight.shape[1], 0, []
        for name, size, kept in self.outputs:
            rows = slice(kept.start, kept.stop)
            target = slice(start, start + len(kept))
            full = (rows, slice(0, size_in))
            parts.append(TensorPart(f"{parent}.{name}.weight", (size, size_in), full, self.weight[target]))
            if self.bias is not None:
                parts.append(TensorPart(f"{parent}.{name}.bias", (size,), (rows,), self.bias[target]))
            start = target.stop
        return parts


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several projections of one input and of equal size in one matmul, such as gate and up; each rank has its range
    of every one, so its output is [T, len(names) * size_r]."""

    def __init__(
        self, size_in: int, size: int, names: Sequence[str], split: Sequence[range], bias: bool, tp: TPGroup
    ) -> None:
        super().__init__(size_in, [(name, size, split[tp.rank]) for name in names], bias, tp)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections in one matmul, split by heads; output [T, (N_r + 2 K_r) * H]."""

    def __init__(self, size_in: int, heads: HeadPartition, head_dim: int, bias: bool, tp: TPGroup) -> None:
        def rows(of: range) -> range:
            return range(of.start * head_dim, of.stop * head_dim)

        q, kv = rows(heads.heads), rows(heads.kv_heads)
        kv_size = heads.num_kv_heads * head_dim
        outputs = [("q_proj", heads.num_heads * head_dim, q), ("k_proj", kv_size, kv), ("v_proj", kv_size, kv)]
        super().__init__(size_in, outputs, bias, tp)


class RowParallelLinear(LinearBase):
    """y = x W^T, W split by input features: each rank holds [out, in_r] and gets a partial sum of y.

    The sum over ranks is left pending in the returned Hidden, so that whoever reads it can fuse the all-reduce with
    what it does next. A bias is added on rank 0 only, so once. On one GPU the residual is updated in place.
    kept: this rank's range of the `size_in` input features.
    """

    def __init__(self, size_in: int, size_out: int, kept: range, bias: bool, tp: TPGroup) -> None:
        super().__init__(len(kept), size_out, bias and tp.rank == 0, tp)
        self.size_in, self.kept = size_in, kept
        self.unused_bias = bias and tp.rank != 0

    def forward(self, x_r: Tensor, residual_TD: Tensor) -> Hidden:
        if self.suits_one_row(len(x_r)):
            if self.tp.size == 1:
                return Hidden(one_row_matmul(x_r, self.weight, residual_1O=residual_TD), None)
            return Hidden(residual_TD, one_row_matmul(x_r, self.weight))
        if tiles := self.tiles(len(x_r)):
            return Hidden(residual_TD, split_matmul(x_r, self.weight, tiles))
        if self.tp.size == 1 and self.bias is None and runs_triton(x_r):  # a GPU adds to what is there at no cost
            return Hidden(residual_TD.addmm_(x_r, self.weight.t()), None)
        return Hidden(residual_TD, F.linear(x_r, self.weight, self.bias))

    def tensor_parts(self, path: str) -> list[TensorPart]:
        size_out = self.weight.shape[0]
        full = (slice(0, size_out), slice(self.kept.start, self.kept.stop))
        parts = [TensorPart(f"{path}.weight", (size_out, self.size_in), full, self.weight)]
        if self.bias is not None:
            parts.append(TensorPart(f"{path}.bias", (size_out,), (slice(0, size_out),), self.bias))
        elif self.unused_bias:  # still in the checkpoint, but another rank's to add
            parts.append(TensorPart(f"{path}.bias", (size_out,), (slice(0, 0),), self.weight.new_empty(0)))
        return parts
