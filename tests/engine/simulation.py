"""A simulated device: it does with plans what a rank does, in plain Python, so that any wrong or stale block changes
tokens; and the oracle: what the same function generates for one request alone."""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import settings

from nanollm.config import EngineConfig
from nanollm.engine.engine_core import EngineCore
from nanollm.engine.sequence import Sequence
from nanollm.outputs import EngineOutput, TokenLogprobs
from nanollm.runtime.step_plan import StepPlan, StepResult
from nanollm.sampling_params import (
    NUM_PARAMS,
    REPETITION,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_P,
    SamplingParams,
)

# The same examples every time, so that CI fails only for a reason; HYPOTHESIS_EXAMPLES=5000 looks for new ones.
_EXAMPLES = os.environ.get("HYPOTHESIS_EXAMPLES")


def machine_settings(max_examples: int, steps: int) -> settings:
    """For a state machine: how many runs of how many operations."""
    return settings(
        derandomize=_EXAMPLES is None,
        max_examples=int(_EXAMPLES or max_examples),
        stateful_step_count=steps,
        deadline=None,
        database=None,
    )


# Stand-ins for BlockManager._hash that the engine must be right with; data is the parent's hash and the tokens.
COLLIDING_HASHES: dict[str, Callable[[bytes], bytes]] = {
    "all equal": lambda data: b"same",
    "equal at the same depth": lambda data: bytes([(data[0] + 1) % 256]),
    "often equal": lambda data: bytes([sum(data) % 3]),
    "seldom equal": lambda data: bytes([sum(data) % 50]),
}


def kv_of(context: list[int], token_id: int) -> int:
    """The simulated KV of a token. Like a real model's, it depends on all KV before it."""
    return hash((*context, token_id))


def sampled_from(kv: int, params: tuple[int, ...], vocab_size: int) -> int:
    """The token that follows; params are the row's words of StepPlan.params."""
    return hash((kv, *params)) % vocab_size


@dataclass
class _Row:
    block_table: list[int] = field(default_factory=list)
    params: tuple[int, ...] = ()
    num_computed: int = 0  # once all submitted steps ran
    last_token: int = -1


@dataclass
class _Launched:
    plan: StepPlan
    rows: list[_Row]
    slots: list[list[int]]  # of each row's whole context
    blocks: set[int]  # that the step reads or writes
    result: StepResult | None = None


