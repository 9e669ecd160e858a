"""PeerCollectives: all-reduce through the peers' memory, where GPUs can reach each other; set up and chosen here.

The memory is torch's symmetric memory, with plain loads and stores through NVLink or PCIe; never NVLink's multicast.
"""

import hashlib
import itertools
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanollm.kernels.all_reduce import BUFFERS, PeerMemory, empty_buffers, peer_all_reduce, peer_best_of_ranks
from nanollm.kernels.backend import HAS_TRITON

_MIB = 2**20
_BUFFER_BYTES = 32 * _MIB  # of each of the three; larger all-reduces are done in pieces
_SHARE_DEVICES = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_names = itertools.count()


@dataclass(frozen=True)
class Limits:
    """The most bytes of one rank's tensor that are reduced in one shot, and in two; NCCL does what is larger."""

    one_shot: int
    two_shot: int

    @staticmethod
    def of(num_ranks: int) -> "Limits":
        """As bench/all_reduce.py measured on two, three and four H200, up to 32 MiB; for more ranks, guesses.

        At 32 MiB on four NCCL is 3 % faster, in a graph. Prompts run without one, and there four GPUs with NCCL above
        8 MiB took up to half as long again as was predicted.
        """
        return next((limits for most, limits in _LIMITS.items() if num_ranks <= most), _LIMITS[8])


