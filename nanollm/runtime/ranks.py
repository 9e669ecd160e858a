"""Where the other ranks come from: started here with torch.multiprocessing, or by torchrun."""

import contextlib
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from nanollm.config import EngineConfig, ModelConfig
from nanollm.distributed.partition import HeadPartition
from nanollm.distributed.tp_group import TPGroup, world_is_taken
from nanollm.models.source import ModelSource
from nanollm.runtime.channel import Kind, Link, LinkClosedError, Listener, connect

_IN_WORKER = "NANOLLM_WORKER"  # set in the environment of the processes we start
_SHARE_GPU = "NANOLLM_RANKS_SHARE_GPUS"  # tests only: more ranks than GPUs, over gloo; right but slow
_NO_MAIN_GUARD = 97  # exit code of a worker that was about to start an engine of its own
_JOIN_TIMEOUT = 120.0


class EngineDeadError(RuntimeError):
    """The engine can't go on: a rank failed, or it was closed. Make a new LLM."""


class RankFailedError(Exception):
    """Another rank has failed or is gone; Ranks.blame() tells which one began."""


@dataclass
class Ranks:
    """The tensor-parallel group of this process, and on rank 0 the control links to the other ranks.

    links: to ranks 1 …, in order; empty on followers. processes: those started here, which must be ended here.
    """

    tp: TPGroup
    device: torch.device
    links: list[Link] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)
    num_threads: int | None = None  # torch's setting before, to be restored
    closed: bool = False
    _inbox: dict[int, deque[tuple[Kind, bytearray]]] = field(default_factory=lambda: defaultdict(deque))
    _reports: dict[int, tuple[float, str]] = field(default_factory=dict)
    _gone: set[int] = field(default_factory=set)

    def send(self, kind: Kind, payload: "np.ndarray | bytes" = b"", timeout: float = 60.0) -> None:
        """The same message to every other rank."""
        for rank, link in enumerate(self.links, 1):
            try:
                link.send(kind, payload, timeout)
            except LinkClosedError as error:
                raise RankFailedError(f"rank {rank} is gone") from error

    def receive(self, rank: int, kind: Kind, timeout: float) -> bytearray:
        """The payload of the next message of a rank, which must be of `kind`. Raises like check, or TimeoutError."""
        deadline = time.monotonic() + timeout
        while not self._inbox[rank]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} sent no {kind.name} in {timeout:g} s")
            select.select([self.links[rank - 1]], [], [], 0.05)
            self.check()
        received, payload = self._inbox[rank].popleft()
        if received is not kind:
            raise RankFailedError(f"rank {rank} sent {received.name} where {kind.name} was due")
        return payload

    def check(self) -> None:
        """Take in what other ranks have sent. Raises RankFailedError if one of them has failed or is gone."""
        for rank, link in enumerate(self.links, 1):
            try:
                while rank not in self._gone and (message := link.recv(0)) is not None:
                    kind, payload = message
                    if kind is Kind.ERROR:
                        at, text = payload.split(b"\n", 1)
                        self._reports[rank] = (float(at), text.decode(errors="replace"))
                    else:
                        self._inbox[rank].append(message)
            except LinkClosedError:
                self._gone.add(rank)
        if self._gone or self._reports:
            raise RankFailedError("another rank failed")

    def blame(self, seconds: float) -> str | None:
        """Which rank failed first and why, as far as is known within `seconds`; None if no other rank failed.

        One rank's failure makes the others fail in their next collective, so a rank that went without a word comes
        before those that report, and of reports the earliest counts.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and len(self._gone) < len(self.links):
            with contextlib.suppress(RankFailedError):
                self.check()
            time.sleep(0.01)
            if self._gone and time.monotonic() > deadline - 0.75 * seconds:
                break
        for rank in sorted(self._gone - set(self._reports)):
            if not self.processes:
                return f"rank {rank} is gone without a word"
            self.processes[rank - 1].join(1.0)
            return _exit_message(rank, self.processes[rank - 1].exitcode)
        if not self._reports:
            return None
        rank = min(self._reports, key=lambda r: self._reports[r][0])
        return f"rank {rank} failed:\n{self._reports[rank][1]}"

    def close(self) -> None:
        """End the processes that were started here and leave the group; twice is fine."""
        if self.closed:
            return
        self.closed = True
        healthy = not self._gone and not self._reports
        try:
            self.send(Kind.CLOSE, timeout=1.0)
        except (RankFailedError, TimeoutError):
            healthy = False
        deadline = time.monotonic() + (3.0 if healthy else 0.2)
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0.01))
        for process in self.processes:
            if process.exitcode is None:
                process.kill()  # also ends a stopped process, which would never see a polite signal
                process.join(5.0)
            process.close()
        for link in self.links:
            link.close()
        self.links.clear()
        self.processes.clear()
        self.tp.leave(abort=not healthy)
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)


def _exit_message(rank: int, exitcode: int | None) -> str:
    if exitcode == _NO_MAIN_GUARD:
        return (
            "the script starts an engine when it is imported, which its worker processes do: put the code that calls "
            'LLM(...) under `if __name__ == "__main__":`'
        )
    if exitcode is not None and exitcode < 0:
        return f"rank {rank} was ended by {signal.Signals(-exitcode).name}"
    return f"rank {rank} ended with exit code {exitcode}; its own output above may say why"


def torchrun_world() -> tuple[int, int] | None:
    """(rank, world size) if a launcher such as torchrun started this process as one of several."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return (int(os.environ["RANK"]), world_size) if world_size > 1 and "RANK" in os.environ else None


