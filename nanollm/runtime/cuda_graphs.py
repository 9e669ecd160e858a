"""Decode steps, captured and replayed: per batch size a CUDA graph for forward, and for sampling one for each kind of
filters."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanollm.kernels.prepare_decode import COMPUTED, HOST_TOKEN, NEW_BLOCK, NUM_WORDS, ROW, DecodeInputs, prepare_decode
from nanollm.layers.sampler import Filters, Sampler
from nanollm.layers.step_batch import StepBatch
from nanollm.models.qwen3 import Qwen3ForCausalLM
from nanollm.runtime.rows import RowState
from nanollm.runtime.step_plan import StepPlan

_STAGING = 4  # host buffers in turn: more than the steps that may be in flight


def capture_sizes(max_rows: int) -> list[int]:
    """Batch sizes that are captured: 1, 2, 4, 8, 16, 24 …, and always max_rows."""
    return sorted({*(n for n in (1, 2, 4) if n < max_rows), *range(8, max_rows, 8), max_rows})


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # one for all captures, since libraries keep a workspace for each


@contextmanager
def capturing(pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what is launched inside. pool: of torch.cuda.graph_pool_handle().

    torch.cuda.graph would empty PyTorch's cache of memory each time, which takes longer than to capture a small step:
    empty it once, before the first.
    """
    graph, device = torch.cuda.CUDAGraph(), torch.cuda.current_device()
    outside = torch.cuda.current_stream(device)
    # Not by torch.cuda.stream, which asks the driver each time whether there is a GPU.
    torch.cuda.set_stream(_capture_stream(device))
    try:
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            yield graph
        finally:
            graph.capture_end()
    finally:
        torch.cuda.set_stream(outside)


@dataclass
class _Graphs:
    forward: torch.cuda.CUDAGraph
    samples: dict[Filters, tuple[torch.cuda.CUDAGraph, Tensor]]  # and the token ids, int64 [B]

    def replay(self) -> None:
        """A step of rows without filters, as benchmarks repeat it."""
        self.forward.replay()
        self.samples[Filters.NONE][0].replay()


