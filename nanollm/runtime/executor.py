"""Executor: runs rank 0's plans on every rank, and ends all ranks when one fails. Follower: the other ranks' side."""

import contextlib
import hashlib
import importlib
import json
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from nanollm.config import EngineConfig
from nanollm.models.source import ModelSource
from nanollm.runtime.channel import Kind, Link, LinkClosedError
from nanollm.runtime.model_runner import ModelRunner, PendingResult, WaitingStep
from nanollm.runtime.ranks import EngineDeadError, Ranks, failures_told, start_ranks
from nanollm.runtime.step_plan import SamplePlan, StepPlan, StepResult

_LOAD_TIMEOUT = 3600.0  # seconds; a large model from a slow disk
_SPIN_SECONDS = 0.02  # how long a rank on a GPU looks for the next plan before it sleeps; a few steps of decoding
_BLAME_SECONDS = 2.0  # how long to look for the rank that failed first
_STEPS = 2**31  # step numbers start again there: they are int32
_CLOSED = "this engine was closed: make a new LLM"


class Executor:
    """Rank 0's view of all ranks. submit() launches a step, collect() waits for the oldest; two may be in flight.
    A step that waits for a SamplePlan gets it by sample(), before anything else is submitted.

    At tensor_parallel_size 1 there are no other ranks, and a step that raises leaves the executor usable. With more,
    any error on any rank ends all of them and is raised as EngineDeadError, since ranks may be out of step.
    """

    def __init__(self, config: EngineConfig, source: ModelSource, device: torch.device) -> None:
        self._pending: deque[PendingResult] = deque()
        self._waiting: WaitingStep | None = None  # the newest, if it was not sampled yet
        self._step_timeout = config.step_timeout
        self._runner: ModelRunner | None = None
        self._dead = ""
        self._next_step = 0
        self.ranks = start_ranks(config, source, device)
        # Also when this object is dropped without close(), and at interpreter exit.
        self._finalizer = weakref.finalize(self, _close, self.ranks)
        with self._ends_all_ranks():
            runner = ModelRunner(config, source, self.ranks.tp, self.ranks.device, self.ranks.check)
            self._agree(config, runner)
        self._runner = runner
        self.num_kv_blocks = runner.num_kv_blocks
        self.max_model_len = runner.max_model_len

    @property
    def runner(self) -> ModelRunner:
        """This rank's; EngineDeadError if there is none any more."""
        if self._runner is None:
            raise EngineDeadError(self._dead)
        return self._runner

    @property
    def has_followers(self) -> bool:
        """Whether the other ranks are a launcher's, with callers of their own."""
        return bool(self.ranks.links) and not self.ranks.processes

    def tells_followers(self) -> contextlib.AbstractContextManager[None]:
        """Under torchrun, an error inside ends all ranks, which would wait for outputs in vain."""
        return self._ends_all_ranks() if self.has_followers else contextlib.nullcontext()

    def submit(self, plan: StepPlan) -> None:
        """Launch a step on every rank; returns before the devices have run it."""
        runner = self.runner
        with self._ends_all_ranks():
            if self.ranks.links:
                plan.step = self._next_step  # of those sent: a plan that Ctrl-C kept here leaves no gap
                self._next_step = (self._next_step + 1) % _STEPS
                self.ranks.send(Kind.PLAN, plan.pack(), self._step_timeout)
            launched = runner.launch(plan)
            if isinstance(launched, WaitingStep):
                self._waiting = launched
            else:
                self._pending.append(launched)

    def logits(self) -> torch.Tensor:
        """Of the step that waits to be sampled: float32 [len(plan.processed), V], on the CPU."""
        assert self._waiting is not None
        with self._ends_all_ranks():
            return self._waiting.wait(self._step_timeout, self.ranks.check)

    def sample(self, plan: SamplePlan) -> None:
        """Launch the sampling of the step that waits for this plan, on every rank."""
        runner, step = self.runner, self._waiting
        assert step is not None
        with self._ends_all_ranks():
            shares = [runner.share(plan, step.plan, rank).pack() for rank in range(1, self.ranks.tp.size)]
            self.ranks.send(Kind.SAMPLE, shares, self._step_timeout)
            self._pending.append(runner.sample(step, runner.share(plan, step.plan, 0)))
            self._waiting = None

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step; TimeoutError if it takes longer than step_timeout."""
        with self._ends_all_ranks():
            return self._pending.popleft().wait(self._step_timeout, self.ranks.check)

    def discard(self) -> None:
        """Wait for all submitted steps and forget what they bring."""
        self._waiting = None
        while self._pending:
            with contextlib.suppress(Exception):  # a failed rank is remembered, and the next submit says so
                self.collect()

    def agree_on_call(self, digest: bytes, next_request_id: int) -> bool:
        """Under torchrun: whether every rank was called with the same inputs; digest is of this rank's. Else True.

        next_request_id goes to the other ranks, so that all number requests alike.
        """
        if not self.has_followers:
            return True
        with self._ends_all_ranks():
            theirs = [self.ranks.receive(r, Kind.CALL, self._step_timeout) for r in range(1, self.ranks.tp.size)]
            same = all(other == digest for other in theirs)
            self.ranks.send(Kind.CALL, np.array([same, next_request_id], np.int32))
        return same

    def send_outputs(self, packed: bytes) -> None:
        """Under torchrun: the outputs of a step to every rank, so that each returns them to its caller."""
        with self._ends_all_ranks():
            self.ranks.send(Kind.OUTPUTS, packed, self._step_timeout)

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call the function with the model, on every rank; what each returned, in order of rank."""
        name = importable_name(function)
        runner = self.runner
        with self._ends_all_ranks():
            self.ranks.send(Kind.APPLY, name.encode())
            with torch.inference_mode():
                results = [function(runner.model)]
            for rank in range(1, self.ranks.tp.size):
                results.append(json.loads(self.ranks.receive(rank, Kind.APPLY, self._step_timeout)))
        return results

    def check(self) -> None:
        """EngineDeadError if another rank has failed, which shows between steps only here."""
        with self._ends_all_ranks():
            self.ranks.check()

    def close(self) -> None:
        """End all ranks and free the model and the cache; twice is fine."""
        self._end(_CLOSED)

    def _end(self, why: str) -> None:
        self._dead = self._dead or why
        self._pending.clear()
        self._waiting = self._runner = None
        self._finalizer()

    def _agree(self, config: EngineConfig, runner: ModelRunner) -> None:
        """Settle what must be the same on every rank: the number of blocks is the minimum, settings are compared."""
        num_kv_blocks, ours = runner.max_kv_blocks, fingerprint(config, runner)
        for rank in range(1, self.ranks.tp.size):
            num_blocks, *theirs = np.frombuffer(self.ranks.receive(rank, Kind.READY, _LOAD_TIMEOUT), np.int32).tolist()
            if theirs != ours:
                raise ValueError(f"rank {rank} has other engine arguments, another model or another dtype than rank 0")
            num_kv_blocks = min(num_kv_blocks, num_blocks)
        self.ranks.send(Kind.START, np.array([num_kv_blocks], np.int32))
        runner.allocate_kv_cache(num_kv_blocks)

    @contextlib.contextmanager
    def _ends_all_ranks(self) -> Iterator[None]:
        """With other ranks about, an error inside ends them all; whichever failed first is named."""
        try:
            yield
        except BaseException as error:
            if self.ranks.tp.size == 1:
                raise
            self.ranks.tp.abort_waits()  # whatever follows may have to wait for the GPU
            bad_argument = isinstance(error, ValueError) and self._runner is None  # or checkpoint: the user's to change
            if bad_argument:
                self.ranks.failure = f"rank 0 failed: {error}"
            elif isinstance(error, Exception):
                self.ranks.failure = self.ranks.blame(error, _BLAME_SECONDS)
            else:
                self.ranks.failure = f"rank 0 was interrupted by {type(error).__name__}: make a new LLM"
            self._end(self.ranks.failure)
            if bad_argument or not isinstance(error, Exception):
                raise
            raise EngineDeadError(self._dead) from error


