"""StepPlan: everything a rank must know to run one step, as int32 arrays; NumPy only."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Int32 = NDArray[np.int32]
_MAGIC = 0x6E616E6F  # "nano"
EMPTY = np.zeros(0, np.int32)


@dataclass
class StepPlan:
    """One step of every rank. B rows compute; a row is a slot of the ranks' persistent per-row state.

    Flat tokens are the rows' tokens one row after another, in the order of row_ids_B.

    step: sequence number of the plan, counted from 0; a rank that reads another one than it expects has lost a plan.
    row_ids_B: the rows, each at most once.
    num_new_B: tokens to compute for each row, at least 1.
    num_computed_B: tokens of each row whose KV is in the cache already.
    on_device_B: 1 if the row's one token is the last one sampled in this row, which only the device knows.
    host_tokens: token ids of all other rows, flat.
    append_rows, append_starts, append_counts, append_blocks: block-table appends: for each entry i, the next
        append_counts[i] ids of append_blocks go to row append_rows[i] from table position append_starts[i].
    logit_rows_L: flat token positions whose logits are needed; the first num_sampled belong to sampled_rows_S.
    sampled_rows_S: rows that sample a token in this step, in the order of logit_rows_L.
    params_rows, params: rows that start with new sampling parameters, and 4 values for each: temperature (float32
        bits), seed (low, high 32 bits), choice index.
    """

    step: int
    row_ids_B: Int32
    num_new_B: Int32
    num_computed_B: Int32
    on_device_B: Int32
    host_tokens: Int32
    append_rows: Int32
    append_starts: Int32
    append_counts: Int32
    append_blocks: Int32
    logit_rows_L: Int32
    sampled_rows_S: Int32
    params_rows: Int32
    params: Int32

    @property
    def num_tokens(self) -> int:
        """Tokens this step computes, T."""
        return int(self.num_new_B.sum())

    def pack(self) -> Int32:
        """One int32 array: magic, total length, step, the length of each array, then the arrays."""
        arrays = [getattr(self, name) for name in _ARRAYS]
        header = [_MAGIC, 3 + len(arrays) + sum(map(len, arrays)), self.step, *map(len, arrays)]
        return np.concatenate([np.array(header, np.int32), *arrays])

    @staticmethod
    def unpack(packed: Int32, step: int) -> "StepPlan":
        """The inverse of pack. ValueError if the array is not a whole plan, or not that of `step`."""
        start = 3 + len(_ARRAYS)
        if len(packed) < start or packed[0] != _MAGIC or packed[1] != len(packed):
            raise ValueError(f"not a step plan: {len(packed)} words, header {packed[:3].tolist()}")
        lengths = packed[3:start]
        if lengths.min() < 0 or start + int(lengths.sum(dtype=np.int64)) != len(packed):
            raise ValueError(f"step plan of {len(packed)} words has arrays of {lengths.tolist()} words")
        if packed[2] != step:
            raise ValueError(f"step plan {packed[2]} arrived where {step} was expected")
        ends = start + np.cumsum(lengths)
        return StepPlan(step, *(packed[end - n : end] for n, end in zip(lengths, ends, strict=True)))


_ARRAYS = [f.name for f in fields(StepPlan) if f.name != "step"]


@dataclass
class StepResult:
    """What a step brings back: a token id for each row of sampled_rows_S, and the float32 logits of the other
    logit rows, [L - S, V] on the CPU, if there are any."""

    token_ids: list[int]
    logits: "torch.Tensor | None" = None
