"""StepBatch: what the layers see of a step."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class StepBatch:
    """A step as device tensors. T flat tokens are the B rows' tokens, one row after another.

    token_ids_T, positions_T: int64. slots_T: int64, where each token's KV goes: block * block_size + offset; -1 is
    nowhere. block_tables_BM: int32. context_lens_B: int32, tokens of each row with this step's.
    Rows that decode come first, one token each, and go through attention apart from the others:
    decode_lens_C: int32, context lengths of the first C rows, 0 for those that don't decode; None if none does.
    query_starts_B1: int32, where the tokens of each row start that doesn't decode, and the end; those that do have none
    there. None if all decode.
    logit_rows_L: int64, the flat tokens whose logits are wanted; None is all of them.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    block_tables_BM: Tensor
    context_lens_B: Tensor
    decode_lens_C: Tensor | None
    query_starts_B1: Tensor | None
    logit_rows_L: Tensor | None