def check_ranks(config: EngineConfig, model_config: ModelConfig, device: torch.device) -> None:
    """ValueError, before any process starts, if this many ranks can't share this model here."""
    size = config.tensor_parallel_size
    if os.environ.get(_IN_WORKER):
        os._exit(_NO_MAIN_GUARD)  # a process we started imports the user's script, and that starts an engine
    HeadPartition(model_config.num_heads, model_config.num_kv_heads, size, 0)
    world = torchrun_world()
    if world is not None and world[1] != size:
        raise ValueError(f"torchrun started {world[1]} ranks, but tensor_parallel_size is {size}: make them equal")
    if size > 1 and device.type == "cuda" and not os.environ.get(_SHARE_GPU):
        local_size = int(os.environ["LOCAL_WORLD_SIZE"]) if world is not None else size
        if local_size > torch.cuda.device_count():
            raise ValueError(
                f"tensor_parallel_size {size} needs {local_size} GPUs here, but there are {torch.cuda.device_count()}"
            )


def start_ranks(config: EngineConfig, source: ModelSource, device: torch.device) -> Ranks:
    """Rank 0: make the group of config.tensor_parallel_size ranks.

    One rank is this process alone: no process group, no port, no NCCL.
    """
    if config.tensor_parallel_size == 1:
        return Ranks(TPGroup(), torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device)
    if torchrun_world() is not None:
        return _join_torchrun(config, device)
    if world_is_taken():
        raise ValueError(
            "this process already has a torch process group, an engine's with tensor_parallel_size > 1 or one of your "
            "own: close it first"
        )
    return _start_processes(config, source, device)


def _rank_device(device: torch.device, local_rank: int) -> tuple[torch.device, str]:
    """This rank's device, made current, and the backend of its collectives."""
    if device.type == "cpu":
        return device, "gloo"
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device, "gloo" if os.environ.get(_SHARE_GPU) else "nccl"


