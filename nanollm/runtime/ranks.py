"""Where the other ranks come from: started here with torch.multiprocessing, or by torchrun."""

import concurrent.futures
import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from nanollm.config import EngineConfig, ModelConfig
from nanollm.distributed.partition import HeadPartition, mlp_split
from nanollm.distributed.tp_group import TPGroup, world_is_taken
from nanollm.models.source import ModelSource
from nanollm.runtime.channel import EngineDeadError, Kind, Link, LinkClosedError, Listener, as_unicode, connect

_WORKER = "nanollm-rank"  # the processes we start are named so, and know themselves by it
_SHARE_GPU = "NANOLLM_RANKS_SHARE_GPUS"  # tests only: more ranks than GPUs, over gloo; right but slow
_NO_MAIN_GUARD = 97  # exit code of a worker that was about to start an engine of its own
_WAITED_IN_VAIN = ("TimeoutError", "RuntimeError: Wait timeout")  # how the last line of a report begins
_JOIN_TIMEOUT = 600.0  # seconds; importing PyTorch from a slow network disk takes minutes


class RankFailedError(Exception):
    """Another rank has failed or is gone; Ranks.blame() tells which one began."""


@dataclass
class Ranks:
    """The tensor-parallel group of this process, and on rank 0 the control links to the other ranks.

    links: to ranks 1 …, in order; empty on followers. processes: those started here, which must be ended here.
    failure: why these ranks can't go on, if so; then closing waits for none of them.
    store: a file in memory, through which those started here met; NCCL's threads wait minutes for one that is gone.
    """

    tp: TPGroup
    device: torch.device
    links: list[Link] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)
    num_threads: int | None = None  # torch's setting before, to be restored
    failure: str = ""
    store: int | None = None
    closed: bool = False
    _inbox: dict[int, deque[tuple[Kind, bytearray]]] = field(default_factory=lambda: defaultdict(deque))
    _reports: dict[int, tuple[float, str]] = field(default_factory=dict)
    _gone: set[int] = field(default_factory=set)
    _owner: int = field(default_factory=os.getpid)

    def send(self, kind: Kind, payload: "np.ndarray | bytes | list[np.ndarray]" = b"", timeout: float = 60.0) -> None:
        """A message to every other rank: the same, or of a list to each its own."""
        for rank, link in enumerate(self.links, 1):
            try:
                link.send(kind, payload[rank - 1] if isinstance(payload, list) else payload, timeout)
            except LinkClosedError as error:
                raise RankFailedError(f"rank {rank} is gone: {error}") from error

    def receive(self, rank: int, kind: Kind, timeout: float) -> bytearray:
        """The payload of the next message of a rank, which must be of `kind`. Raises like check, or TimeoutError."""
        deadline = time.monotonic() + timeout
        while not self._inbox[rank]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} sent no {kind.name} in {timeout:g} s")
            self.links[rank - 1].wait(0.05)
            self.check()
        received, payload = self._inbox[rank].popleft()
        if received is not kind:
            raise RankFailedError(
                f"rank {rank} sent {received.name} where {kind.name} was due: do all ranks make the same calls?"
            )
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

    def blame(self, error: Exception, seconds: float) -> str:
        """Which rank failed first and why, as far as is known within `seconds`. error: how it showed on this rank.

        One rank's failure makes the others fail in their next collective, so a rank that went without a word comes
        before those that report, and of reports the earliest counts. If that one only waited in vain, it was for those
        that are silent.
        """
        start = time.monotonic()
        own = (time.time(), "".join(traceback.format_exception(error)))
        while (passed := time.monotonic() - start) < seconds and len(self._gone) < len(self.links):
            if (self._gone or self._reports) and passed > seconds / 4:
                break
            with contextlib.suppress(RankFailedError):
                self.check()
            time.sleep(0.01)
        if lost := self._gone - set(self._reports):
            return self._last_words(min(lost))
        only_heard_of_it = isinstance(error, RankFailedError) and self._reports
        reports = self._reports if only_heard_of_it else {0: own} | self._reports
        first = min(reports, key=lambda rank: reports[rank][0])
        text = reports[first][1]
        silent = [str(rank) for rank in range(1, len(self.links) + 1) if rank not in reports]
        if silent and text.rstrip().rpartition("\n")[2].startswith(_WAITED_IN_VAIN):
            return f"rank {' or '.join(silent)} is stopped or hangs; rank {first} waited for it in vain:\n{text}"
        return f"rank {first} failed:\n{text}"

    def _last_words(self, rank: int) -> str:
        """What is known of a rank that went without a word."""
        if not self.processes:
            return f"rank {rank} is gone without a word"
        process = self.processes[rank - 1]
        process.join(1.0)
        if process.exitcode == _NO_MAIN_GUARD:
            return (
                "the script starts an engine when it is imported, which its worker processes do: put the code that "
                'calls LLM(...) under `if __name__ == "__main__":`'
            )
        if process.exitcode is not None and process.exitcode < 0:
            name = signal.Signals(-process.exitcode).name
            return f"rank {rank} was ended by {name}" + " (out of memory?)" * (name == "SIGKILL")
        return f"rank {rank} ended with exit code {process.exitcode}; its own output above may say why"

    def close(self) -> None:
        """End the processes that were started here and leave the group; twice is fine."""
        if self.closed or os.getpid() != self._owner:  # a fork of the process that owns them has nothing to end
            return
        self.closed = True
        healthy = not (self.failure or self._gone or self._reports)
        try:
            if healthy or not self.processes:
                goodbye = (Kind.CLOSE, b"") if healthy else (Kind.ERROR, as_unicode(self.failure).encode())
                for link in self.links:
                    with contextlib.suppress(LinkClosedError, TimeoutError):
                        link.send(*goodbye, timeout=1.0)
            deadline = time.monotonic() + (3.0 if healthy else 0.0)
            for process in self.processes:
                process.join(max(deadline - time.monotonic(), 0.0))
        finally:  # also when Ctrl-C comes again
            for process in self.processes:
                process.kill()  # nothing to one that has ended; ends a stopped one, which would see no polite signal
            for process in self.processes:
                process.join(5.0)
            for link in self.links:
                link.close()
            self.processes.clear()
            self.links.clear()
            if healthy:
                self.tp.leave()
                if self.store is not None:
                    os.close(self.store)
            else:  # then something may still look into the store, by its number
                self._leave_without_waiting()
            if self.num_threads is not None:
                torch.set_num_threads(self.num_threads)

    def _leave_without_waiting(self) -> None:
        """gloo waits for collectives that were given up, and under torchrun their ranks may be stopped: not here."""
        leaving = threading.Thread(target=self.tp.leave, kwargs={"abort": True}, daemon=True)
        try:
            leaving.start()
        except RuntimeError:  # at interpreter exit there are no more threads
            self.tp.leave(abort=True)
        else:
            leaving.join(2.0)


