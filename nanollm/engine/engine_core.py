"""EngineCore: the loop that plans step N + 1 while step N runs, and reads step N's tokens afterwards."""

import random
import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nanollm.config import EngineConfig, ModelConfig
from nanollm.engine.grammars import Grammars
from nanollm.engine.row_rules import check_rules
from nanollm.engine.scheduler import OutOfBlocks, Scheduler, Step
from nanollm.engine.sequence import Sequence, check_token_ids
from nanollm.outputs import EngineOutput
from nanollm.runtime.step_plan import EMPTY, SamplePlan, StepPlan, StepResult
from nanollm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch


class Executor(Protocol):
    """Runs plans in order on every rank; what EngineCore needs of nanollm.runtime.executor."""

    num_kv_blocks: int
    max_model_len: int

    def submit(self, plan: StepPlan) -> None:
        """Launch a step; returns before the device has run it. If plan.waits, it is sampled by sample()."""

    def logits(self) -> "torch.Tensor":
        """Wait for the logits of the newest step's rows in plan.processed: float32 [rows, V], on the CPU."""

    def sample(self, plan: SamplePlan) -> None:
        """Launch the sampling of the newest step."""

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step."""

    def discard(self) -> None:
        """Wait for all submitted steps and forget what they bring, and whether they failed."""


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of the engine. Prefix counts are in tokens; what isn't a present state is a total since the start."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_total_blocks: int
    prefix_hits: int
    prefix_queries: int
    num_preemptions: int
    num_tokens_in: int
    num_tokens_out: int


class EngineCore:
    """Sequences in, EngineOutputs out. Not thread-safe: one thread makes every call.

    grammars: for structured_outputs, which are refused without.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        executor: Executor,
        overlap: bool,
        grammars: Grammars | None = None,
    ) -> None:
        self.executor = executor
        self._grammars = grammars
        self.scheduler = Scheduler(config, executor.num_kv_blocks, executor.max_model_len)
        self._model_config = model_config
        self._max_logprobs = config.max_logprobs
        self._depth = 2 if overlap else 1
        self._in_flight: deque[Step] = deque()
        self._seeds = random.Random(config.seed)
        self.next_request_id = 0
        self._is_torn = False  # an exception, such as Ctrl-C, may have left the state half changed
        self.failures: list[tuple[int, Exception]] = []  # of logits processors: request id, what it ended with

    def make_sequences(
        self,
        token_ids: AbstractSequence[int],
        params: SamplingParams,
        *,
        all_logits: bool = False,
        cache_salt: str = "",
        bad_words: list[list[int]] | None = None,
    ) -> list[Sequence]:
        """Validate a request without queueing it; returns its params.n sequences, whose ids follow each other.

        The first computes the prompt; the others wait for it, and share its blocks.
        bad_words: the token ids of each of params.bad_words, all ways that it is spelled.
        ValueError says what is wrong with the request. Its grammar, if it has one, is only being compiled then:
        grammar.result() says what is wrong with that.
        """
        vocab_size = self._model_config.vocab_size
        limit = vocab_size if self._max_logprobs < 0 else self._max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(params, name)) is not None and not 0 <= value <= limit and limit < vocab_size:
                raise ValueError(
                    f"{name} must be from 0 to {limit}, got {value}: LLM(max_logprobs=…) raises that, -1 allows all"
                )
        prompt = check_token_ids(token_ids, vocab_size)
        settings: dict[str, Any] = {
            "seed": self._seeds.getrandbits(64) - 2**63 if params.seed is None else params.seed,
            "eos_token_ids": self._model_config.eos_token_ids,
            "max_model_len": self.scheduler.max_model_len,
            "arrival_time": time.monotonic(),
            "all_logits": all_logits,
            "cache_salt": cache_salt,
            "bad_words": bad_words,
            "vocab_size": vocab_size,
        }
        leader = Sequence(self.next_request_id, prompt, params, **settings)
        check_rules(leader, vocab_size)
        self.scheduler.check_fits(leader)
        self.next_request_id += params.n
        sequences = [leader]
        rest = replace(params, prompt_logprobs=None) if params.n > 1 else params
        for choice in range(1, params.n):
            seq = Sequence(leader.request_id + choice, prompt[:], rest, **settings)
            seq.choice, seq.leader = choice, leader
            sequences.append(seq)
        if params.structured_outputs is not None:
            if self._grammars is None:
                raise ValueError("structured_outputs needs an engine with a tokenizer")
            grammar = self._grammars.compile(params.structured_outputs)
            for seq in sequences:
                seq.grammar = grammar
        return sequences

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that make_sequences made. Waits for its grammar; ValueError if that is bad."""
        self._mend()
        if seq.grammar is not None:
            seq.matcher = seq.grammar.make_matcher()
        self.scheduler.add(seq)

    def abort(self, request_id: int) -> bool:
        """End a request, whatever its state, without further output; False if it isn't there (any more)."""
        self._mend()
        return self.scheduler.abort(request_id)

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._in_flight)

    def step(self) -> list[EngineOutput]:
        """Keep the device busy, then take the oldest step's tokens. Returns what they changed, possibly nothing.

        If a step fails, every request is dropped, the engine is empty and usable again, and the error is raised.
        """
        with self._resets_if_it_fails():
            return self._step()

    def launch_ahead(self) -> None:
        """Launch what the next step() would launch first, if steps overlap; fails as step() does.

        For whoever turns outputs into text in this thread: then the device has work meanwhile.
        """
        if self._depth > 1:
            with self._resets_if_it_fails():
                self._launch()

    def reset(self) -> None:
        """Drop every request and all cached prefixes, as after a failed step.

        If that is interrupted too (Ctrl-C twice), the next call of add, abort or step does it again.
        """
        self._is_torn = True
        self._in_flight.clear()
        self.failures.clear()
        self.scheduler.reset()
        self.executor.discard()
        self._is_torn = False

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Running requests go on and keep their blocks."""
        self._mend()
        self.scheduler.block_manager.reset_prefix_cache()

    def get_stats(self) -> EngineStats:
        """Counts of requests, blocks and tokens, now."""
        scheduler, blocks = self.scheduler, self.scheduler.block_manager
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_free_blocks=blocks.num_free,
            num_total_blocks=len(blocks.blocks),
            prefix_hits=blocks.prefix_hits,
            prefix_queries=blocks.prefix_queries,
            num_preemptions=scheduler.num_preemptions,
            num_tokens_in=scheduler.num_tokens_in,
            num_tokens_out=scheduler.num_tokens_out,
        )

    @contextmanager
    def _resets_if_it_fails(self) -> Iterator[None]:
        self._mend()
        self._is_torn = True
        try:
            yield
        except BaseException:
            self.reset()
            raise
        self._is_torn = False

    def _launch(self) -> None:
        while len(self._in_flight) < self._depth:
            try:
                step = self.scheduler.schedule(time.monotonic())
            except OutOfBlocks:
                break  # under cache pressure the loop is one step deep
            if step is None:
                break
            self._in_flight.append(step)
            self.executor.submit(step.plan)
            if len(self._in_flight) == 1:
                self._sample_oldest()

    def _step(self) -> list[EngineOutput]:
        self._launch()
        if not self._in_flight:
            if self.scheduler.has_unfinished:
                raise RuntimeError("scheduler found nothing to run for the requests it has")
            return []
        result = self.executor.collect()
        outputs = self.scheduler.update(self._in_flight.popleft(), result, time.monotonic())
        if self._in_flight:
            self._sample_oldest()
        return outputs

    def _sample_oldest(self) -> None:
        """Make the SamplePlan that the oldest step in flight may wait for: all tokens before its own are known now."""
        step = self._in_flight[0]
        if not step.plan.waits:
            return
        masks = logits = EMPTY
        if step.masked:
            assert self._grammars is not None
            masks, slow = self._grammars.masks(
                [seq.matcher if seq.finish_reason is None else None for seq in step.masked],
                [seq.grammar is not None and seq.grammar.is_risky for seq in step.masked],
            )
            for i in slow:
                step.masked[i].is_too_slow = True
        if step.processed:
            logits = self._processed(step.processed)
        self.executor.sample(SamplePlan(step.plan.step, masks.reshape(-1), logits))

    def _processed(self, sequences: list[Sequence]) -> np.ndarray:
        """What the rows' own functions make of their logits: float32 as int32, flat. Who fails ends its request."""
        rows = []
        for seq, own_V in zip(sequences, self.executor.logits(), strict=True):
            row_V = np.asarray(own_V, np.float32)
            try:
                if seq.finish_reason is None:
                    row_V = _process(seq, own_V.clone())
            except Exception as error:
                self.scheduler.abort(seq.request_id)
                self.failures.append((seq.request_id, error))
            rows.append(row_V)
        return np.concatenate(rows).view(np.int32)

    def _mend(self) -> None:
        if self._is_torn:
            self.reset()


def _process(seq: Sequence, logits_V: "torch.Tensor") -> np.ndarray:
    shape = logits_V.shape
    for function in seq.params.logits_processors:
        logits_V = function(seq.token_ids[seq.num_prompt_tokens :].tolist(), logits_V)
        if getattr(logits_V, "shape", None) != shape:
            raise ValueError(f"a logits processor must return logits of shape {tuple(shape)}: {function!r}")
    # NumPy knows no bfloat16, which a function may well return.
    return np.asarray(logits_V.float() if hasattr(logits_V, "float") else logits_V, np.float32)
