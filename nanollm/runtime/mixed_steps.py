"""Steps with prompt chunks: kernel by kernel, or as one CUDA graph for each shape that comes again."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanollm.layers.hidden import Hidden
from nanollm.layers.sampler import Sampler
from nanollm.models.qwen3 import Qwen3ForCausalLM
from nanollm.runtime.cuda_graphs import capturing
from nanollm.runtime.rows import RowState, StepShape, count_decodes
from nanollm.runtime.step_plan import StepPlan

MAX_GRAPHS = 48
_MIN_PADDED = 1024


def padded_length(num_tokens: int) -> int:
    """What a step's tokens are padded to: multiples of 16, or of an eighth of the power of two below."""
    step = max(16, 1 << max((num_tokens - 1).bit_length() - 4, 0))
    return -(-num_tokens // step) * step


def longest_padded(layer_weights: int, max_num_batched_tokens: int) -> int:
    """Up to how many tokens steps are padded and captured: where launching takes longer than computing.

    A layer's launches take a CPU about 0.4 ms, in which a GPU multiplies 0.15e12 numbers.
    layer_weights: how many weights of a layer each token is multiplied with on this rank.
    """
    return min(max(_MIN_PADDED, 150_000_000_000 // layer_weights), padded_length(max_num_batched_tokens))


class MixedSteps:
    """Runs steps in which some row computes more than one token, or one that is not followed by sampling.

    The forward part, up to the hidden states whose logits are wanted, is captured when a padded shape comes a second
    time. LM head and sampling follow for exactly the rows that there are.

    max_padded: longest step that is padded, captured or not, so that both compute the same; 0 for none.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        rows: RowState,
        sampler: Sampler,
        max_rows: int,
        max_padded: int,
        *,
        capture: bool,
    ) -> None:
        self._model, self._rows, self._sampler = model, rows, sampler
        self._max_rows, self._max_padded, self._captures = max_rows, max_padded, capture
        self._packed = torch.zeros(sum(self._largest.lengths), dtype=torch.int64, device=rows.device)
        # Where graphs leave residual and pending of the rows whose logits are wanted; theirs serves the next graph too.
        weight = model.lm_head.weight
        self._hidden = weight.new_empty(2, 2 * max_rows if capture else 0, weight.shape[1])
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, Hidden]] = {}
        self._seen: set[StepShape] = set()
        self._pool: Any = None
        self._graph_bytes = 0  # what the largest one takes, once that is known

    def forward(self, plan: StepPlan) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor | None, Tensor | None]]]:
        """Queue the step up to its logits. Returns those of the rows that sample, [S, V_r]; and what queues the rest,
        given these or others in their place. It returns (ids int64 [S], log probabilities as of Sampler.token_logprobs
        if any row wants them, float32 logits [rows, V] of the other rows that want those, if any)."""
        self._rows.start(plan)
        shape = self._shape(plan)
        packed = self._rows.to_device(self._rows.pack(plan, shape))
        hidden = self._replay(packed, shape) if shape.num_tokens <= self._max_padded else self._forward(packed, shape)
        logits_r = self._model.lm_head(hidden.rows(slice(len(plan.logit_rows_L))))
        sampled_r, others_r = logits_r.tensor_split([len(plan.sampled_rows_S)])
        return sampled_r, lambda given_r: self._sample(plan, given_r, sampled_r, others_r)

    def _sample(
        self, plan: StepPlan, given_r: Tensor, sampled_r: Tensor, others_r: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        num_sampled = len(plan.sampled_rows_S)
        rows_S, positions_S = self._rows.sampled(plan)
        wanted = self._rows.wanted_logprobs(plan, slice(num_sampled))
        ids_S, logprobs = self._sampler.sample(
            given_r, rows_S, positions_S, self._rows.filters(plan), wanted, sampled_r
        )
        if not len(plan.targets):
            return ids_S, logprobs, None
        if (wanted := self._rows.wanted_logprobs(plan, slice(num_sampled, None))) is not None:
            index_L, num_top = wanted
            targets_L = self._rows.to_device(plan.targets.astype(np.int64))[index_L]
            of_prompt = self._sampler.token_logprobs(others_r[index_L], targets_L, num_top)
            logprobs = of_prompt if logprobs is None else torch.cat((logprobs, of_prompt))
        raw = self._rows.to_device(np.flatnonzero(plan.targets < 0))
        return ids_S, logprobs, self._model.lm_head.gather(others_r[raw]) if len(raw) else None

    def launch_all(self, largest: StepPlan) -> None:
        """Launch every kernel that steps may need: the largest one's, those of each power of two, a long prompt's."""
        logits_r, sample = self.forward(largest)
        sample(logits_r)
        self._seen.clear()
        # Padded steps have as many rows as tokens, if there may be so many; longer ones have those that they have.
        size = 1 if padded_length(largest.num_tokens) > self._max_padded else padded_length(1)
        while padded_length(size) <= self._max_padded:
            num_rows = min(self._max_rows, size)
            hidden = self._forward_nothing(StepShape(padded_length(size), num_rows, num_rows, 2 * self._max_rows))
            self._model.lm_head(hidden.rows(slice(1)))  # whose norm is the same kernel for any number of rows
            size *= 2
        self._forward_nothing(StepShape(self._max_padded, 1, 0, 2 * self._max_rows))

    def capture_largest(self) -> None:
        """Capture the longest padded step, to see what memory graphs take."""
        self._forward_nothing(self._largest)
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        self._capture(self._largest)
        self._graph_bytes = before - torch.cuda.mem_get_info()[0]

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
        alone = num_rows == 1 and num_tokens > 1
        num_rows = 1 if alone else min(self._max_rows, padded)
        return StepShape(padded, num_rows, 0 if alone else num_rows, 2 * self._max_rows)

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
        # Graphs have memory of their own. PyTorch's cache is emptied for it only if it must be: steps wait for that.
        if torch.cuda.mem_get_info()[0] < self._graph_bytes:
            torch.cuda.empty_cache()
        with capturing(self._pool) as graph:
            hidden = self._forward(self._packed[: sum(shape.lengths)], shape)
            given = (hidden.residual_TD, hidden.pending_TD)
            kept = [None if x is None else to.copy_(x) for x, to in zip(given, self._hidden, strict=True)]
            hidden = replace(hidden, residual_TD=kept[0], pending_TD=kept[1])
        self._graphs[shape] = graph, hidden

    def _forward_nothing(self, shape: StepShape) -> Hidden:
        """A step of padding."""
        packed = self._rows.pack(StepPlan.empty(0), shape)
        return self._forward(self._packed[: len(packed)].copy_(self._rows.to_device(packed)), shape)

    def _forward(self, packed: Tensor, shape: StepShape) -> Hidden:
        return self._model.hidden(self._rows.unpack(packed, shape))