def torchrun_world() -> tuple[int, int] | None:
    """(rank, world size) if a launcher such as torchrun started this process as one of several."""
    rank, world_size = os.environ.get("RANK"), int(os.environ.get("WORLD_SIZE") or 1)
    return (int(rank), world_size) if world_size > 1 and rank else None


def check_ranks(config: EngineConfig, model_config: ModelConfig, device: torch.device) -> None:
    """ValueError, before any process starts, if this many ranks can't share this model here."""
    size = config.tensor_parallel_size
    if mp.current_process().name.startswith(_WORKER):
        os._exit(_NO_MAIN_GUARD)  # a process we started imports the user's script, and that starts an engine
    HeadPartition(model_config.num_heads, model_config.num_kv_heads, size, 0)
    moe = model_config.moe
    if moe is None or moe.dense_layers:
        mlp_split(model_config.intermediate_size, size)
    if moe is not None:
        mlp_split(moe.expert_size, size, "moe_intermediate_size")
    world = torchrun_world()
    if world is not None and world[1] != size:
        raise ValueError(f"torchrun started {world[1]} ranks, but tensor_parallel_size is {size}: make them equal")
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if size > 1 and world is None and main.__spec__ is None and script is not None and not os.path.exists(script):
        raise ValueError(f"the {size - 1} other ranks import the script, but {script} is no file: save it in one")
    if size > 1 and device.type == "cuda" and not os.environ.get(_SHARE_GPU):
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size)) if world is not None else size
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


def _join(
    rank: int, device: torch.device, backend: str, config: EngineConfig, store_path: str | None = None
) -> TPGroup:
    size, peer_memory = config.tensor_parallel_size, not config.disable_custom_all_reduce
    return TPGroup.join(rank, size, device, backend, config.step_timeout, store_path, peer_memory)