def _share_cores(size: int) -> int:
    """Give each of `size` ranks on this host its share of the cores; returns the number of threads before."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before // size, 1))
    return before


def _start_processes(config: EngineConfig, source: ModelSource, device: torch.device) -> Ranks:
    size = config.tensor_parallel_size
    device, backend = _rank_device(device, 0)
    context = mp.get_context("spawn")
    ranks = Ranks(TPGroup(0, size), device)
    with tempfile.TemporaryDirectory(prefix="nanollm-") as directory:
        store = str(Path(directory) / "store")
        os.environ[_IN_WORKER] = "1"
        try:
            for rank in range(1, size):
                ours, theirs = socket.socketpair()
                process = context.Process(
                    target=_worker, args=(rank, config, source, theirs, store), name=f"nanollm-rank{rank}", daemon=True
                )
                process.start()
                theirs.close()
                ranks.processes.append(process)
                ranks.links.append(Link(ours))
            del os.environ[_IN_WORKER]
            if device.type == "cpu":
                ranks.num_threads = _share_cores(size)
            for rank in range(1, size):  # all there, before anybody waits for another inside a collective
                ranks.receive(rank, Kind.READY, _JOIN_TIMEOUT)
            ranks.send(Kind.START)
            ranks.tp = TPGroup.join(0, size, device, backend, config.step_timeout, store)
            for rank in range(1, size):  # only then may the store go
                ranks.receive(rank, Kind.READY, _JOIN_TIMEOUT)
        except BaseException as error:
            os.environ.pop(_IN_WORKER, None)
            message = ranks.blame(1.0) if isinstance(error, Exception) else None
            ranks.close()
            if message is not None:
                raise EngineDeadError(message) from error
            raise
    return ranks


def _worker(rank: int, config: EngineConfig, source: ModelSource, connection: socket.socket, store: str) -> None:
    """The main function of ranks 1 … that we started."""
    from nanollm.runtime.executor import Follower

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 decides what it means
    link = Link(connection)
    link.exit_on_hangup()
    code = 0
    try:
        device, backend = _rank_device(torch.device("cuda" if config.device == "cuda" else "cpu"), rank)
        if device.type == "cpu":
            _share_cores(config.tensor_parallel_size)
        link.send(Kind.READY)
        link.recv(_JOIN_TIMEOUT)
        tp = TPGroup.join(rank, config.tensor_parallel_size, device, backend, config.step_timeout, store)
        link.send(Kind.READY)
        Follower(config, source, Ranks(tp, device), link).serve()
    except BaseException:
        report(link)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no teardown: peers may be gone, and the driver frees what the GPU holds


def report(link: Link) -> None:
    """Tell rank 0 of the exception being handled, and when it was."""
    with contextlib.suppress(LinkClosedError, TimeoutError):
        link.send(Kind.ERROR, f"{time.time()}\n{traceback.format_exc()}".encode(), timeout=1.0)


def _join_torchrun(config: EngineConfig, device: torch.device) -> Ranks:
    """Rank 0 under torchrun: join the group, then let the followers connect."""
    ranks, listener = _torchrun_group(config, device), Listener(_torchrun_address())
    try:
        words = np.frombuffer(listener.port.to_bytes(4, "little") + listener.token, np.int32).copy()
        ranks.tp.broadcast(torch.from_numpy(words).to(ranks.device))
        links = listener.accept(config.tensor_parallel_size - 1, _JOIN_TIMEOUT)
    except BaseException:
        ranks.close()
        raise
    finally:
        listener.close()
    ranks.links = [links[rank] for rank in sorted(links)]
    return ranks


def follow_torchrun(config: EngineConfig, device: torch.device) -> tuple[Ranks, Link]:
    """A rank above 0 under torchrun: join the group and connect to rank 0."""
    ranks = _torchrun_group(config, device)
    words = ranks.tp.broadcast(torch.zeros(9, dtype=torch.int32, device=ranks.device)).cpu().numpy()
    data = words.tobytes()
    port, token = int.from_bytes(data[:4], "little"), data[4:]
    return ranks, connect(_torchrun_address(), port, token, ranks.tp.rank, _JOIN_TIMEOUT)


def _torchrun_group(config: EngineConfig, device: torch.device) -> Ranks:
    world = torchrun_world()
    assert world is not None
    rank, world_size = world
    device, backend = _rank_device(device, int(os.environ.get("LOCAL_RANK", rank)))
    num_threads = _share_cores(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if device.type == "cpu" else None
    tp = TPGroup.join(rank, world_size, device, backend, config.step_timeout)
    return Ranks(tp, device, num_threads=num_threads)


def _torchrun_address() -> str:
    """Where rank 0 listens: the loopback interface if all ranks are on this host, else the master address."""
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return "127.0.0.1" if one_host else os.environ["MASTER_ADDR"]
