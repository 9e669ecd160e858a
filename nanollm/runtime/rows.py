"""RowState: what a rank remembers of each running sequence between steps, and how a plan becomes a StepBatch."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nanollm.kernels.prepare_decode import DecodeState
from nanollm.kernels.token_rules import BANNED_AT, BIAS, SLOT_SHIFT, UNTIL, SamplerState
from nanollm.layers.sampler import Filters
from nanollm.layers.step_batch import StepBatch
from nanollm.runtime.step_plan import RowRules, StepPlan
from nanollm.sampling_params import (
    BAD_PREFIX,
    BANNED_SLOT,
    FIRST_SLOT,
    MAX_BAD_WORDS,
    MAX_RULED_ROWS,
    MIN_P,
    NUM_PARAMS,
    NUM_SLOTS,
    RULES,
    SINGLES_OUT,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)


@dataclass(frozen=True)
class StepShape:
    """All that the launches of a step with prompt chunks depend on: the lengths T, B, C and L of StepBatch's fields."""

    num_tokens: int
    num_rows: int
    num_decodes: int
    num_logits: int

    @property
    def lengths(self) -> list[int]:
        """Of the fields that RowState.pack puts one after another."""
        tokens, rows = self.num_tokens, self.num_rows
        return [tokens, tokens, tokens, tokens, rows, rows, self.num_decodes, rows + 1, self.num_logits]


def count_decodes(plan: StepPlan) -> int:
    """How many of the first rows compute one token."""
    return int(np.cumprod(plan.num_new_B == 1).sum())


