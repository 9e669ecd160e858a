"""TPGroup: every communication between tensor-parallel ranks is a method of it."""

import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from nanollm.distributed.all_reduce import PeerCollectives, connect_peers
from nanollm.kernels.all_reduce import best_of_ranks_reference
from nanollm.kernels.rms_norm import add_rms_norm, rms_norm

_PIECE = timedelta(seconds=0.1)  # how long to wait without listening to signals
_MEETING_SECONDS = 120.0  # more than ranks need to meet, however small a step_timeout is
_worlds = itertools.count()  # groups that this process has made in a launcher's store


class TPGroup:
    """The ranks that share one model. At size 1 every method returns its input and no process group exists.

    timeout: seconds that gloo's collectives wait for another rank before they raise TimeoutError.
    check: called while they wait; may raise.
    peers: the collectives that go through the peers' memory, where that works; else a text that says why not.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None, timeout: float = 300.0
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.check: Callable[[], None] = lambda: None
        self.peers: PeerCollectives | str = "one rank needs none" if size == 1 else "ranks on the CPU"
        self._group = group
        self.is_gloo = group is not None and dist.get_backend(group) == "gloo"
        self._owns_world = False

    @staticmethod
    def join(
        rank: int,
        size: int,
        device: torch.device,
        backend: str,
        timeout: float,
        store_path: str | None = None,
        peer_memory: bool = True,
    ) -> "TPGroup":
        """Meet the other ranks; all call this. Collectives then fail after `timeout` seconds without a peer.

        backend: "gloo" or "nccl". store_path: a file that all ranks see, used to meet, which must stay as long as the
        group does; None meets where the launcher (torchrun) says. A process group that the program made itself is used
        and left as it was found. peer_memory: whether to use the peers' memory where that works.
        """
        owns_world = not dist.is_initialized()
        limit = timedelta(seconds=timeout + _MEETING_SECONDS)
        with nullcontext() if store_path is None else _loopback():
            if owns_world:
                _make_world(rank, size, backend, limit, store_path)
            try:
                mesh = torch.arange(size).view(1, size)  # axes dp, tp
                # Groups of our own, since the program's may have another backend and timeout.
                groups = [dist.new_group(ranks, timeout=limit, backend=backend) for ranks in mesh.tolist()]
                tp = TPGroup(rank, size, groups[0], timeout)
                tp.all_reduce(torch.zeros(1, device=device))  # NCCL connects now, not in the first step
                if device.type == "cuda":
                    tp.peers = connect_peers(rank, size, device, groups[0], peer_memory, tp.all_gather)
            except BaseException:
                if owns_world:
                    dist.destroy_process_group()
                raise
        tp._owns_world = owns_world
        return tp

    @property
    def capturable(self) -> bool:
        """Whether CUDA graphs record all_reduce, all_reduce_norm and best_of_ranks; they must run on the GPU."""
        return not self.is_gloo or isinstance(self.peers, PeerCollectives)

    def describe(self) -> str:
        """How many ranks, and how they sum: for the log."""
        if self.size == 1:
            return "tensor parallel 1"
        if isinstance(self.peers, PeerCollectives):
            return f"tensor parallel {self.size} through the peers' memory"
        return f"tensor parallel {self.size} over {'gloo' if self.is_gloo else 'NCCL'} ({self.peers})"

    def all_reduce_norm(
        self, x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(total) * weight, total) for total = residual + the sum over ranks of x.

        x may also be parts [Z, T, D], which are added up first, in float32.
        May overwrite x and the residual: go on with what is returned. Through the peers' memory, where that works, it
        is one kernel, and the sum is rounded only after the residual's part.
        """
        if isinstance(self.peers, PeerCollectives) and self.peers.takes(x_TD if residual_TD is None else residual_TD):
            return self.peers.all_reduce(x_TD, residual_TD, weight_D, eps)
        if self.size > 1:
            x_TD = self.all_reduce(x_TD if residual_TD is None or x_TD.dim() == 2 else x_TD.sum(0).to(residual_TD))
        if residual_TD is None:
            return rms_norm(x_TD, weight_D, eps), x_TD
        return add_rms_norm(x_TD, residual_TD, weight_D, eps)

    def best_of_ranks(self, value_S: Tensor, id_S: Tensor) -> Tensor:
        """The id, int64 [S], of the rank whose value is largest; of equals the lowest rank's.

        Through the peers' memory values go as float32.
        """
        if self.size == 1:
            return id_S
        if isinstance(self.peers, PeerCollectives):
            return self.peers.best_of_ranks(value_S, id_S)
        # float64 holds both exactly, so one message carries the pair.
        pairs_R2S = self.all_gather(torch.stack((value_S.double(), id_S.double())))
        return best_of_ranks_reference(pairs_R2S[:, 0], pairs_R2S[:, 1]).long()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, bitwise the same on each; may overwrite x."""
        if isinstance(self.peers, PeerCollectives) and self.peers.takes(x):
            return self.peers.all_reduce(x)[0]
        if self.size > 1:
            self._finish(dist.all_reduce(x, group=self._group, async_op=self.is_gloo))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Stack every rank's x, of one shape on all: [size, *x.shape]."""
        if self.size == 1:
            return x[None]
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._finish(dist.all_gather(parts, x.contiguous(), group=self._group, async_op=self.is_gloo))
        return torch.stack(parts)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x on every rank; overwrites x."""
        if self.size > 1:
            self._finish(dist.broadcast(x, group=self._group, group_src=0, async_op=self.is_gloo))
        return x

    def abort_waits(self) -> None:
        """A peer is gone: let kernels that wait for it give up. Any thread may call it."""
        if isinstance(self.peers, PeerCollectives):
            self.peers.abort()

    def leave(self, *, abort: bool = False) -> None:
        """Undo join. abort: peers may be gone, so running collectives are cut off instead of waited for."""
        if abort:
            self.abort_waits()
        if self._group is not None and dist.is_initialized():
            aborts = abort and not self.is_gloo
            end = dist.distributed_c10d._abort_process_group if aborts else dist.destroy_process_group
            end(None if self._owns_world else self._group)  # None is all groups there are
        if isinstance(self.peers, PeerCollectives):  # which waits for the GPU, so after NCCL was cut off
            self.peers.close()
            self.peers = "this rank has left"
        self._group, self._owns_world = None, False

    def _finish(self, work: "dist.Work | None") -> None:
        """Wait for a collective of gloo, whose own waiting hears neither Ctrl-C nor that another rank has failed."""
        if work is None:  # NCCL: the stream waits
            return
        start = time.monotonic()
        while not work.is_completed():
            with suppress(RuntimeError):  # not done yet, or failed
                work.wait(_PIECE)
                return
            self.check()
            if time.monotonic() - start > self.timeout:
                raise TimeoutError(f"another rank took more than step_timeout = {self.timeout:g} s")
        work.wait()  # raises what it failed with


def world_is_taken() -> bool:
    """Whether this process already has a torch process group: an engine's, or the program's own."""
    return dist.is_available() and dist.is_initialized()


def _make_world(rank: int, size: int, backend: str, timeout: timedelta, store_path: str | None) -> None:
    if store_path is None:
        shared, *_ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
        # It outlives a group, and the next one must not find the addresses of the last.
        store: dist.Store = dist.PrefixStore(f"nanollm{next(_worlds)}", shared)
    else:
        store = dist.FileStore(store_path, size)
    store.set_timeout(timeout)
    hook = sys.excepthook
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except BaseException:
        dist.distributed_c10d._world.group_count = 0  # else the next one's groups have other names than new ranks' have
        raise
    sys.excepthook = hook  # torch's says the rank before each line, once more for every group there ever was


@contextmanager
def _loopback() -> Iterator[None]:
    """Ranks of one host meet over the loopback interface, which is there whatever the network is like."""
    name = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(name)
    os.environ[name] = next(n for _, n in socket.if_nameindex() if n in ("lo", "lo0"))
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