class FakeExecutor:
    """Executes submitted plans in order, but as late as it may: when their result is collected. Checks each plan.

    num_rows: how many rows there are. fail_next: raise in the next "submit" or "collect". on_submit: sees every plan.
    """

    def __init__(self, num_kv_blocks: int, block_size: int, max_model_len: int, vocab_size: int, num_rows: int) -> None:
        self.num_kv_blocks = num_kv_blocks
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.num_rows = num_rows
        self.kv: list[int | None] = [None] * (num_kv_blocks * block_size)  # by slot
        self.rows: dict[int, _Row] = {}
        self.pending: deque[_Launched] = deque()
        self.plans: list[StepPlan] = []
        self.fail_next: str | None = None
        self.on_submit: Callable[[StepPlan], None] = lambda plan: None

    def submit(self, plan: StepPlan) -> None:
        self._maybe_fail("submit")
        step = plan.step
        assert not self.plans or step > self.plans[-1].step
        plan = StepPlan.unpack(plan.pack(), step)
        self.plans.append(plan)
        self._start_rows(plan)
        self.pending.append(self._launch(plan))
        self.on_submit(plan)

    def collect(self) -> StepResult:
        self._maybe_fail("collect")
        launched = self.pending.popleft()
        if launched.result is None:
            self._execute(launched)
        assert launched.result is not None
        return launched.result

    def discard(self) -> None:
        self.run_pending()
        self.pending.clear()

    def run_pending(self) -> None:
        """The device gets on by itself."""
        for launched in self.pending:
            if launched.result is None:
                self._execute(launched)

    def blocks_in_flight(self) -> set[int]:
        """Blocks that launched steps read or write."""
        return set().union(*(launched.blocks for launched in self.pending))

    def _maybe_fail(self, where: str) -> None:
        if self.fail_next == where:
            self.fail_next = None
            raise RuntimeError(f"device failed in {where}")

    def _start_rows(self, plan: StepPlan) -> None:
        params = plan.params.reshape(-1, NUM_PARAMS).tolist()
        for row_id, words in zip(plan.params_rows.tolist(), params, strict=True):
            self.rows[row_id] = _Row(params=tuple(words), num_computed=-1)
        blocks = plan.append_blocks.tolist()
        appends = (plan.append_rows.tolist(), plan.append_starts.tolist(), plan.append_counts.tolist())
        for row_id, start, count in zip(*appends, strict=True):
            row = self.rows[row_id]
            assert start == len(row.block_table) and count > 0, "block tables are append-only"
            row.block_table += blocks[:count]
            assert len(set(row.block_table)) == len(row.block_table)
            del blocks[:count]
        assert not blocks

    def _launch(self, plan: StepPlan) -> _Launched:
        row_ids = plan.row_ids_B.tolist()
        assert row_ids and len(set(row_ids)) == len(row_ids) and min(row_ids) >= 0 and max(row_ids) < self.num_rows
        rows, slots, read_by, written_by = [], [], {}, {}
        num_from_host, end, ends = 0, 0, {}
        for row_id, num_new, num_computed, on_device in zip(
            row_ids, plan.num_new_B.tolist(), plan.num_computed_B.tolist(), plan.on_device_B.tolist(), strict=True
        ):
            row = self.rows[row_id]
            assert num_new >= 1 and num_computed == (num_computed if row.num_computed < 0 else row.num_computed)
            assert not on_device or (num_new == 1 and row_id not in plan.params_rows)
            num_from_host += 0 if on_device else num_new
            row.num_computed = num_computed + num_new
            end += num_new
            ends[row_id] = end
            of_row = [self._slot(row, position) for position in range(row.num_computed)]
            rows.append(row)
            slots.append(of_row)
            read_by[row_id] = {slot // self.block_size for slot in of_row}
            written_by[row_id] = {slot // self.block_size for slot in of_row[num_computed:]}
        assert len(plan.host_tokens) == num_from_host
        sampled = plan.sampled_rows_S.tolist()
        assert plan.logit_rows_L.tolist()[: len(sampled)] == [ends[row_id] - 1 for row_id in sampled]
        for row_id, written in written_by.items():
            for other_id, read in read_by.items():
                assert other_id == row_id or not written & read, "a block is written by one row only"
            for launched in self.pending:
                for other, other_slots in zip(launched.rows, launched.slots, strict=True):
                    used = {slot // self.block_size for slot in other_slots}
                    assert other is self.rows[row_id] or not written & used, "a block in flight was reused"
        return _Launched(plan, rows, slots, set().union(*read_by.values()))

    def _slot(self, row: _Row, position: int) -> int:
        return row.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _execute(self, launched: _Launched) -> None:
        plan = launched.plan
        host_tokens = iter(plan.host_tokens.tolist())
        flat_kv: list[int] = []
        for row, slots, start, on_device in zip(
            launched.rows, launched.slots, plan.num_computed_B.tolist(), plan.on_device_B.tolist(), strict=True
        ):
            for position in range(start, len(slots)):
                context = [self.kv[slot] for slot in slots[:position]]
                assert None not in context, "reads KV that nobody wrote"
                token_id = row.last_token if on_device else next(host_tokens)
                assert 0 <= token_id < self.vocab_size
                flat_kv.append(kv_of(context, token_id))  # type: ignore[arg-type]
                self.kv[slots[position]] = flat_kv[-1]
        logits = [flat_kv[i] for i in plan.logit_rows_L.tolist()]
        rows_by_id = dict(zip(plan.row_ids_B.tolist(), launched.rows, strict=True))
        token_ids = []
        for row_id, kv in zip(plan.sampled_rows_S.tolist(), logits, strict=False):
            row = rows_by_id[row_id]
            row.last_token = sampled_from(kv, row.params, self.vocab_size)
            token_ids.append(row.last_token)
        targets = plan.targets.tolist()
        others: Any = [kv for kv, target in zip(logits[len(token_ids) :], targets, strict=True) if target < 0]
        wanted = plan.num_logprobs_L.tolist() or [-1] * len(logits)
        # The KV stands for the log probability, and the token that it is of for the rank.
        logprobs = [
            TokenLogprobs(float(kv), token_id, [], [])
            for kv, token_id, num_top in zip(logits, [*token_ids, *targets], wanted, strict=True)
            if num_top >= 0
        ]
        launched.result = StepResult(token_ids, others or None, logprobs)


class Engine:
    """An EngineCore on a FakeExecutor, and what came out of it so far, by request id."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 64,
        vocab_size: int = 50,
        eos_token_ids: tuple[int, ...] = (),
        overlap: bool = False,
        **config: Any,
    ) -> None:
        self.config = EngineConfig("simulated", block_size=block_size, **config)
        self.eos_token_ids = eos_token_ids
        self.max_total = num_blocks * block_size + 1
        num_rows = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        self.executor = FakeExecutor(num_blocks, block_size, max_model_len, vocab_size, num_rows)
        model_config: Any = SimpleNamespace(vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        self.core = EngineCore(self.config, model_config, self.executor, overlap)
        self.scheduler = self.core.scheduler
        self.executor.on_submit = self.check_plan
        self.sequences: dict[int, Sequence] = {}
        self.tokens: dict[int, list[int]] = {}
        self.outputs: dict[int, EngineOutput] = {}  # the last of each request

    def add(self, prompt: list[int], *, all_logits: bool = False, cache_salt: str = "", **params: Any) -> int:
        """Queue a request; returns its id."""
        settings = SamplingParams(**({"temperature": 0, "seed": 0, "max_tokens": 8} | params))
        (seq,) = self.core.make_sequences(prompt, settings, all_logits=all_logits, cache_salt=cache_salt)
        self.core.add(seq)
        self.sequences[seq.request_id] = seq
        self.tokens[seq.request_id] = []
        return seq.request_id

    def step(self) -> list[EngineOutput]:
        """One step of the loop; checks its outputs and that the books balance."""
        outputs = self.core.step()
        for output in outputs:
            assert output.request_id not in self.outputs or self.outputs[output.request_id].finish_reason is None
            self.tokens[output.request_id] += output.new_token_ids
            self.outputs[output.request_id] = output
        self.check()
        return outputs

    def run(self, max_steps: int = 5000) -> int:
        """Step until nothing is left; returns how many steps it took."""
        for num_steps in range(max_steps):
            if not self.core.has_unfinished:
                self.check_empty()
                return num_steps
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")

    def check(self) -> None:
        """Queues, rows, blocks and stats agree, and no launched step uses a free block."""
        scheduler, stats = self.scheduler, self.core.get_stats()
        scheduler.sanity_checks()
        free = scheduler.block_manager._free.ids()
        assert not self.executor.blocks_in_flight() & set(free), "a block in flight is free"
        assert (stats.num_running, stats.num_waiting) == (len(scheduler.running), len(scheduler.waiting))
        assert stats.num_free_blocks == len(free) and stats.num_total_blocks == self.executor.num_kv_blocks
        assert 0 <= stats.prefix_hits <= stats.prefix_queries

    def check_plan(self, plan: StepPlan) -> None:
        """Called when a step was launched: it has all the work that it may have, in order of arrival."""
        scheduler, rows = self.scheduler, plan.row_ids_B.tolist()
        assert [*scheduler.running, *scheduler.waiting] == sorted([*scheduler.running, *scheduler.waiting])
        assert plan.num_tokens <= scheduler.token_budget and max(plan.num_new_B) <= scheduler.chunk_limit
        num_new = dict(zip(rows, plan.num_new_B.tolist(), strict=True))
        whole = sum(num_new.get(seq.row, 0) for seq in scheduler.running.values() if seq.needs_whole_prompt)
        for seq in scheduler.running.values():
            if seq.row in rows or (seq.needs_whole_prompt and whole >= self.executor.num_rows):  # logits are bounded
                continue
            if seq.num_computed_tokens == seq.num_tokens - 1:
                assert seq.num_tokens == seq.max_tokens_total, "every running sequence decodes in every step"
            else:
                assert plan.num_tokens == scheduler.token_budget, "a prompt waits only when the step is full"
        assert not self.executor.blocks_in_flight() & set(scheduler.block_manager._free.ids())

    def check_empty(self) -> None:
        """Nothing waits, runs, is in flight or holds a block or a row."""
        self.check()
        stats = self.core.get_stats()
        assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_total_blocks)
        assert not self.executor.pending

    def alone(self, request_id: int) -> tuple[list[int], str, int | None, list[int]]:
        """The oracle: (tokens, finish_reason, stop_reason, KV at each position) of the request with nothing else about.

        Plain Python from the request's own words: no scheduler, no blocks.
        """
        seq = self.sequences[request_id]
        params, num_prompt_tokens = seq.params, seq.num_prompt_tokens
        limit = min(self.executor.max_model_len + seq.all_logits, self.max_total)
        limit = min(limit, num_prompt_tokens + (limit if params.max_tokens is None else params.max_tokens))
        tokens = seq.token_ids.tolist()[:num_prompt_tokens]
        words = params_words(params.temperature, seq.seed)
        stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.eos_token_ids))
        kv: list[int] = []
        while True:
            for token_id in tokens[len(kv) :]:
                kv.append(kv_of(kv, token_id))
            token_id = sampled_from(kv[-1], words, self.executor.vocab_size)
            tokens.append(token_id)
            if token_id in stop_ids:
                stop_reason = None if token_id in self.eos_token_ids and not params.ignore_eos else token_id
                return tokens[num_prompt_tokens:], "stop", stop_reason, kv
            if len(tokens) == limit:
                return tokens[num_prompt_tokens:], "length", None, kv

    def check_result(self, request_id: int) -> None:
        """The request gave what it gives alone."""
        output, (tokens, finish_reason, stop_reason, kv) = self.outputs[request_id], self.alone(request_id)
        assert self.tokens[request_id] == tokens
        assert (output.finish_reason, output.stop_reason) == (finish_reason, stop_reason)
        if self.sequences[request_id].all_logits:
            assert [row for rows in output.logits for row in rows] == kv  # type: ignore[comparison-overlap]


def params_words(temperature: float, seed: int) -> tuple[int, ...]:
    """What StepPlan.params says of a request without filters and penalties: its columns one by one."""
    words = np.zeros(NUM_PARAMS, np.int32)
    words.view(np.float32)[[TEMPERATURE, TOP_P, REPETITION]] = temperature, 1, 1
    words[[SEED_LOW, SEED_HIGH]] = np.int64([seed]).view(np.int32)
    return tuple(words.tolist())
