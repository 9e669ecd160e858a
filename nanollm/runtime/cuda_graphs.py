"""Decode steps, captured and replayed: one CUDA graph for forward and one for sampling, per batch size."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanollm.distributed.tp_group import TPGroup
from nanollm.kernels.prepare_decode import COMPUTED, HOST_TOKEN, NEW_BLOCK, NUM_WORDS, ROW, DecodeInputs, prepare_decode
from nanollm.layers.sampler import SamplingBatch, sample
from nanollm.layers.step_batch import StepBatch
from nanollm.models.qwen3 import Qwen3ForCausalLM
from nanollm.runtime.rows import RowState
from nanollm.runtime.step_plan import StepPlan

_STAGING = 4  # host buffers in turn: more than the steps that may be in flight


def capture_sizes(max_rows: int) -> list[int]:
    """Batch sizes that are captured: 1, 2, 4, 8, 16, 24 …, and always max_rows."""
    return sorted({*(n for n in (1, 2, 4) if n < max_rows), *range(8, max_rows, 8), max_rows})


@dataclass
class _Graphs:
    forward: torch.cuda.CUDAGraph
    sample: torch.cuda.CUDAGraph
    ids_B: Tensor

    def replay(self) -> None:
        self.forward.replay()
        self.sample.replay()


class DecodeSteps:
    """Runs steps of one token a row, the same way with and without CUDA graphs.

    The host sends four words a row; everything else is on the device. A step of B rows uses the smallest captured size
    that holds it, its other rows being padding, whether or not it was captured: so both compute the same.

    sizes: what step sizes are padded to, ascending and with the largest step's; empty for no padding.
    """

    def __init__(self, model: Qwen3ForCausalLM, rows: RowState, tp: TPGroup, max_rows: int, sizes: list[int]) -> None:
        self._model, self._rows, self._tp = model, rows, tp
        device = rows.device
        self._words = torch.zeros(max_rows, NUM_WORDS, dtype=torch.int32, device=device)
        self._inputs = DecodeInputs.empty(max_rows, rows.state)
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

    def run(self, plan: StepPlan) -> Tensor:
        """Queue the step; returns its token ids, int64 [B], good until the next step is queued."""
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
        if len(
            plan.params_rows
        ):  # new rows, of one-token prompts: rare, and their tables start with any number of blocks
            self._rows.start(plan)
        elif len(plan.append_blocks):
            # The rows' order in the plan is that of its appends, and each is one block.
            words_BW[:num_rows, NEW_BLOCK][np.isin(plan.row_ids_B, plan.append_rows)] = plan.append_blocks
            self._rows.append_on_host(plan)
        self._words[:size].copy_(staging, non_blocking=True)
        if (graphs := self.graphs_for(num_rows)) is None:
            return self._sample(self._forward(size), size)[:num_rows]
        graphs.replay()
        return graphs.ids_B[:num_rows]

    def graphs_for(self, num_rows: int) -> _Graphs | None:
        """The graphs that a step of this many rows replays; None if it runs kernel by kernel."""
        return self._graphs.get(self._size_for[num_rows])

    def capture(self, sizes: list[int]) -> float:
        """Capture these sizes, largest first; returns the seconds it took. Every rank does so in the same order."""
        start = time.monotonic()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        for size in sorted(sizes, reverse=True):
            self._words.fill_(-1)  # every row padding
            self._words[:, COMPUTED] = 0
            self._sample(self._forward(size), size)  # compiles kernels and sets libraries up, which capture can't
            forward, sampling = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(forward, pool=self._pool, capture_error_mode="thread_local"):
                logits_r = self._forward(size)
            with torch.cuda.graph(sampling, pool=self._pool, capture_error_mode="thread_local"):
                ids_B = self._sample(logits_r, size)
            # Two graphs that always follow each other, so the logits' memory may serve other sizes too.
            self._graphs[size] = _Graphs(forward, sampling, ids_B)
            del logits_r
        torch.cuda.synchronize()
        return time.monotonic() - start

    def forget(self) -> None:
        """Drop all captured graphs and their memory."""
        self._graphs.clear()
        self._pool = None

    def _forward(self, size: int) -> Tensor:
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
        return self._model(batch)

    def _sample(self, logits_r: Tensor, size: int) -> Tensor:
        inputs = self._inputs.first(size)
        sampling = SamplingBatch(inputs.temperature_B, inputs.seed_B, inputs.choice_B, inputs.sample_positions_B)
        ids_B = sample(logits_r, sampling, self._model.lm_head.start, self._tp)
        self._rows.state.last_token_R[inputs.rows_B] = ids_B
        return ids_B
