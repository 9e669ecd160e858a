"""TPGroup: every communication between tensor-parallel ranks is a method of it."""

import torch
import torch.distributed as dist
from torch import Tensor


class TPGroup:
    """The ranks that share one model. At size 1 every method returns its input and no process group exists.

    group: a torch process group (gloo on the CPU, NCCL on GPUs), or None at size 1.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.size = size
        self.group = group

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, bitwise the same on each; may overwrite x."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Stack every rank's x, of one shape on all: [size, *x.shape]."""
        if self.size == 1:
            return x[None]
        out = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(out, x.contiguous(), group=self.group)
        return out

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x on every rank; overwrites x."""
        if self.size > 1:
            dist.broadcast(x, group=self.group, group_src=0)
        return x