class RowState:
    """R rows of state, and one more as scratch for padding. A row belongs to one running sequence; plans say which.

    Only the first MAX_RULED_ROWS rows have room for rules: the scheduler gives sequences with rules no others.

    The device remembers the token sampled last, so that the next step needn't wait for the host to have read it, the
    sampling parameters, and the block table. The host has the block table too; plans bring only what is appended.

    vocab: token ids of this rank's share of the vocabulary, padding included.
    """

    def __init__(self, num_rows: int, max_blocks: int, block_size: int, vocab: range, device: torch.device) -> None:
        self.device = device
        self._vocab = vocab
        self._filters_R = np.zeros(num_rows, np.int8)
        self.block_size = block_size
        self._block_table_RM = np.zeros((num_rows + 1, max_blocks), np.int32)
        self.state = DecodeState(
            block_table_RM=torch.zeros(num_rows + 1, max_blocks, dtype=torch.int32, device=device),
            last_token_R=torch.zeros(num_rows + 1, dtype=torch.int64, device=device),
        )
        self.sampler = replace(
            SamplerState.empty(min(num_rows, MAX_RULED_ROWS), len(vocab), device),
            params_RP=torch.zeros(num_rows + 1, NUM_PARAMS, dtype=torch.int32, device=device),
        )

    def pack(self, plan: StepPlan, shape: StepShape) -> np.ndarray:
        """The plan as one int64 array for unpack(), padded to `shape`; start() must have taken it already."""
        starts_B1 = np.concatenate(([0], np.cumsum(plan.num_new_B)))
        within_T = np.arange(plan.num_tokens) - np.repeat(starts_B1[:-1], plan.num_new_B)
        positions_T = within_T + np.repeat(plan.num_computed_B, plan.num_new_B)
        rows_T = np.repeat(plan.row_ids_B, plan.num_new_B)
        blocks_T = self._block_table_RM[rows_T, positions_T // self.block_size]
        slots_T = blocks_T.astype(np.int64) * self.block_size + positions_T % self.block_size
        host_T = np.full(plan.num_tokens, -1)
        host_T[np.repeat(plan.on_device_B == 0, plan.num_new_B)] = plan.host_tokens
        context_lens_B = plan.num_computed_B + plan.num_new_B
        num_decodes = count_decodes(plan)
        scratch = len(self._block_table_RM) - 1
        fields = [  # values, and what to pad them with
            (host_T, 0),
            (positions_T, 0),
            (slots_T, -1),
            (rows_T, scratch),
            (plan.row_ids_B, scratch),
            (context_lens_B, 0),
            (context_lens_B[:num_decodes], 0),
            (np.maximum(starts_B1, num_decodes), plan.num_tokens),
            (plan.logit_rows_L, 0),
        ]
        packed = np.empty(sum(shape.lengths), np.int64)
        end = 0
        for (values, fill), length in zip(fields, shape.lengths, strict=True):
            assert len(values) <= length, "the shape does not hold the plan"
            packed[end : end + len(values)] = values
            packed[end + len(values) : end + length] = fill
            end += length
        return packed

    def unpack(self, packed: Tensor, shape: StepShape) -> StepBatch:
        """The step on the device, from pack()'s array and the tokens that were sampled last. CUDA graphs record it."""
        host_t, positions_t, slots_t, rows_t, rows_b, lens_b, decode_lens_c, starts_b1, logit_rows_l = packed.split(
            shape.lengths
        )
        return StepBatch(
            token_ids_T=torch.where(host_t < 0, self.state.last_token_R[rows_t], host_t),
            positions_T=positions_t,
            slots_T=slots_t,
            block_tables_BM=self.state.block_table_RM[rows_b],
            context_lens_B=lens_b.int(),
            decode_lens_C=decode_lens_c.int() if shape.num_decodes else None,
            query_starts_B1=starts_b1.int(),
            logit_rows_L=logit_rows_l,
        )

    def sampled(self, plan: StepPlan) -> Tensor:
        """Int64 [2, S]: the rows that sample, and how many tokens precede what they sample."""
        length_of = dict(zip(plan.row_ids_B.tolist(), (plan.num_computed_B + plan.num_new_B).tolist(), strict=True))
        positions_S = [length_of[row] for row in plan.sampled_rows_S.tolist()]
        return self.to_device(np.array((plan.sampled_rows_S, positions_S), np.int64))

    def filters(self, plan: StepPlan) -> Filters:
        """The most that any of the rows that sample needs."""
        return Filters(self._filters_R[plan.sampled_rows_S].max(initial=Filters.NONE))

    def wanted_logprobs(self, plan: StepPlan, rows: slice) -> tuple[Tensor, int] | None:
        """Which of these logit rows want log probabilities, and the most top tokens that any row of the step does."""
        index = np.flatnonzero(plan.num_logprobs_L[rows] >= 0)
        return (self.to_device(index), int(plan.num_logprobs_L.max())) if len(index) else None

    def set_masks(self, plan: StepPlan, masks: np.ndarray) -> None:
        """The masks of the rows that the plan says have one, as SamplePlan.share has them."""
        rows = plan.sampled_rows_S[plan.masked].astype(np.int64)
        self.sampler.masks_RW[self.to_device(rows)] = self.to_device(masks.reshape(len(rows), -1))

    def start(self, plan: StepPlan) -> None:
        """Store the sampling parameters of rows that begin a sequence, and what is appended to block tables."""
        if len(plan.params_rows):
            params = plan.params.reshape(-1, NUM_PARAMS)
            self.sampler.params_RP[self.to_device(plan.params_rows.astype(np.int64))] = self.to_device(params)
            floats, rest = params.view(np.float32), plan.rules
            for i, row in enumerate(plan.params_rows.tolist()):
                self._filters_R[row] = Filters.of(
                    floats[i, TEMPERATURE], int(params[i, TOP_K]), floats[i, TOP_P], floats[i, MIN_P]
                )
                if params[i, RULES] & SINGLES_OUT:
                    rules, rest = RowRules.unpack(rest)
                    self._start_rules(row, rules)
        if len(plan.append_blocks):
            index = self.to_device(self.append_on_host(plan))
            self.state.block_table_RM.view(-1)[index] = self.to_device(plan.append_blocks)

    def _start_rules(self, row: int, rules: RowRules) -> None:
        """Say on the device what is special about tokens in this row."""
        words_V = self.sampler.words_RV[row]
        words_V.fill_(0 if rules.allowed_ids is None else BANNED_SLOT << SLOT_SHIFT)
        allowed = None if rules.allowed_ids is None else set(rules.allowed_ids)
        if rules.allowed_ids:
            words_V[self._ours(rules.allowed_ids)[0]] = 0
        slots_3S = np.zeros((3, NUM_SLOTS), np.int32)
        slots_3S[BANNED_AT] = -1
        slot_of = {token_id: FIRST_SLOT + i for i, token_id in enumerate(rules.slots)}
        for token_id, (bias, until) in rules.slots.items():
            slots_3S.view(np.float32)[BIAS, slot_of[token_id]] = bias
            slots_3S[UNTIL, slot_of[token_id]] = until
        ids = [token_id for token_id in slot_of if allowed is None or token_id in allowed]
        index, slots = self._ours(ids, [slot_of[token_id] for token_id in ids])
        words_V[index] = slots << SLOT_SHIFT
        index = self._ours(rules.prompt_ids)[0]
        words_V[index] = words_V[index] | -(2**31)
        words_V.index_add_(0, *self._ours(rules.output_ids, [1] * len(rules.output_ids)))
        if rules.bad_words:
            table_WN = np.full((MAX_BAD_WORDS, 1 + BAD_PREFIX), -1, np.int32)
            table_WN[:, 0] = 0
            for i, (last, prefix) in enumerate(rules.bad_words):
                table_WN[i, 0] = slot_of[last]
                table_WN[i, 1 + BAD_PREFIX - len(prefix) :] = prefix
                if rules.output_ids[-len(prefix) :] == prefix:
                    slots_3S[BANNED_AT, slot_of[last]] = rules.num_tokens
            self.sampler.bad_words_RWN[row] = self.to_device(table_WN)
            tokens = [-2] * BAD_PREFIX + rules.output_ids
            self.sampler.last_RH[row] = self.to_device(np.array(tokens[-BAD_PREFIX:], np.int32))
        self.sampler.slots_R3S[row] = self.to_device(slots_3S)

    def _ours(self, token_ids: list[int], values: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Those of these tokens that are in this rank's share: where in it, int64, and their values, int32."""
        ids = np.array(token_ids, np.int64)
        ours = (ids >= self._vocab.start) & (ids < self._vocab.stop)
        given = np.array(token_ids if values is None else values, np.int32)
        return self.to_device(ids[ours] - self._vocab.start), self.to_device(given[ours])

    def append_on_host(self, plan: StepPlan) -> np.ndarray:
        """Append to the host's block tables; returns where that is in the flat table, int64."""
        rows = np.repeat(plan.append_rows, plan.append_counts).astype(np.int64)
        firsts = np.cumsum(plan.append_counts) - plan.append_counts
        columns = np.arange(len(rows)) + np.repeat(plan.append_starts - firsts, plan.append_counts)
        self._block_table_RM[rows, columns] = plan.append_blocks
        return rows * self._block_table_RM.shape[1] + columns

    def to_device(self, values: np.ndarray) -> Tensor:
        """A copy on the device, which doesn't wait for it."""
        tensor = torch.from_numpy(values)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()  # or the copy would wait for the device
        return tensor.to(self.device, non_blocking=True)
