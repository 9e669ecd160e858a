"""StepBatch: what the layers see of a step."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class StepBatch:
    """A step as device tensors. T flat tokens are the B rows' tokens, one row after another.

    token_ids_T, positions_T: int64. slots_T: int64, where each token's KV goes: block * block_size + offset; -1 is
    nowhere. block_tables_BM: int32. query_starts_B1: int32, where each row's tokens start in T, and T at the end.
    context_lens_B: int32, tokens of each row with this step's. num_decodes: the first rows, of one token each.
    logit_rows_L: int64, the flat tokens whose logits are wanted; None is all of them.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    block_tables_BM: Tensor
    query_starts_B1: Tensor
    context_lens_B: Tensor
    num_decodes: int
    logit_rows_L: Tensor | None
