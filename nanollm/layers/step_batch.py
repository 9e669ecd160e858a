"""StepBatch: what the layers see of a step."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class StepBatch:
    """A step as device tensors. T flat tokens are the B rows' tokens, one row after another.

    token_ids_T, positions_T: int64. slots_T: int64, where each token's KV goes: block * block_size + offset.
    block_tables_BM: int32. query_lens, context_lens: tokens of each row in this step, and with those before it.
    logit_rows_L: int64, the flat tokens whose logits are wanted.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    block_tables_BM: Tensor
    query_lens: list[int]
    context_lens: list[int]
    logit_rows_L: Tensor