class Follower:
    """A rank above 0: loads its share, then runs the plans that come over the link.

    An error ends this rank's part: rank 0 is told, and the group is left so that nobody waits in it. Once loaded, that
    is an EngineDeadError, and so is every use since.
    """

    def __init__(self, config: EngineConfig, source: ModelSource, ranks: Ranks, link: Link) -> None:
        self._ranks, self._link = ranks, link
        self._step_timeout = config.step_timeout
        self._next_step = 0
        self._pending: deque[PendingResult] = deque()
        self._waiting: WaitingStep | None = None
        self._runner: ModelRunner | None = None
        self._dead = ""
        self._finalizer = weakref.finalize(self, _close, ranks)
        with self._ends_this_rank():
            runner = ModelRunner(config, source, ranks.tp, ranks.device)
            link.send(Kind.READY, np.array([runner.max_kv_blocks, *fingerprint(config, runner)], np.int32))
            kind, payload = self._recv()
            if kind is not Kind.START:
                raise EngineDeadError(f"rank 0 sent {kind.name} instead of starting")
            self.num_kv_blocks = int(np.frombuffer(payload, np.int32)[0])
            self.max_model_len = runner.max_model_len
            runner.allocate_kv_cache(self.num_kv_blocks)
        self._runner = runner

    def send(self, kind: Kind, payload: bytes) -> None:
        """A message to rank 0."""
        with self._ends_this_rank():
            self._link.send(kind, payload)

    def serve(self) -> tuple[Kind, bytearray]:
        """Run plans as they come; returns the first message that is none."""
        with self._ends_this_rank():
            while True:
                kind, payload = self._recv()
                assert self._runner is not None
                if kind is Kind.APPLY:
                    with torch.inference_mode():
                        result = import_by_name(payload.decode())(self._runner.model)
                    self._link.send(Kind.APPLY, json.dumps(result).encode())
                    continue
                if kind is Kind.PLAN:  # if rank 0 has given up a step that was to be sampled, so does this
                    plan = StepPlan.unpack(np.frombuffer(payload, np.int32), self._next_step)
                    self._next_step = (self._next_step + 1) % _STEPS
                    launched = self._runner.launch(plan)
                elif kind is Kind.SAMPLE:
                    assert self._waiting is not None
                    share = SamplePlan.unpack(np.frombuffer(payload, np.int32), self._waiting.plan.step)
                    launched = self._runner.sample(self._waiting, share)
                else:
                    return kind, payload
                self._waiting = launched if isinstance(launched, WaitingStep) else None
                if isinstance(launched, PendingResult):
                    self._pending.append(launched)
                if len(self._pending) > 2:  # rank 0 is never further ahead, so this one is done; its errors show here
                    self._pending.popleft().wait(self._step_timeout)

    def close(self) -> None:
        """Run what rank 0 still has to run, until it closes too; twice is fine."""
        with contextlib.suppress(EngineDeadError):
            self.send(Kind.CLOSE, b"")
            while self.serve()[0] is not Kind.CLOSE:
                pass
        self._end(_CLOSED)

    def _recv(self) -> tuple[Kind, bytearray]:
        """The next message of rank 0, however long that takes."""
        message = self._link.recv(spin=_SPIN_SECONDS if self._ranks.device.type == "cuda" else 0.0)
        assert message is not None
        if message[0] is Kind.ERROR:
            raise EngineDeadError(message[1].decode())
        return message

    def _end(self, why: str) -> None:
        self._dead = self._dead or why
        self._pending.clear()
        self._waiting = self._runner = None
        self._link.close()
        self._finalizer()

    @contextlib.contextmanager
    def _ends_this_rank(self) -> Iterator[None]:
        if self._dead:
            raise EngineDeadError(self._dead)
        loading = self._runner is None
        try:
            with failures_told(self._link):
                yield
        except BaseException as error:
            self._ranks.tp.abort_waits()
            self._ranks.failure = self._explain(error)
            self._end(self._ranks.failure)
            if loading or isinstance(error, EngineDeadError) or not isinstance(error, Exception):
                raise
            raise EngineDeadError(self._dead) from error

    def _explain(self, error: BaseException) -> str:
        """What rank 0 says about a failure, if anything; it may have begun elsewhere."""
        if isinstance(error, EngineDeadError):
            return str(error)
        with contextlib.suppress(LinkClosedError):
            while (message := self._link.recv(1.0)) is not None:
                if message[0] is Kind.ERROR:
                    return message[1].decode()
        return (
            "rank 0 is gone" if isinstance(error, LinkClosedError) else f"rank {self._ranks.tp.rank} failed: {error!r}"
        )