def _share_cores(size: int) -> int:
    """Give each of `size` ranks on this host its share of the cores; returns the number of threads before."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before // size, 1))
    return before


def _start_processes(config: EngineConfig, source: ModelSource, device: torch.device) -> Ranks:
    size = config.tensor_parallel_size
    device, backend = _rank_device(device, 0)
    ranks = Ranks(TPGroup(0, size), device)
    try:
        for rank in range(1, size):
            _start_worker(ranks, rank, config, source)
        if device.type == "cpu":
            ranks.num_threads = _share_cores(size)
        for rank in range(1, size):  # all there, before anybody waits for another where nothing else is heard
            ranks.receive(rank, Kind.READY, _JOIN_TIMEOUT)
        ranks.store = os.memfd_create("nanollm-store")
        store_path = f"/proc/{os.getpid()}/fd/{ranks.store}"
        ranks.send(Kind.START, store_path.encode())
        ranks.tp = _join_while_checking(ranks, backend, config, store_path)
    except BaseException as error:
        ranks.failure = ranks.blame(error, 1.0) if isinstance(error, Exception) else "interrupted"
        ranks.close()
        if isinstance(error, Exception):
            raise EngineDeadError(ranks.failure) from error
        raise
    return ranks


def _start_worker(ranks: Ranks, rank: int, config: EngineConfig, source: ModelSource) -> None:
    ours, theirs = socket.socketpair()
    process = mp.get_context("spawn").Process(
        target=_worker, args=(rank, config, source, ranks.device.type, theirs), name=f"{_WORKER}{rank}", daemon=True
    )
    resource_tracker.ensure_running()  # start() would do so, and unblock SIGINT then
    # It inherits that SIGINT is blocked: Ctrl-C reaches the whole group, and rank 0 decides what it means.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _ctrl_c_waits():
            process.start()
            ranks.processes.append(process)
            ranks.links.append(Link(ours))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Ctrl-C is heard at the end only. Blocked in one thread, it may still come to another."""
    caught: list[Any] = []
    handler = signal.getsignal(signal.SIGINT)
    waits = threading.current_thread() is threading.main_thread() and callable(handler)
    if waits:
        signal.signal(signal.SIGINT, lambda *given: caught.append(given))
    try:
        yield
    finally:
        if waits:
            signal.signal(signal.SIGINT, handler)
    if caught and callable(handler):
        handler(*caught[0])


def _join_while_checking(ranks: Ranks, backend: str, config: EngineConfig, store_path: str) -> TPGroup:
    """TPGroup.join in a thread of its own, since it hears neither Ctrl-C nor that another rank has failed."""
    joined: concurrent.futures.Future[TPGroup] = concurrent.futures.Future()

    def join() -> None:
        try:
            tp = _join(0, ranks.device, backend, config, store_path)
        except BaseException as error:
            if not joined.cancelled():
                joined.set_exception(error)
            return
        if joined.cancelled():
            tp.leave(abort=True)
        else:
            joined.set_result(tp)

    threading.Thread(target=join, daemon=True, name="nanollm-join").start()
    try:
        while not concurrent.futures.wait([joined], timeout=0.05).done:
            ranks.check()
    except BaseException:
        joined.cancel()
        raise
    tp = joined.result()
    tp.check = ranks.check
    for link in ranks.links:
        link.on_hangup(tp.abort_waits)  # this thread may be waiting for room in the GPU's queue
    return tp


def _worker(rank: int, config: EngineConfig, source: ModelSource, device_type: str, connection: socket.socket) -> None:
    """The main function of ranks 1 … that we started."""
    from nanollm.runtime.executor import Follower

    link = Link(connection)
    link.on_hangup(lambda: os._exit(1))
    code = 1
    try:
        with failures_told(link):
            device, backend = _rank_device(torch.device(device_type), rank)
            if device.type == "cpu":
                _share_cores(config.tensor_parallel_size)
            link.send(Kind.READY)
            message = link.recv()
            assert message is not None and message[0] is Kind.START
            tp = _join(rank, device, backend, config, message[1].decode())
        Follower(config, source, Ranks(tp, device), link).serve()
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no teardown: peers may be gone, and the driver frees what the GPU holds


@contextlib.contextmanager
def failures_told(link: Link) -> Iterator[None]:
    """Tell rank 0 of an exception inside, and when it was."""
    try:
        yield
    except (LinkClosedError, EngineDeadError):  # nobody to tell, or nothing new
        raise
    except BaseException:
        with contextlib.suppress(LinkClosedError, TimeoutError):
            link.send(Kind.ERROR, f"{time.time()}\n{as_unicode(traceback.format_exc())}".encode(), timeout=1.0)
        raise


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
    ranks.tp.check = ranks.check
    for link in ranks.links:
        link.on_hangup(ranks.tp.abort_waits)
    return ranks


def follow_torchrun(config: EngineConfig, device: torch.device) -> tuple[Ranks, Link]:
    """A rank above 0 under torchrun: join the group and connect to rank 0."""
    ranks = _torchrun_group(config, device)
    words = ranks.tp.broadcast(torch.zeros(9, dtype=torch.int32, device=ranks.device)).cpu().numpy()
    data = words.tobytes()
    port, token = int.from_bytes(data[:4], "little"), data[4:]
    link = connect(_torchrun_address(), port, token, ranks.tp.rank, _JOIN_TIMEOUT)
    link.on_hangup(ranks.tp.abort_waits)
    return ranks, link


def _torchrun_group(config: EngineConfig, device: torch.device) -> Ranks:
    world = torchrun_world()
    assert world is not None
    rank, _ = world
    device, backend = _rank_device(device, int(os.environ.get("LOCAL_RANK", rank)))
    num_threads = _share_cores(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if device.type == "cpu" else None
    return Ranks(_join(rank, device, backend, config), device, num_threads=num_threads)


def _torchrun_address() -> str:
    """Where rank 0 listens: the loopback interface if all ranks are on this host, else the master address."""
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return "127.0.0.1" if one_host else os.environ["MASTER_ADDR"]
