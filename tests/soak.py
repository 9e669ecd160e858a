"""A soak: random requests come, are aborted, and squeeze each other out of the cache, until time is up.

All but its end follows from one seed, since things happen at steps, not at times. Requests come in bursts; in the gap
after each, nothing may be left of them.
"""

import gc
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from nanollm import LLM, RequestOutput, SamplingParams
from nanollm.engine.sequence import Sequence
from tests.conftest import VARIED, VOCAB_SIZE

LONGEST_PROMPT, LONGEST_OUTPUT = 1000, 300
STEPS_PER_CHECK, STEPS_PER_ABORT = 10, 40


def soak_seconds(default: float) -> float:
    """How long to soak: NANOLLM_SOAK_SECONDS, or else what the test takes by itself."""
    return float(os.environ.get("NANOLLM_SOAK_SECONDS", default))


@dataclass
class _Request:
    sequences: list[Sequence]
    probe: int | None  # which, if it is one


class Soak:
    """Drives the engine of an LLM that nobody else uses, step by step, as LLM and servers do.

    probes_in_crowd: some requests of the crowd are probes, whose tokens are those that they had alone at the start. A
        GPU rounds differently in each batch size: there probes run in the gaps only.
    counts: of what happened. memory: at the end of each third, in bytes; and Python's allocations, and requests so far.
    """

    def __init__(self, llm: LLM, *, probes_in_crowd: bool) -> None:
        self._core, self._processor, self._scheduler = llm._engine, llm._processor, llm._engine.scheduler
        self._eos_token_ids = llm.model_config.eos_token_ids
        self._probes_in_crowd = probes_in_crowd
        self._draw = random.Random(0)
        self.counts: Counter[str] = Counter()
        self.memory: list[dict[str, int]] = []
        self._live: dict[int, _Request] = {}
        self._texts = [self._random_tokens(LONGEST_PROMPT) for _ in range(3)]  # whose beginnings are shared
        self.probe_prompt = self._random_tokens(40)
        common = {"temperature": 0.9, "seed": 7, "max_tokens": 24, "ignore_eos": True}
        self.probes = [SamplingParams(**(common | some)) for some in [*VARIED, {"n": 2}]]
        self.expected: list[list[list[int]]] = []  # of each probe, the tokens of its continuations
        for probe in range(len(self.probes)):
            self._run_alone(probe)

    def run(self, seconds: float) -> None:
        """Burst after burst until time is up."""
        start = time.monotonic()
        while len(self.memory) < 3:
            self._burst()
            self._run_alone(self.counts["bursts"] % len(self.probes))
            self.counts["bursts"] += 1
            if time.monotonic() - start >= seconds * (len(self.memory) + 1) / 3:
                self.memory.append(self._measure())
        self.counts["preemptions"] = self._scheduler.num_preemptions
        self.counts["steps"] = self._scheduler._num_steps

    def check(self) -> None:
        """Everything happened, and memory didn't grow once a third was over: what is met for the first time later may
        take 100 allocations, and 2 % of bytes; a request leaves less than one allocation in two."""
        print(dict(self.counts), *self.memory, sep="\n")
        for state in ("waiting", "preempted", "in prefill", "decoding"):
            assert self.counts[f"aborted {state}"], self.counts
        assert self.counts["preemptions"] > self.counts["requests"] / 20
        first, *later = self.memory
        for third in later:
            allowed = 100 + (third["requests"] - first["requests"]) / 2
            assert third["allocations"] <= first["allocations"] + allowed, self.memory
            in_bytes = third.keys() - {"requests", "allocations"}
            assert all(third[name] <= 1.02 * first[name] for name in in_bytes), self.memory

    def _random_tokens(self, length: int) -> list[int]:
        return self._draw.choices(range(VOCAB_SIZE), k=length)

    def _random_prompt(self) -> list[int]:
        """Of 1 to LONGEST_PROMPT tokens, their logarithm uniform; some begin as others do."""
        length = int(LONGEST_PROMPT ** self._draw.random())
        shared = self._draw.choice(self._texts)[: self._draw.choice((0, 0, length // 2, length))]
        return shared + self._random_tokens(length - len(shared))

    def _random_params(self) -> SamplingParams:
        draw = self._draw
        settings: dict[str, Any] = {
            "temperature": draw.choice((0.7, 1.2)),
            "seed": draw.choice((None, 3)),
            "ignore_eos": draw.random() < 0.5,
            "stop_token_ids": draw.choice(([], list(range(draw.randrange(100), VOCAB_SIZE, 100)))),
            "logprobs": draw.choice((None, None, None, 0, 3)),
            "prompt_logprobs": draw.choice((None,) * 9 + (1,)),
            "n": draw.choice((1, 1, 1, 2)),
        } | draw.choice(VARIED)
        max_tokens = max(int(LONGEST_OUTPUT * draw.random() ** 0.4), settings.get("min_tokens", 1))
        return SamplingParams(**settings, max_tokens=max_tokens)

    def _burst(self) -> None:
        """Requests for up to twice the rows that there are, all at once or one after another. The first burst is
        the largest, so that memory is at its height in the first third."""
        draw, most = self._draw, 2 * self._scheduler._num_rows
        is_first = not self.counts["bursts"]
        num_requests, spread = (most, 1) if is_first else (draw.randint(1, most), draw.choice((1, 30, 300)))
        arrivals = sorted((draw.randrange(spread) for _ in range(num_requests)), reverse=True)
        step = 0
        while arrivals or self._core.has_unfinished:
            while arrivals and arrivals[-1] <= step:
                arrivals.pop()
                if self._probes_in_crowd and draw.random() < 0.1:
                    self._add_probe(draw.randrange(len(self.probes)))
                else:
                    self._add(self._random_prompt(), self._random_params())
            if draw.random() < 1 / STEPS_PER_ABORT:
                self._abort_one()
            self._step()
            if step % STEPS_PER_CHECK == 0:
                self._scheduler.sanity_checks()
            step += 1
        self._check_idle()

    def _run_alone(self, probe: int) -> None:
        # With a salt of its own it finds nothing cached, and is computed as it was the first time.
        self._add_probe(probe, cache_salt=f"probe {self.counts['probes']}")
        while self._core.has_unfinished:
            self._step()
        self._check_idle()

    def _add_probe(self, probe: int, cache_salt: str = "") -> None:
        self._add(self.probe_prompt, self.probes[probe], probe=probe, cache_salt=cache_salt)
        self.counts["probes"] += 1

    def _add(
        self, prompt: list[int], params: SamplingParams, *, probe: int | None = None, cache_salt: str = ""
    ) -> None:
        sequences = self._core.make_sequences(prompt, params, cache_salt=cache_salt)
        for seq in sequences:
            self._core.add(seq)
        first = sequences[0].request_id
        self._processor.add(first, str(first), None, prompt, params, stream=self._draw.random() < 0.5)
        self._live[first] = _Request(sequences, probe)
        self.counts["requests"] += 1

    def _abort_one(self) -> None:
        """Each state that requests are in is as likely, however few are in it."""
        by_state: dict[str, list[list[Sequence]]] = {}
        for request in self._live.values():
            if request.probe is None:
                by_state.setdefault(self._state(request.sequences[0]), []).append(request.sequences)
        if not by_state:
            return
        state = self._draw.choice(list(by_state))
        sequences = self._draw.choice(by_state[state])
        for seq in sequences:
            self._processor.discard(seq.request_id)
            self._core.abort(seq.request_id)
        del self._live[sequences[0].request_id]
        self.counts[f"aborted {state}"] += 1

    def _state(self, seq: Sequence) -> str:
        if seq.request_id in self._scheduler.waiting:
            return "waiting" if seq.metrics.first_scheduled_time is None else "preempted"
        return "in prefill" if seq.num_computed_tokens < seq.num_prompt_tokens else "decoding"

    def _step(self) -> None:
        outputs = self._core.step()
        if self._draw.random() < 0.5:  # as LLM does; servers don't
            self._core.launch_ahead()
        results, _ = self._processor.process(outputs)
        for result in results:
            if result.finished:
                self._check_result(result, self._live.pop(int(result.request_id)))

    def _check_result(self, result: RequestOutput, request: _Request) -> None:
        params = request.sequences[0].params
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        for completion in result.outputs:
            *before, last = token_ids = completion.token_ids
            assert completion.finish_reason == ("stop" if last in ends else "length")
            assert last in ends or len(token_ids) == params.max_tokens
            assert params.min_tokens <= len(token_ids) and ends.isdisjoint(before)
            assert (completion.logprobs is None) == (params.logprobs is None)
            if completion.logprobs is not None:
                for token_id, logprobs in zip(token_ids, completion.logprobs, strict=True):
                    assert token_id in logprobs and all(found.logprob <= 1e-5 for found in logprobs.values())
            self.counts[f"finished by {completion.finish_reason}"] += 1
        assert len(result.outputs) == params.n
        assert params.prompt_logprobs is None or len(result.prompt_logprobs or []) == len(result.prompt_token_ids)
        if request.probe is not None:
            tokens = [completion.token_ids for completion in result.outputs]
            if request.probe == len(self.expected):
                self.expected.append(tokens)
            assert tokens == self.expected[request.probe], f"probe {request.probe} after {self.counts}"

    def _check_idle(self) -> None:
        """Nothing is left of any request."""
        stats = self._core.get_stats()
        assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_total_blocks)
        held = self._live, self._scheduler._leaving, self._core._in_flight, self._processor._choices
        assert not any(held), held
        self._scheduler.sanity_checks()

    def _measure(self) -> dict[str, int]:
        self._core.reset_prefix_cache()  # which knows more tokens the longer it runs, until it is full
        gc.collect()
        sizes = {
            "requests": self.counts["requests"],
            "allocations": sys.getallocatedblocks(),
            "resident": psutil.Process().memory_info().rss,
        }
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            sizes |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
        return sizes
