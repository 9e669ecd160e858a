"""RowState: what a rank remembers of each running sequence between steps, and how a plan becomes a StepBatch."""

import numpy as np
import torch
from torch import Tensor

from nanollm.kernels.prepare_decode import DecodeState
from nanollm.layers.sampler import SamplingBatch
from nanollm.layers.step_batch import StepBatch
from nanollm.runtime.step_plan import StepPlan


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

    def apply(self, plan: StepPlan) -> tuple[StepBatch, SamplingBatch, Tensor]:
        """Take the plan's changes and return the step as device tensors, with the sampled rows (int64 [S])."""
        self.start(plan)
        state = self.state
        starts_B1 = np.concatenate(([0], np.cumsum(plan.num_new_B)))
        within_T = np.arange(plan.num_tokens) - np.repeat(starts_B1[:-1], plan.num_new_B)
        positions_T = within_T + np.repeat(plan.num_computed_B, plan.num_new_B)
        rows_T = np.repeat(plan.row_ids_B, plan.num_new_B)
        blocks_T = self._block_table_RM[rows_T, positions_T // self.block_size]
        slots_T = blocks_T.astype(np.int64) * self.block_size + positions_T % self.block_size
        on_device_T = np.repeat(plan.on_device_B, plan.num_new_B)
        host_T = np.zeros(plan.num_tokens, np.int64)
        host_T[on_device_T == 0] = plan.host_tokens
        context_lens_B = plan.num_computed_B + plan.num_new_B
        length_of = dict(zip(plan.row_ids_B.tolist(), context_lens_B.tolist(), strict=True))
        positions_S = np.array([length_of[row] for row in plan.sampled_rows_S.tolist()], np.int64)

        # One host-to-device copy for everything.
        fields = [host_T, positions_T, slots_T, rows_T, on_device_T, starts_B1, context_lens_B]
        fields += [plan.row_ids_B, plan.logit_rows_L, plan.sampled_rows_S, positions_S]
        packed = self._to_device(np.concatenate(fields, dtype=np.int64)).split([len(field) for field in fields])
        host_t, positions_t, slots_t, rows_t, on_device_t, query_starts_b1, context_lens_b = packed[:7]
        row_ids_b, logit_rows_l, sampled_s, positions_s = packed[7:]
        batch = StepBatch(
            token_ids_T=torch.where(on_device_t.bool(), state.last_token_R[rows_t], host_t),
            positions_T=positions_t,
            slots_T=slots_t,
            block_tables_BM=state.block_table_RM[row_ids_b],
            query_starts_B1=query_starts_b1.int(),
            context_lens_B=context_lens_b.int(),
            num_decodes=int((np.cumprod(plan.num_new_B == 1)).sum()),
            logit_rows_L=logit_rows_l,
        )
        sampling = SamplingBatch(
            state.temperature_R[sampled_s], state.seed_R[sampled_s], state.choice_R[sampled_s], positions_s
        )
        return batch, sampling, sampled_s

    def start(self, plan: StepPlan) -> None:
        """Store the sampling parameters of rows that begin a sequence, and what is appended to block tables."""
        if len(plan.params_rows):
            params = plan.params.reshape(-1, 4)
            seeds = np.ascontiguousarray(params[:, 1:3]).view(np.int64)[:, 0]
            temperatures = np.ascontiguousarray(params[:, 0]).view(np.float32)
            rows = self._to_device(plan.params_rows.astype(np.int64))
            self.state.temperature_R[rows] = self._to_device(temperatures)
            self.state.seed_R[rows] = self._to_device(seeds)
            self.state.choice_R[rows] = self._to_device(params[:, 3].astype(np.int64))
        if len(plan.append_blocks):
            index = self._to_device(self.append_on_host(plan))
            self.state.block_table_RM.view(-1)[index] = self._to_device(plan.append_blocks)

    def append_on_host(self, plan: StepPlan) -> np.ndarray:
        """Append to the host's block tables; returns where that is in the flat table, int64."""
        rows = np.repeat(plan.append_rows, plan.append_counts).astype(np.int64)
        firsts = np.cumsum(plan.append_counts) - plan.append_counts
        columns = np.arange(len(rows)) + np.repeat(plan.append_starts - firsts, plan.append_counts)
        self._block_table_RM[rows, columns] = plan.append_blocks
        return rows * self._block_table_RM.shape[1] + columns

    def _to_device(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()  # or the copy would wait for the device
        return tensor.to(self.device, non_blocking=True)
