"""What a decode step needs, from the few numbers that the host sends and the state that stayed on the device."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from nanollm.kernels.backend import runs_triton, tl, triton

# The host's words for each row of the step, in this order.
ROW, COMPUTED, HOST_TOKEN, NEW_BLOCK = range(4)
NUM_WORDS = 4


@dataclass
class DecodeState:
    """The per-row state on the device, R rows; the last row is scratch, for padding.

    block_table_RM: int32. last_token_R: int64.
    """

    block_table_RM: Tensor
    last_token_R: Tensor


@dataclass
class DecodeInputs:
    """One token of each of B rows, ready for the model and the sampler; fields as in StepBatch and RowLogits.

    rows_B: int64, the row of each; padding is the scratch row, has context 0 and slot -1.
    """

    rows_B: Tensor
    token_ids_B: Tensor
    positions_B: Tensor
    slots_B: Tensor
    context_lens_B: Tensor
    block_tables_BM: Tensor
    sample_positions_B: Tensor

    def first(self, size: int) -> "DecodeInputs":
        """The first `size` rows of every buffer."""
        return DecodeInputs(*(getattr(self, field.name)[:size] for field in fields(self)))

    @staticmethod
    def empty(size: int, state: DecodeState) -> "DecodeInputs":
        """Buffers for a bucket of `size` rows."""
        dtypes = {"context_lens_B": torch.int32, "block_tables_BM": torch.int32}
        shape = {"block_tables_BM": (size, state.block_table_RM.shape[1])}
        device = state.last_token_R.device
        names = [field.name for field in fields(DecodeInputs)]
        return DecodeInputs(
            **{n: torch.zeros(shape.get(n, size), dtype=dtypes.get(n, torch.int64), device=device) for n in names}
        )


def prepare_decode_reference(words_BW: Tensor, state: DecodeState, inputs: DecodeInputs, block_size: int) -> None:
    """The definition; arguments as in prepare_decode."""
    row, computed, host_token, new_block = words_BW.long().unbind(1)
    padding = row < 0
    row = torch.where(padding, len(state.last_token_R) - 1, row)
    column = computed // block_size
    state.block_table_RM[row, column] = torch.where(
        new_block < 0, state.block_table_RM[row, column], new_block.to(torch.int32)
    )
    inputs.rows_B.copy_(row)
    inputs.token_ids_B.copy_(torch.where(host_token < 0, state.last_token_R[row], host_token))
    inputs.positions_B.copy_(computed)
    block = state.block_table_RM[row, column].long()
    inputs.slots_B.copy_(torch.where(padding, -1, block * block_size + computed % block_size))
    inputs.context_lens_B.copy_(torch.where(padding, 0, computed + 1))
    inputs.block_tables_BM.copy_(state.block_table_RM[row])
    inputs.sample_positions_B.copy_(computed + 1)


@triton.jit
def _prepare_decode_kernel(
    words_BW, block_table_RM, last_token_R, rows_B, token_ids_B, positions_B, slots_B, context_lens_B, block_tables_BM,
    sample_positions_B, scratch_row, num_columns,
    WORDS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(words_BW + b * WORDS).to(tl.int64)
    computed = tl.load(words_BW + b * WORDS + 1).to(tl.int64)
    host_token = tl.load(words_BW + b * WORDS + 2).to(tl.int64)
    new_block = tl.load(words_BW + b * WORDS + 3)
    padding = row < 0
    row = tl.where(padding, scratch_row, row)
    column = computed // BLOCK_SIZE
    last_block = tl.load(block_table_RM + row * num_columns + column)
    last_block = tl.where(new_block < 0, last_block, new_block)
    tl.store(block_table_RM + row * num_columns + column, last_block)
    tl.store(rows_B + b, row)
    tl.store(token_ids_B + b, tl.where(host_token < 0, tl.load(last_token_R + row), host_token))
    tl.store(positions_B + b, computed)
    slot = last_block.to(tl.int64) * BLOCK_SIZE + computed % BLOCK_SIZE
    tl.store(slots_B + b, tl.where(padding, -1, slot))
    tl.store(context_lens_B + b, tl.where(padding, 0, computed + 1).to(tl.int32))
    tl.store(sample_positions_B + b, computed + 1)
    # The table up to this context only: a large max_model_len costs short contexts nothing. The last block comes from
    # the register, since the store above may not be visible yet.
    for start in range(0, column + 1, TILE):
        m = start + tl.arange(0, TILE)
        blocks = tl.load(block_table_RM + row * num_columns + m, mask=m < column, other=0)
        blocks = tl.where(m == column, last_block, blocks)
        tl.store(block_tables_BM + b * num_columns + m, blocks, mask=m <= column)


def _prepare_decode_triton(words_BW: Tensor, state: DecodeState, inputs: DecodeInputs, block_size: int) -> None:
    _prepare_decode_kernel[(len(words_BW),)](
        words_BW,
        state.block_table_RM,
        state.last_token_R,
        inputs.rows_B,
        inputs.token_ids_B,
        inputs.positions_B,
        inputs.slots_B,
        inputs.context_lens_B,
        inputs.block_tables_BM,
        inputs.sample_positions_B,
        len(state.last_token_R) - 1,
        state.block_table_RM.shape[1],
        WORDS=NUM_WORDS,
        BLOCK_SIZE=block_size,
        TILE=256,
    )


def prepare_decode(words_BW: Tensor, state: DecodeState, inputs: DecodeInputs, block_size: int) -> None:
    """Fill `inputs` for a step of one token a row, and put new blocks in the rows' block tables.

    words_BW: int32 [B, 4]: row (-1 for padding), tokens already computed, the token if the host knows it or -1 if it is
    the one sampled last in the row, and a new block for it or -1. Reads and writes a few words a row, and of block
    tables, on a GPU, only what is in use.
    """
    run = _prepare_decode_triton if runs_triton(words_BW) else prepare_decode_reference
    run(words_BW, state, inputs, block_size)
