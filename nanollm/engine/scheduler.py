"""Continuous batching: which sequences compute how many tokens in the next step.

There is no prefill phase and no decode phase. A sequence has num_tokens and num_computed_tokens, and a step gives every
running sequence some tokens to compute until the second catches up with the first; then it samples one more.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from nanollm.config import EngineConfig
from nanollm.engine.block_manager import BlockManager
from nanollm.engine.row_rules import has_rules, pack_params, row_rules
from nanollm.engine.sequence import Sequence
from nanollm.outputs import EngineOutput
from nanollm.runtime.step_plan import StepPlan, StepResult
from nanollm.sampling_params import MAX_RULED_ROWS


class OutOfBlocks(Exception):
    """A running sequence needs a block, there is none, and steps in flight may still give some back."""


@dataclass
class Step:
    """A planned step as rank 0 remembers it until its tokens are read."""

    plan: StepPlan
    sequences: list[Sequence]
    sampled: list[Sequence]
    # Sequences that want logits or log probabilities of their prompt, and of how many positions this step brings them.
    logit_spans: list[tuple[Sequence, int]]
    # Those of plan.masked and plan.processed.
    masked: list[Sequence]
    processed: list[Sequence]


@dataclass
class _Draft:
    """The plan under construction, as lists."""

    sequences: list[Sequence] = field(default_factory=list)
    num_new: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_prompt_logits: int = 0


class Scheduler:
    """Owns the queues and the blocks. schedule() plans a step, update() takes what a step brought.

    waiting: first come, first served, preempted sequences at the front; running: in order of arrival. Nothing that
    runs is ever passed over by something that waits, and the newest running sequence is the one preempted, so the
    oldest always gets on: no starvation.
    """

    def __init__(self, config: EngineConfig, num_blocks: int, max_model_len: int) -> None:
        assert config.block_size is not None
        self.block_manager = BlockManager(num_blocks, config.block_size, config.enable_prefix_caching)
        self.max_model_len = max_model_len
        self.token_budget = config.max_num_batched_tokens
        self.chunk_limit = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        self.running: dict[int, Sequence] = {}
        self._leaving: dict[int, Sequence] = {}  # finished, but a step in flight still writes their blocks
        self._blocked = (-1, 0)  # (request, room in blocks) of the last failed admission
        self._num_rows = config.num_rows
        self._num_ruled_rows = min(self._num_rows, MAX_RULED_ROWS)
        self._free_all_rows()
        # Of plans of nothing but decodes: slices, since making an array of 256 numbers takes 10 µs.
        self._ones, self._numbers = np.ones(self._num_rows, np.int32), np.arange(self._num_rows, dtype=np.int32)
        self._depends_on_host = False  # no row ever did: then no step looks for those that do
        self._num_steps = 0
        self._num_in_flight = 0
        self.num_preemptions = 0
        self.num_tokens_in = 0
        self.num_tokens_out = 0

    def _free_all_rows(self) -> None:
        self._free_rows = list(range(self._num_ruled_rows))[::-1]
        self._free_plain_rows = list(range(self._num_ruled_rows, self._num_rows))[::-1]  # for sequences without rules

    @property
    def max_cached_tokens(self) -> int:
        """Tokens the whole KV cache holds."""
        return len(self.block_manager.blocks) * self.block_manager.block_size

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def check_fits(self, seq: Sequence) -> None:
        """ValueError, with the numbers, if the sequence could never run."""
        if seq.num_prompt_tokens >= self.max_model_len + seq.all_logits:
            raise ValueError(
                f"prompt has {seq.num_prompt_tokens} tokens, but max_model_len is {self.max_model_len} and at least "
                "one token must be generated: shorten the prompt or raise max_model_len"
            )
        if seq.num_prompt_tokens > self.max_cached_tokens:
            raise ValueError(
                f"prompt has {seq.num_prompt_tokens} tokens, but the KV cache holds {self.max_cached_tokens}: shorten "
                "the prompt, or raise num_kv_blocks, kv_cache_memory_bytes or gpu_memory_utilization"
            )

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; ValueError if it can never run."""
        self.check_fits(seq)
        # The last token needs no KV. What outgrows the cache while alone so ends with "length", by a limit that is
        # known in advance.
        seq.max_tokens_total = min(seq.max_tokens_total, self.max_cached_tokens + 1)
        self.waiting[seq.request_id] = seq
        self.num_tokens_in += seq.num_prompt_tokens
        self._depends_on_host |= seq.matcher is not None or bool(seq.params.logits_processors)

    def abort(self, request_id: int) -> bool:
        """End a request that waits or runs; False if there is none. In flight it is a mark; the free comes later."""
        if (seq := self.waiting.pop(request_id, None)) is None:
            if (seq := self.running.get(request_id)) is None:
                return False
            self._leave(seq)
        seq.finish_reason = "abort"
        return True

    def schedule(self, now: float = 0.0) -> Step | None:
        """Plan the next step at time `now` (seconds); None if nothing can be computed before a step in flight is read.

        Raises OutOfBlocks, with nothing lost, if a step in flight must be read first; so nothing that is in flight is
        ever preempted.
        """
        draft = _Draft()
        chunked = []
        block_size = self.block_manager.block_size
        for seq in list(self.running.values()):
            if seq.row < 0:  # preempted by an older one in this very loop
                continue
            num_tokens = len(seq.token_ids) + seq.num_pending
            if seq.num_computed_tokens == num_tokens - 1:
                if num_tokens < seq.max_tokens_total and (
                    num_tokens <= len(seq.block_ids) * block_size or self._make_room(seq)
                ):
                    draft.sequences.append(seq)
                    if seq.all_logits:  # a last token by itself
                        draft.num_prompt_logits += 1
            elif seq.num_computed_tokens < num_tokens:
                chunked.append(seq)
        draft.num_tokens = len(draft.sequences)
        draft.num_new = [1] * draft.num_tokens
        for seq in chunked:
            self._take_chunk(draft, seq)
        while draft.num_tokens < self.token_budget and (admitted := self._admit()) is not None:
            self._take_chunk(draft, admitted)
        if not draft.sequences:
            return None
        step = self._plan(draft, now)
        self._num_steps += 1
        self._num_in_flight += 1
        return step

    def update(self, step: Step, result: StepResult, now: float) -> list[EngineOutput]:
        """Take what the oldest step in flight brought: append, finish, free. Returns one output per changed request."""
        self._num_in_flight -= 1
        for seq in step.sequences:
            seq.in_flight -= 1
        if result.logprobs or step.logit_spans:
            self._take_logits(step, result)
        outputs = []
        ended: list[Sequence] = []
        commit, block_size = self.block_manager.commit, self.block_manager.block_size
        for seq, token_id in zip(step.sampled, result.token_ids, strict=True):
            if seq.finish_reason is not None:  # found finished, or aborted, one step late: a surplus token
                seq.num_pending -= 1
                continue
            counts = seq.append(token_id)
            # A block may be full now that this token is known, or was so when the last one was.
            if len(seq.token_ids) % block_size <= 1:
                commit(seq)
            metrics = seq.metrics
            metrics.num_tokens = len(seq.token_ids) - seq.num_prompt_tokens
            if first := metrics.first_token_time is None:
                metrics.first_token_time = now
            if seq.finish_reason is not None:
                metrics.finished_time = now
                ended.append(seq)
            outputs.append(
                EngineOutput(
                    seq.request_id,
                    [token_id] if counts else [],
                    seq.finish_reason,
                    seq.stop_reason,
                    seq.num_cached_tokens,
                    metrics,
                    seq.logits,
                    seq.logprobs if counts else [],
                    seq.prompt_logprobs if first else [],
                )
            )
        self.num_tokens_out += sum(len(output.new_token_ids) for output in outputs)
        for seq in ended:
            self._leave(seq)
        if self._leaving:
            for seq in step.sequences:
                if seq.finish_reason is not None and not seq.in_flight:
                    self._release(seq)
        return outputs

    def _take_logits(self, step: Step, result: StepResult) -> None:
        """Give the sequences the logits and log probabilities that they asked for."""
        logprobs = iter(result.logprobs)
        for seq in step.sampled:
            if seq.num_logprobs >= 0:
                seq.logprobs = [next(logprobs)]
        start = 0
        for seq, count in step.logit_spans:
            if seq.all_logits:
                assert result.logits is not None
                if seq.finish_reason is None:
                    seq.logits.append(result.logits[start : start + count])
                start += count
            else:
                seq.prompt_logprobs.extend(islice(logprobs, count))

    def reset(self) -> None:
        """Drop every request and every cached prefix, as after a failed step: all state is made anew, so it doesn't
        matter where the failure struck. Totals go on."""
        blocks = self.block_manager
        self.block_manager = BlockManager(len(blocks.blocks), blocks.block_size, blocks.enable_prefix_caching)
        self.block_manager.prefix_queries, self.block_manager.prefix_hits = blocks.prefix_queries, blocks.prefix_hits
        self.waiting.clear()
        self.running.clear()
        self._leaving.clear()
        self._free_all_rows()
        self._num_in_flight = 0

    def sanity_checks(self) -> None:
        """Raise AssertionError if queues, rows and blocks disagree. For tests."""
        owners = [*self.running.values(), *self._leaving.values()]
        self.block_manager.sanity_checks(owners)
        free_rows = {*self._free_rows, *self._free_plain_rows}
        assert len({seq.row for seq in owners} | free_rows) == len(owners) + len(free_rows) == self._num_rows
        assert all(0 <= seq.row < (self._num_ruled_rows if has_rules(seq) else self._num_rows) for seq in owners)
        assert all(seq.row < 0 and not seq.block_ids and not seq.in_flight for seq in self.waiting.values())
        assert all(seq.in_flight for seq in self._leaving.values())
        for seq in owners:
            assert seq.num_computed_tokens <= seq.num_tokens <= seq.max_tokens_total
            assert seq.num_computed_tokens <= len(seq.block_ids) * self.block_manager.block_size

    def _make_room(self, seq: Sequence) -> bool:
        """A block for the sequence's next token, at the cost of the newest sequences; False if it is that itself."""
        while len(seq.block_ids) * self.block_manager.block_size < seq.num_tokens:
            if self.block_manager.grow(seq):
                break
            if self._num_in_flight:
                raise OutOfBlocks
            newest = self.running[next(reversed(self.running))]
            self._preempt(newest)
            if newest is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Back to the front of the queue, to be computed anew: cheaper than swapping, and cached blocks are hit."""
        self.num_preemptions += 1
        self._release(seq)
        seq.logits.clear()  # they will come again
        if seq.num_output_tokens == 0:
            seq.prompt_logprobs.clear()
        self.waiting[seq.request_id] = seq
        self.waiting.move_to_end(seq.request_id, last=False)

    def _admit(self) -> Sequence | None:
        """Start the first waiting sequence if there is a row for it and its whole prompt fits, each running sequence's
        next block left free."""
        if not self.waiting:
            return None
        seq = next(iter(self.waiting.values()))
        rows = self._free_plain_rows if self._free_plain_rows and not has_rules(seq) else self._free_rows
        if not rows:
            return None
        if seq.leader is not None and not self._has_shared(seq.leader):
            return None
        room = self.block_manager.num_free - len(self.running)
        blocked_id, blocked_room = self._blocked
        if seq.request_id == blocked_id and room <= blocked_room and not self.block_manager.is_cached(seq.first_miss):
            return None  # no more room than when it last failed, and no more to share, so don't match its prefix again
        if not self.block_manager.admit(seq, keep_free=len(self.running)):
            self._blocked = (seq.request_id, room)
            return None
        del self.waiting[seq.request_id]
        self.running[seq.request_id] = seq
        seq.row = rows.pop()
        seq.token_on_device = False
        seq.leader = None
        if seq.metrics.first_scheduled_time is None:  # what it finds again after a preemption was its own work
            seq.num_cached_tokens = seq.num_computed_tokens
        return seq

    def _has_shared(self, leader: Sequence) -> bool:
        """Whether the blocks of its prompt can be shared by now. It stands before those that wait for it, always."""
        size = self.block_manager.block_size
        return (
            leader.finish_reason is not None
            or leader.num_computed_tokens >= (leader.num_prompt_tokens - 1) // size * size
        )

    def _take_chunk(self, draft: _Draft, seq: Sequence) -> None:
        room = min(self.chunk_limit, self.token_budget - draft.num_tokens)
        if seq.needs_whole_prompt:  # no more rows of logits than sampling takes: that much memory was set aside
            room = min(room, self._num_rows - draft.num_prompt_logits)
        if room <= 0:
            return
        num_new = min(seq.num_tokens - seq.num_computed_tokens, room)
        draft.sequences.append(seq)
        draft.num_new.append(num_new)
        draft.num_tokens += num_new
        if seq.needs_whole_prompt:
            draft.num_prompt_logits += num_new

    def _plan(self, draft: _Draft, now: float) -> Step:
        """Turn the draft into arrays and advance the sequences by what it computes."""
        block_size = self.block_manager.block_size
        host_tokens: list[int] = []
        on_device, computed, sampled, sampled_at = [], [], [], []
        appends: list[tuple[int, int, int]] = []
        append_blocks: list[int] = []
        started: list[Sequence] = []
        spans: list[tuple[Sequence, int]] = []
        span_positions: list[int] = []
        num_logprobs: list[int] = []
        targets: list[int] = []
        end = 0
        for seq, num_new in zip(draft.sequences, draft.num_new, strict=True):
            start = seq.num_computed_tokens
            end += num_new
            computed.append(start)
            on_device.append(seq.token_on_device)
            if len(seq.block_ids) > seq.num_sent_blocks:
                if seq.num_sent_blocks == 0:
                    started.append(seq)
                    if seq.metrics.first_scheduled_time is None:
                        seq.metrics.first_scheduled_time = now
                new_blocks = seq.block_ids[seq.num_sent_blocks :]
                appends.append((seq.row, seq.num_sent_blocks, len(new_blocks)))
                append_blocks.extend(new_blocks)
                seq.num_sent_blocks = len(seq.block_ids)
            seq.num_computed_tokens = start + num_new
            seq.in_flight += 1
            if seq.token_on_device and not seq.all_logits:
                # Most rows of most steps: nothing below but this concerns them.
                sampled.append(seq)
                sampled_at.append(end - 1)
                seq.num_pending += 1
                if not (start + 1) % block_size:
                    self.block_manager.commit(seq)
                continue
            self.block_manager.commit(seq)
            if not seq.token_on_device:
                host_tokens.extend(seq.token_ids[start : start + num_new])
            if seq.needs_whole_prompt:
                count = num_new if seq.all_logits else min(num_new, seq.num_prompt_tokens - 1 - start)
                if count > 0:
                    spans.append((seq, count))
                    span_positions.extend(range(end - num_new, end - num_new + count))
                    num_logprobs.extend([seq.num_prompt_logprobs] * count)
                    targets.extend([-1] * count if seq.all_logits else seq.token_ids[start + 1 : start + 1 + count])
            if seq.num_computed_tokens == seq.num_tokens:  # caught up: its last position samples the next token
                sampled.append(seq)
                sampled_at.append(end - 1)
                seq.num_pending += 1
                seq.token_on_device = True
        num_logprobs = [seq.num_logprobs for seq in sampled] + num_logprobs
        masked, processed = [], []
        if self._depends_on_host:
            masked = [i for i, seq in enumerate(sampled) if seq.matcher is not None]
            processed = [i for i, seq in enumerate(sampled) if seq.params.logits_processors]
        rules = [row_rules(seq) for seq in started]
        row_ids_B = _int32([seq.row for seq in draft.sequences])
        all_sample = len(sampled) == len(draft.sequences)
        decodes = all_sample and end == len(sampled) and not spans  # most steps
        rows, starts, counts = zip(*appends, strict=True) if appends else ((), (), ())
        plan = StepPlan(
            step=self._num_steps,
            row_ids_B=row_ids_B,
            num_new_B=self._ones[:end] if decodes else _int32(draft.num_new),
            num_computed_B=_int32(computed),
            on_device_B=_int32(on_device) if host_tokens else self._ones[: len(on_device)],
            host_tokens=_int32(host_tokens),
            append_rows=_int32(rows),
            append_starts=_int32(starts),
            append_counts=_int32(counts),
            append_blocks=_int32(append_blocks),
            logit_rows_L=self._numbers[:end] if decodes else _int32(sampled_at + span_positions),
            sampled_rows_S=row_ids_B if all_sample else _int32([seq.row for seq in sampled]),
            params_rows=_int32([seq.row for seq in started]),
            params=_int32([word for pair in zip(started, rules, strict=True) for word in pack_params(*pair)]),
            rules=_int32([word for row in rules if row is not None for word in row.pack()]),
            num_logprobs_L=_int32(num_logprobs if max(num_logprobs, default=-1) >= 0 else []),
            targets=_int32(targets),
            masked=_int32(masked),
            processed=_int32(processed),
        )
        picked = [[sampled[i] for i in index] for index in (masked, processed)]
        return Step(plan, draft.sequences, sampled, spans, *picked)

    def _leave(self, seq: Sequence) -> None:
        """Take a finished sequence off the running ones; blocks and row follow when no step in flight uses them."""
        self._leaving[seq.request_id] = seq
        del self.running[seq.request_id]
        if not seq.in_flight:
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        self.running.pop(seq.request_id, None)
        self._leaving.pop(seq.request_id, None)
        if seq.row >= 0:
            self.block_manager.free(seq)
            (self._free_rows if seq.row < self._num_ruled_rows else self._free_plain_rows).append(seq.row)
            seq.row = -1


def _int32(values: list[int] | list[bool] | tuple[int, ...]) -> np.ndarray:
    return np.array(values, np.int32)
