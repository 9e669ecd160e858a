"""Steps with prompt chunks: kernel by kernel, or as one CUDA graph for each shape that comes again."""

from typing import Any

import torch
from torch import Tensor

from nanollm.distributed.tp_group import TPGroup
from nanollm.layers.hidden import Hidden
from nanollm.layers.sampler import sample
from nanollm.models.qwen3 import Qwen3ForCausalLM
from nanollm.runtime.rows import RowState, StepShape, count_decodes
from nanollm.runtime.step_plan import EMPTY, StepPlan

MAX_GRAPHS = 48
_MIN_PADDED = 1024
_NOTHING = StepPlan(0, *[EMPTY] * 13)


def padded_length(num_tokens: int) -> int:
    """What a step's tokens are padded to: multiples of 16, or of an eighth of the power of two below."""
    step = max(16, 1 << max((num_tokens - 1).bit_length() - 4, 0))
    return -(-num_tokens // step) * step


def longest_padded(layer_weights: int, max_num_batched_tokens: int) -> int:
    """Up to how many tokens steps are padded and captured: where launching takes longer than computing.

    A layer's launches take a CPU about 0.4 ms, in which a GPU multiplies 0.15e12 numbers.
    layer_weights: how many weights of a layer this rank has.
    """
    return min(max(_MIN_PADDED, 150_000_000_000 // layer_weights), max_num_batched_tokens)


class MixedSteps:
    """Runs steps in which some row computes more than one token, or one that is not followed by sampling.

    The forward part, up to the hidden states whose logits are wanted, is captured when a padded shape comes a second
    time. LM head and sampling follow for exactly the rows that there are.

    max_padded: longest step that is padded, captured or not, so that both compute the same; 0 for none.
    """

    def __init__(
        self, model: Qwen3ForCausalLM, rows: RowState, tp: TPGroup, max_rows: int, max_padded: int, *, capture: bool
    ) -> None:
        self._model, self._rows, self._tp = model, rows, tp
        self._max_rows, self._max_padded, self._captures = max_rows, max_padded, capture
        self._packed = torch.zeros(sum(self._largest.lengths), dtype=torch.int64, device=rows.device)
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, Hidden]] = {}
        self._seen: set[StepShape] = set()
        self._pool: Any = None

    def run(self, plan: StepPlan) -> tuple[Tensor, Tensor | None]:
        """Queue the step. Returns (ids int64 [S], float32 logits [L - S, V] of the other rows, if any)."""
        self._rows.start(plan)
        shape = self._shape(plan)
        packed = self._rows.to_device(self._rows.pack(plan, shape))
        hidden = self._replay(packed, shape) if shape.num_tokens <= self._max_padded else self._forward(packed, shape)
        logits_r = self._model.lm_head(hidden.rows(slice(len(plan.logit_rows_L))))
        sampling, sampled_rows_S = self._rows.sampling(plan)
        num_sampled = len(sampled_rows_S)
        ids_S = sample(logits_r[:num_sampled], sampling, self._model.lm_head.start, self._tp)
        self._rows.state.last_token_R[sampled_rows_S] = ids_S
        if len(plan.logit_rows_L) == num_sampled:
            return ids_S, None
        return ids_S, self._model.lm_head.gather(logits_r[num_sampled:])

    def capture_largest(self) -> None:
        """Capture the longest padded step, to see what memory graphs take."""
        shape = self._largest
        self._packed.copy_(self._rows.to_device(self._rows.pack(_NOTHING, shape)))
        self._forward(self._packed, shape)
        self._capture(shape)

    def forget(self) -> None:
        """Drop all captured graphs and their memory."""
        self._graphs.clear()
        self._pool = None

    def _shape(self, plan: StepPlan) -> StepShape:
        num_tokens, num_rows, num_logits = plan.num_tokens, len(plan.row_ids_B), len(plan.logit_rows_L)
        padded = padded_length(num_tokens)
        if padded > self._max_padded:
            return StepShape(num_tokens, num_rows, count_decodes(plan), num_logits)
        # One prompt on an idle engine, or anything: with a shape for each number of rows, few would come again.
        num_rows = 1 if num_rows == 1 else min(self._max_rows, padded)
        return StepShape(padded, num_rows, 0 if num_rows == 1 else num_rows, 2 * self._max_rows)

    @property
    def _largest(self) -> StepShape:
        rows = min(self._max_rows, self._max_padded)
        return StepShape(self._max_padded, rows, rows, 2 * self._max_rows)

    def _replay(self, packed: Tensor, shape: StepShape) -> Hidden:
        static = self._packed[: len(packed)].copy_(packed)
        if shape not in self._graphs:
            if shape not in self._seen or not self._captures or len(self._graphs) == MAX_GRAPHS:
                self._seen.add(shape)
                return self._forward(static, shape)
            self._capture(shape)  # what capture can't do, compile kernels and set libraries up, is done by now
        graph, hidden = self._graphs[shape]
        graph.replay()
        return hidden

    def _capture(self, shape: StepShape) -> None:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden = self._forward(self._packed[: sum(shape.lengths)], shape)
        self._graphs[shape] = graph, hidden

    def _forward(self, packed: Tensor, shape: StepShape) -> Hidden:
        return self._model.hidden(self._rows.unpack(packed, shape))