# By the number of ranks: the first that is not below it.
_LIMITS = {
    2: Limits(2 * _MIB, 256 * _MIB),
    4: Limits(_MIB // 2, 256 * _MIB),
    8: Limits(_MIB // 4, 8 * _MIB),
}


class PeerCollectives:
    """What ranks do through each other's memory, inside CUDA graphs too. Every rank gets the same bits.

    peers: all ranks' buffers as this rank's kernels see them. abort_word: int32 [1], pinned; not zero ends all waits.
    kept: what must live as long as the peers' memory is mapped here.
    limits: which way for which size.
    """

    def __init__(self, peers: PeerMemory, abort_word: Tensor, kept: Any, limits: Limits) -> None:
        self._peers, self._abort_word, self._kept = peers, abort_word, kept
        self.limits = limits

    def takes(self, x_TD: Tensor) -> bool:
        """Whether all_reduce is the best way for this tensor: its size decides, which is the same on all ranks."""
        return x_TD.dim() == 2 and x_TD.nbytes <= self.limits.two_shot

    def all_reduce(
        self, x_TD: Tensor, residual_TD: Tensor | None = None, weight_D: Tensor | None = None, eps: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(total) * weight, total) for total = residual + the ranks' sum of x; without weight, total twice.

        With a residual, x may be parts [Z, T, D] of it.
        """
        # Ranks may have different numbers of parts, and must all go the same way.
        nbytes = (x_TD if residual_TD is None else residual_TD).nbytes
        two_shot = nbytes > self.limits.one_shot
        return peer_all_reduce(x_TD, residual_TD, weight_D, eps, self._peers, two_shot=two_shot)

    def best_of_ranks(self, value_S: Tensor, id_S: Tensor) -> Tensor:
        """The id, int64 [S], of the rank whose value, rounded to float32, is largest; of equals the lowest rank's."""
        return peer_best_of_ranks(value_S.float(), id_S, self._peers)

    def abort(self) -> None:
        """Let kernels that wait for a peer give up, now and from now on. Any thread may call it."""
        self._abort_word.fill_(1)

    def close(self) -> None:
        """Free the memory; kernels that use it must have ended or been aborted."""
        torch.cuda.synchronize(self._peers.addresses.device)
        self._kept = None


def connect_peers(
    rank: int,
    size: int,
    device: torch.device,
    group: dist.ProcessGroup,
    wanted: bool,
    all_gather: Callable[[Tensor], Tensor],
) -> PeerCollectives | str:
    """Map every rank's memory into every other's; all ranks call this. Where that can't be, a text says why not.

    all_gather: stacks an int64 tensor of every rank. Ranks agree after each step, so none waits for one that gave up.
    """
    is_gloo = dist.get_backend(group) == "gloo"

    def everyones(*values: int) -> list[list[int]]:
        return all_gather(torch.tensor(values, dtype=torch.int64, device="cpu" if is_gloo else device)).tolist()

    why = _obstacle(wanted)
    hosts, uuids = zip(*everyones(_hash(_host()), _hash(_uuid(device))), strict=True)
    why = why or _unreachable(device, rank, hosts, uuids)
    if any(failed for (failed,) in everyones(bool(why))):
        return why or "another rank can't reach its peers"
    memory: Tensor | None = None
    found: PeerCollectives | None = None
    try:
        memory = _allocate(device)
    except _NOT_HERE as error:
        why = _reason(error)
    if any(failed for (failed,) in everyones(memory is None)):
        return why or "another rank has no memory to share"
    assert memory is not None
    try:
        found = _map_memory(memory, rank, size, group, share=uuids.count(uuids[rank]))
    except _NOT_HERE as error:
        why = _reason(error)
    if any(failed for (failed,) in everyones(found is None)):
        return why or "another rank could not map its peers' memory"
    assert found is not None
    if is_gloo:  # which CUDA graphs can't record, so nothing is left to it
        found.limits = Limits(found.limits.one_shot, 2**62)
    return found


def _obstacle(wanted: bool) -> str:
    if not wanted:
        return "disable_custom_all_reduce is set"
    if not HAS_TRITON:
        return "Triton is not installed"
    if torch.version.cuda is None or not hasattr(torch._C, "_distributed_c10d"):
        return "this PyTorch has no symmetric memory"
    if not hasattr(torch._C._distributed_c10d, "_SymmetricMemory"):
        return f"PyTorch {torch.__version__} has no symmetric memory"
    return ""


def _unreachable(device: torch.device, rank: int, hosts: tuple[int, ...], uuids: tuple[int, ...]) -> str:
    """Why this rank's GPU can't write to the others', if so."""
    if len(set(hosts)) > 1:
        return "the ranks are on several hosts"
    if len(set(uuids)) < len(uuids) and os.environ.get(_SHARE_DEVICES) != "1":
        return "ranks share a GPU"
    visible = {_hash(_uuid(torch.device("cuda", i))): i for i in range(torch.cuda.device_count())}
    for other, uuid in enumerate(uuids):
        if uuid not in visible:
            return f"rank {rank} does not see the GPU of rank {other}: give all ranks the same CUDA_VISIBLE_DEVICES"
        index = visible[uuid]
        if index != device.index and not torch.cuda.can_device_access_peer(device, torch.device("cuda", index)):
            return f"the GPU of rank {rank} has no peer access to that of rank {other}"
    return ""


_NOT_HERE = (RuntimeError, AttributeError, TypeError)  # also of a PyTorch that does it in another way


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _allocate(device: torch.device) -> Tensor:
    # A GPU's multicast objects outlive a crash badly, and nothing here needs them: torch must not make one.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    symmetric = torch._C._distributed_c10d._SymmetricMemory
    memory: Tensor = symmetric.empty_strided_p2p((BUFFERS * _BUFFER_BYTES,), (1,), torch.uint8, device)
    empty_buffers(memory)
    torch.cuda.synchronize(device)  # before any peer can write
    return memory


def _map_memory(memory: Tensor, rank: int, size: int, group: dist.ProcessGroup, share: int) -> PeerCollectives:
    symmetric = torch._C._distributed_c10d._SymmetricMemory
    store = _OwnNumbers(dist.distributed_c10d._get_process_group_store(group))
    name, meeting = f"nanollm-peers{next(_names)}", dist.ProcessGroup(store, rank, size)
    # Where PyTorch 2.11 finds the store, and where 2.10 does.
    torch._C._distributed_c10d._register_process_group(name, meeting)  # type: ignore[arg-type]
    symmetric.set_group_info(name, rank, size, store)
    handle = symmetric.rendezvous(memory, name)
    abort_word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    peers = PeerMemory.of(rank, handle.buffer_ptrs, abort_word, memory.nbytes, memory.device, share)
    return PeerCollectives(peers, abort_word, (memory, handle, store, meeting), Limits.of(size))


class _OwnNumbers(dist.Store):
    """A store for torch's exchange of handles, whose keys have a number: prefix/number or prefix/number/…

    torch counts the exchanges of a process, not of a group, so that a process with its second engine and one with its
    first would wait for different keys forever. Here the first number seen is 0, the next one 1.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store, self._numbers = store, dict[str, int]()

    def _own(self, key: str) -> str:
        def renumber(found: re.Match[str]) -> str:
            return f"/{self._numbers.setdefault(found[1], len(self._numbers))}"

        return "peers/" + re.sub(r"/(\d+)(?=/|$)", renumber, key, count=1)

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._store.set(self._own(key), value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return self._store.get(self._own(key))

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._own(key), value)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:  # type: ignore[override]
        self._store.wait([self._own(key) for key in keys], *timeout)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text() if boot.exists() else "")


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)  # type: ignore[attr-defined]