class DecodeSteps:
    """Runs steps of one token a row, the same way with and without CUDA graphs.

    The host sends four words a row; everything else is on the device. A step of B rows uses the smallest captured size
    that holds it, its other rows being padding, whether or not it was captured: so both compute the same.

    sizes: what step sizes are padded to, ascending and with the largest step's; empty for no padding.
    """

    def __init__(
        self, model: Qwen3ForCausalLM, rows: RowState, sampler: Sampler, max_rows: int, sizes: list[int]
    ) -> None:
        self._model, self._rows, self._sampler = model, rows, sampler
        device = rows.device
        self._words = torch.zeros(max_rows, NUM_WORDS, dtype=torch.int32, device=device)
        self._inputs = DecodeInputs.empty(max_rows, rows.state)
        # Of our own, since a graph's memory may serve other sizes, and log probabilities are taken after it.
        weight = model.lm_head.weight
        self._logits_r = torch.empty(max_rows, len(weight), dtype=weight.dtype, device=device)
        pinned = device.type == "cuda"
        self._staging = torch.zeros(_STAGING, max_rows, NUM_WORDS, dtype=torch.int32, pin_memory=pinned)
        self._turn = 0
        self._graphs: dict[int, _Graphs] = {}
        self._size_for = [next((s for s in sizes if s >= n), n) for n in range(max_rows + 1)]
        self._pool: Any = None

    @staticmethod
    def takes(plan: StepPlan) -> bool:
        """Whether every row computes one token and samples the next."""
        num_rows = len(plan.row_ids_B)
        return (
            len(plan.sampled_rows_S) == len(plan.logit_rows_L) == num_rows
            and int(plan.num_new_B.max()) == 1
            and np.array_equal(plan.sampled_rows_S, plan.row_ids_B)
        )

    def forward(self, plan: StepPlan) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor | None]]]:
        """Queue the step up to its logits. Returns them, [B, V_r] and padding, good until the next step is queued; and
        what queues sampling, given these or others in their place: it returns token ids, int64 [B], good as long, and
        log probabilities as of Sampler.token_logprobs, if any row wants them."""
        num_rows = len(plan.row_ids_B)
        size = self._size_for[num_rows]
        self._turn = (self._turn + 1) % _STAGING
        staging = self._staging[self._turn, :size]
        words_BW = staging.numpy()
        words_BW[num_rows:, ROW] = -1
        words_BW[:num_rows, ROW] = plan.row_ids_B
        words_BW[:num_rows, COMPUTED] = plan.num_computed_B
        words_BW[num_rows:, COMPUTED] = 0
        words_BW[:, (HOST_TOKEN, NEW_BLOCK)] = -1
        if len(plan.host_tokens):
            words_BW[:num_rows, HOST_TOKEN][plan.on_device_B == 0] = plan.host_tokens
        if len(plan.params_rows):
            # New rows, of one-token prompts: rare, and their tables start with any number of blocks.
            self._rows.start(plan)
        elif len(plan.append_blocks):
            # The rows' order in the plan is that of its appends, and each is one block.
            words_BW[:num_rows, NEW_BLOCK][np.isin(plan.row_ids_B, plan.append_rows)] = plan.append_blocks
            self._rows.append_on_host(plan)
        self._words[:size].copy_(staging, non_blocking=True)
        graphs, filters = self.graphs_for(num_rows), self._rows.filters(plan)
        if graphs is None:
            self._forward(size)
        else:
            graphs.forward.replay()
        logits_r = self._logits_r[:size]

        def sample(given_r: Tensor) -> tuple[Tensor, Tensor | None]:
            # What few steps have is not captured: log probabilities, filters that other ranks must hear of, and logits
            # that the host changed.
            is_captured = graphs is not None and filters in graphs.samples and given_r is logits_r
            if graphs is None or not is_captured or len(plan.num_logprobs_L):
                wanted = self._rows.wanted_logprobs(plan, slice(None))
                ids_B, logprobs = self._sample(given_r, filters, wanted, logits_r)
                return ids_B[:num_rows], logprobs
            sampling, ids_B = graphs.samples[filters]
            sampling.replay()
            return ids_B[:num_rows], None

        return logits_r, sample

    def graphs_for(self, num_rows: int) -> _Graphs | None:
        """The graphs that a step of this many rows replays; None if it runs kernel by kernel."""
        return self._graphs.get(self._size_for[num_rows])

    def launch_all(self) -> None:
        """Launch every kernel that steps may need, whatever their number of rows and filters."""
        for filters in Filters:  # first, for theirs take long to compile
            self._sample(self._logits_r[:1], filters)
        for size in sorted(set(self._size_for), reverse=True):
            self._forward(size)

    def capture(self, sizes: list[int]) -> float:
        """Capture these sizes, largest first; returns the seconds it took. Every rank does so in the same order."""
        start = time.monotonic()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()
        self._words.fill_(-1)  # every row padding
        self._words[:, COMPUTED] = 0
        sizes = sorted(sizes, reverse=True)
        captured = list(Filters) if self._sampler.tp.size == 1 else [Filters.NONE]
        # All runs once before: that sets libraries up, which capture can't. Sampling has none that depend on the size.
        with self._model.few_layers():
            for size in sizes:
                self._forward(size)
        for filters in captured:
            self._sample(self._logits_r[: sizes[0]], filters)
        for size in sizes:
            with capturing(self._pool) as forward:
                self._forward(size)
            graphs = _Graphs(forward, {})
            for filters in captured:
                with capturing(self._pool) as sampling:
                    ids_B, _ = self._sample(self._logits_r[:size], filters)
                graphs.samples[filters] = sampling, ids_B
            self._graphs[size] = graphs
        torch.cuda.synchronize()
        return time.monotonic() - start

    def forget(self) -> None:
        """Drop all captured graphs and their memory."""
        self._graphs.clear()
        self._pool = None

    def _forward(self, size: int) -> None:
        """Up to the logits."""
        inputs = self._inputs
        prepare_decode(self._words[:size], self._rows.state, inputs.first(size), self._rows.block_size)
        batch = StepBatch(
            token_ids_T=inputs.token_ids_B[:size],
            positions_T=inputs.positions_B[:size],
            slots_T=inputs.slots_B[:size],
            block_tables_BM=inputs.block_tables_BM[:size],
            context_lens_B=inputs.context_lens_B[:size],
            decode_lens_C=inputs.context_lens_B[:size],
            query_starts_B1=None,
            logit_rows_L=None,
        )
        self._model.lm_head(self._model.hidden(batch), out=self._logits_r[:size])

    def _sample(
        self,
        logits_r: Tensor,
        filters: Filters = Filters.NONE,
        logprobs: tuple[Tensor, int] | None = None,
        raw_r: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        inputs = self._inputs.first(len(logits_r))
        return self._sampler.sample(logits_r, inputs.rows_B, inputs.sample_positions_B, filters, logprobs, raw_r)