def fingerprint(config: EngineConfig, runner: ModelRunner) -> list[int]:
    """Four int32 words of everything that must be the same on every rank."""
    settings = {name: value for name, value in asdict(config).items() if name not in ("device", "tokenizer")}
    text = repr((sorted(settings.items()), runner.model_config, runner.dtype, runner.max_model_len))
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], np.int32).tolist()


def importable_name(function: Callable[..., Any]) -> str:
    """module:qualname; ValueError if that doesn't lead back to the function, as for a lambda."""
    name = f"{getattr(function, '__module__', None)}:{getattr(function, '__qualname__', None)}"
    try:
        found = import_by_name(name)
    except (ImportError, AttributeError):
        found = None
    if not callable(function) or found is not function:
        raise ValueError(f"the function must be importable, at the top level of a module; {function!r} is not")
    return name


def import_by_name(name: str) -> Callable[..., Any]:
    """The function of this importable_name."""
    module, _, qualname = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _close(ranks: Ranks) -> None:
    ranks.close()
    if ranks.device.type == "cuda" and not ranks.failure:  # then the GPU may never be done
        torch.cuda.empty_cache()


def resolve_device(device: str) -> torch.device:
    """The torch device that the user's choice means; ValueError if there is no GPU to use."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but PyTorch sees no GPU: use device='cpu' or 'auto'")
    return torch.device(device)
