"""RowState: what a rank remembers of each running sequence between steps, and how a plan becomes a StepBatch."""

import numpy as np
import torch
from torch import Tensor

from nanollm.layers.sampler import SamplingBatch
from nanollm.layers.step_batch import StepBatch
from nanollm.runtime.step_plan import StepPlan


class RowState:
    """R rows of device state. A row belongs to one running sequence; rank 0's plans say which.

    last_token_R: the token sampled last, so that the next step needn't wait for the host to have read it.
    The block table is kept on the host and on the device; the plan brings only what is appended.
    """

    def __init__(self, num_rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._device = device
        self._block_size = block_size
        self._block_table_RM = np.zeros((num_rows, max_blocks), np.int32)
        self.block_table_RM = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device)
        self.last_token_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.temperature_R = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self.seed_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.choice_R = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def apply(self, plan: StepPlan) -> tuple[StepBatch, SamplingBatch, Tensor]:
        """Take the plan's changes and return the step as device tensors, with the sampled rows (int64 [S])."""
        self._start_rows(plan)
        self._append_blocks(plan)
        starts_B = np.cumsum(plan.num_new_B) - plan.num_new_B
        within_T = np.arange(plan.num_tokens) - np.repeat(starts_B, plan.num_new_B)
        positions_T = within_T + np.repeat(plan.num_computed_B, plan.num_new_B)
        rows_T = np.repeat(plan.row_ids_B, plan.num_new_B)
        blocks_T = self._block_table_RM[rows_T, positions_T // self._block_size]
        slots_T = blocks_T.astype(np.int64) * self._block_size + positions_T % self._block_size
        on_device_T = np.repeat(plan.on_device_B, plan.num_new_B)
        host_T = np.zeros(plan.num_tokens, np.int64)
        host_T[on_device_T == 0] = plan.host_tokens
        length_of = dict(zip(plan.row_ids_B.tolist(), (plan.num_computed_B + plan.num_new_B).tolist(), strict=True))
        positions_S = np.array([length_of[row] for row in plan.sampled_rows_S.tolist()], np.int64)

        # One host-to-device copy for everything.
        fields = [host_T, positions_T, slots_T, rows_T, on_device_T]
        fields += [plan.row_ids_B, plan.logit_rows_L, plan.sampled_rows_S, positions_S]
        packed = self._to_device(np.concatenate(fields, dtype=np.int64)).split([len(field) for field in fields])
        host_t, positions_t, slots_t, rows_t, on_device_t, row_ids_b, logit_rows_l, sampled_s, positions_s = packed
        batch = StepBatch(
            token_ids_T=torch.where(on_device_t.bool(), self.last_token_R[rows_t], host_t),
            positions_T=positions_t,
            slots_T=slots_t,
            block_tables_BM=self.block_table_RM[row_ids_b],
            query_lens=plan.num_new_B.tolist(),
            context_lens=(plan.num_computed_B + plan.num_new_B).tolist(),
            logit_rows_L=logit_rows_l,
        )
        sampling = SamplingBatch(
            self.temperature_R[sampled_s], self.seed_R[sampled_s], self.choice_R[sampled_s], positions_s
        )
        return batch, sampling, sampled_s

    def _start_rows(self, plan: StepPlan) -> None:
        """Store the sampling parameters of rows that begin a sequence."""
        if not len(plan.params_rows):
            return
        params = plan.params.reshape(-1, 4)
        seeds = np.ascontiguousarray(params[:, 1:3]).view(np.int64)[:, 0]
        temperatures = np.ascontiguousarray(params[:, 0]).view(np.float32)
        rows = self._to_device(plan.params_rows.astype(np.int64))
        self.temperature_R[rows] = self._to_device(temperatures)
        self.seed_R[rows] = self._to_device(seeds)
        self.choice_R[rows] = self._to_device(params[:, 3].astype(np.int64))

    def _append_blocks(self, plan: StepPlan) -> None:
        if not len(plan.append_blocks):
            return
        rows = np.repeat(plan.append_rows, plan.append_counts)
        firsts = np.cumsum(plan.append_counts) - plan.append_counts
        columns = np.arange(len(rows)) + np.repeat(plan.append_starts - firsts, plan.append_counts)
        self._block_table_RM[rows, columns] = plan.append_blocks
        index = self._to_device(rows.astype(np.int64) * self._block_table_RM.shape[1] + columns)
        self.block_table_RM.view(-1)[index] = self._to_device(plan.append_blocks)

    def _to_device(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()  # or the copy would wait for the device
        return tensor.to(self._device, non_blocking=True)
