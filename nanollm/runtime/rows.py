"""RowState: what a rank remembers of each running sequence between steps, and how a plan becomes a StepBatch."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanollm.kernels.prepare_decode import DecodeState
from nanollm.layers.sampler import SamplingBatch
from nanollm.layers.step_batch import StepBatch
from nanollm.runtime.step_plan import StepPlan


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

    The device remembers the token sampled last, so that the next step needn't wait for the host to have read it, the
    sampling parameters, and the block table. The host has the block table too; plans bring only what is appended.
    """

    def __init__(self, num_rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self.device = device
        self.block_size = block_size
        self._block_table_RM = np.zeros((num_rows + 1, max_blocks), np.int32)
        self.state = DecodeState(
            block_table_RM=torch.zeros(num_rows + 1, max_blocks, dtype=torch.int32, device=device),
            last_token_R=torch.zeros(num_rows + 1, dtype=torch.int64, device=device),
            temperature_R=torch.zeros(num_rows + 1, dtype=torch.float32, device=device),
            seed_R=torch.zeros(num_rows + 1, dtype=torch.int64, device=device),
            choice_R=torch.zeros(num_rows + 1, dtype=torch.int64, device=device),
        )

    def pack(self, plan: StepPlan, shape: "StepShape") -> np.ndarray:
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
        padding = {"host": 0, "slot": -1, "row": len(self._block_table_RM) - 1, "start": plan.num_tokens}
        fields = [
            (host_T, shape.num_tokens, padding["host"]),
            (positions_T, shape.num_tokens, 0),
            (slots_T, shape.num_tokens, padding["slot"]),
            (rows_T, shape.num_tokens, padding["row"]),
            (plan.row_ids_B, shape.num_rows, padding["row"]),
            (context_lens_B, shape.num_rows, 0),
            (context_lens_B[:num_decodes], shape.num_decodes, 0),
            (np.maximum(starts_B1, num_decodes), shape.num_rows + 1, padding["start"]),
            (plan.logit_rows_L, shape.num_logits, 0),
        ]
        packed = np.empty(sum(shape.lengths), np.int64)
        end = 0
        for values, length, fill in fields:
            packed[end : end + len(values)] = values
            packed[end + len(values) : end + length] = fill
            end += length
        return packed

    def unpack(self, packed: Tensor, shape: "StepShape") -> StepBatch:
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

    def sampling(self, plan: StepPlan) -> tuple[SamplingBatch, Tensor]:
        """The parameters of the rows that sample, and those rows (int64 [S])."""
        length_of = dict(zip(plan.row_ids_B.tolist(), (plan.num_computed_B + plan.num_new_B).tolist(), strict=True))
        positions_S = [length_of[row] for row in plan.sampled_rows_S.tolist()]
        rows_S, positions_S = self.to_device(np.array((plan.sampled_rows_S, positions_S), np.int64))
        state = self.state
        batch = SamplingBatch(state.temperature_R[rows_S], state.seed_R[rows_S], state.choice_R[rows_S], positions_S)
        return batch, rows_S

    def start(self, plan: StepPlan) -> None:
        """Store the sampling parameters of rows that begin a sequence, and what is appended to block tables."""
        if len(plan.params_rows):
            params = plan.params.reshape(-1, 4)
            seeds = np.ascontiguousarray(params[:, 1:3]).view(np.int64)[:, 0]
            temperatures = np.ascontiguousarray(params[:, 0]).view(np.float32)
            rows = self.to_device(plan.params_rows.astype(np.int64))
            self.state.temperature_R[rows] = self.to_device(temperatures)
            self.state.seed_R[rows] = self.to_device(seeds)
            self.state.choice_R[rows] = self.to_device(params[:, 3].astype(np.int64))
        if len(plan.append_blocks):
            index = self.to_device(self.append_on_host(plan))
            self.state.block_table_RM.view(-1)[index] = self.to_device(plan.append_blocks)

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
