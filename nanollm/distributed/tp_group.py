"""TPGroup: every communication between tensor-parallel ranks is a method of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh


class TPGroup:
    """The ranks that share one model. At size 1 every method returns its input and no process group exists."""

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.size = size
        self._group = group
        self._owns_world = False

    @staticmethod
    def join(
        rank: int, size: int, device: torch.device, backend: str, timeout: float, store_path: str | None = None
    ) -> "TPGroup":
        """Meet the other ranks; all call this. Collectives then fail after `timeout` seconds without a peer.

        backend: "gloo" or "nccl". store_path: a file that all ranks see, used to meet; None meets where the launcher
        (torchrun) says. A process group that the program made itself is used and left as it was found.
        """
        owns_world = not dist.is_initialized()
        if owns_world:
            init_method = "env://" if store_path is None else f"file://{store_path}"
            with _loopback() if store_path is not None else nullcontext():
                dist.init_process_group(
                    backend, init_method, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
                )
        mesh = init_device_mesh(device.type, (1, size), mesh_dim_names=("dp", "tp"))
        group = TPGroup(rank, size, mesh.get_group("tp"))
        group._owns_world = owns_world
        return group

    @property
    def capturable(self) -> bool:
        """Whether CUDA graphs can record these collectives: they must run on the GPU alone."""
        return self._group is None or dist.get_backend(self._group) == "nccl"

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, bitwise the same on each; may overwrite x."""
        if self.size > 1:
            dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Stack every rank's x, of one shape on all: [size, *x.shape]."""
        if self.size == 1:
            return x[None]
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.stack(parts)

    def gather(self, x: Tensor) -> Tensor | None:
        """Stack every rank's x on rank 0, [size, *x.shape]; None on the others."""
        if self.size == 1:
            return x[None]
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.gather(x.contiguous(), parts if self.rank == 0 else None, group=self._group, group_dst=0)
        return torch.stack(parts) if self.rank == 0 else None

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x on every rank; overwrites x."""
        if self.size > 1:
            dist.broadcast(x, group=self._group, group_src=0)
        return x

    def leave(self, *, abort: bool = False) -> None:
        """Undo join. abort: peers may be gone, so running NCCL collectives are cut off instead of waited for."""
        if self._owns_world and dist.is_initialized():
            if abort and dist.get_backend() == "nccl":
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()
        self._group, self._owns_world = None, False


def world_is_taken() -> bool:
    """Whether this process already has a torch process group: an engine's, or the program's own."""
    return dist.is_available() and dist.is_initialized()


def nccl_available() -> bool:
    """Whether this PyTorch was built with NCCL."""
    return dist.is_nccl_available()


@contextmanager
def _loopback() -> Iterator[None]:
    """Ranks of one host meet over the loopback interface, which is there whatever the network is like."""
    name = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(name)
    os.environ.setdefault(name, "lo")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
