"""What a row's sampling parameters do to single logits: bans, bias and penalties, in vLLM's order.

1. Tokens outside allowed_token_ids, or outside the row's mask (a grammar's), tokens that would complete one of
bad_words, and stop tokens before min_tokens, get -inf. 2. logit_bias is added. 3. repetition_penalty divides positive
and multiplies negative logits of tokens in the prompt or the output (Keskar et al., 2019); frequency_penalty × the
token's count in the output is subtracted, and presence_penalty if that count is not 0. All in float32; NaN is -inf.

What is special about a token in a row is one 32-bit word, kept on the device, so a row needs no host round trip: the
token's count in the output, whether it is in the prompt, and a slot, which says its bias and when it is banned.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanollm.kernels.backend import tl, triton
from nanollm.sampling_params import (
    BAD_PREFIX,
    BANNED_SLOT,
    FREQUENCY,
    HAS_MASK,
    MAX_BAD_WORDS,
    NUM_PARAMS,
    NUM_SLOTS,
    ONLY_BANS,
    PRESENCE,
    REPETITION,
    RULES,
    SINGLES_OUT,
)

SLOT_SHIFT, SLOT_MASK = 21, NUM_SLOTS - 1  # a word: count in bits 0-20, slot in bits 21-30, in the prompt in bit 31
COUNT_MASK = (1 << SLOT_SHIFT) - 1
# Planes of slots_R3S: float32 bits; banned at smaller positions; banned at this position.
BIAS, UNTIL, BANNED_AT = 0, 1, 2

_REPETITION, _FREQUENCY, _PRESENCE, _RULES = (
    tl.constexpr(column) for column in (REPETITION, FREQUENCY, PRESENCE, RULES)
)
_SLOT_SHIFT, _SLOT_MASK, _COUNT_MASK = tl.constexpr(SLOT_SHIFT), tl.constexpr(SLOT_MASK), tl.constexpr(COUNT_MASK)
_NUM_SLOTS, _BANNED_SLOT = tl.constexpr(NUM_SLOTS), tl.constexpr(BANNED_SLOT)
_SINGLES_OUT, _HAS_MASK, _ONLY_BANS = (tl.constexpr(flag) for flag in (SINGLES_OUT, HAS_MASK, ONLY_BANS))
PARAMS_STRIDE = tl.constexpr(NUM_PARAMS)


@dataclass
class SamplerState:
    """What the sampler remembers of each of R rows, on the device. All int32.

    params_RP: the columns of nanollm.sampling_params; the last row is scratch, for padding. The others may have fewer
        rows, and are read only where the column RULES says so.
    words_RV: of the tokens of this rank's share of the vocabulary.
    slots_R3S: bias and bans of NUM_SLOTS slots, zeros in slot 0. last_RH: the BAD_PREFIX tokens sampled last, oldest
        first, -2 for none.
    bad_words_RWN: [R, MAX_BAD_WORDS, 1 + BAD_PREFIX]: slot of the last token (0 for no word), then the tokens before
        it, right-aligned, -1 on the left.
    masks_RW: of rows that have a mask, a bit for each token of words_RV, the lowest first; 1 allows it.
    """

    params_RP: Tensor
    words_RV: Tensor
    slots_R3S: Tensor
    last_RH: Tensor
    bad_words_RWN: Tensor
    masks_RW: Tensor

    @staticmethod
    def empty(num_rows: int, vocab_share: int, device: torch.device) -> "SamplerState":
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return SamplerState(
            zeros(num_rows, NUM_PARAMS),
            zeros(num_rows, vocab_share),
            zeros(num_rows, 3, NUM_SLOTS),
            zeros(num_rows, BAD_PREFIX) - 2,
            zeros(num_rows, MAX_BAD_WORDS, 1 + BAD_PREFIX),
            zeros(num_rows, -(-vocab_share // 32)),
        )


@dataclass
class RowLogits:
    """Logits to sample from, and the rows they belong to.

    logits_SV: any float dtype, columns adjacent; this rank's share of the vocabulary, which starts at token first_id,
        a multiple of 128. rows_S: int64, rows of the state. positions_S: int64, tokens before the one to be sampled.
    has_rules: False if the rules were applied already. raw_dtype: what the logits were before that, if not as now.
    scratch_SV: float32, for kernels to keep the logits of rows with rules in once they are applied; rows without any
        are never touched. counts_SPB: int32, [rows, parts of a row, bins of kernels.histogram], for kernels to count
        in; rows without top_k and top_p, and of temperature 0, never are.
    """

    logits_SV: Tensor
    rows_S: Tensor
    positions_S: Tensor
    state: SamplerState
    first_id: int = 0
    has_rules: bool = True
    raw_dtype: torch.dtype | None = None
    scratch_SV: Tensor | None = None
    counts_SPB: Tensor | None = None

    def ints(self, column: int) -> Tensor:
        """A column of the rows' parameters, int64 [S]."""
        return self.state.params_RP[self.rows_S, column].long()

    def floats(self, column: int) -> Tensor:
        """A column of the rows' parameters, float32 [S]."""
        return self.state.params_RP[self.rows_S, column].view(torch.float32)

    def processed(self) -> "RowLogits":
        """The same with the rules applied, float32: the definition."""
        if not self.has_rules:
            return self
        x_SV = self.logits_SV.float()
        x_SV = x_SV.where(x_SV == x_SV, float("-inf"))
        for s in (self.ints(RULES) & SINGLES_OUT).nonzero()[:, 0].tolist():
            x_SV[s] = self._apply_rules(x_SV[s], s)
        index_M = (self.ints(RULES) & HAS_MASK).nonzero()[:, 0]
        if len(index_M):
            x_SV[index_M] = replace(self, rows_S=self.rows_S[index_M]).masked(x_SV[index_M])
        return replace(self, logits_SV=x_SV, has_rules=False)

    def masked(self, x_SV: Tensor) -> Tensor:
        """x_SV, but -inf for tokens that the rows' masks don't allow. CUDA graphs record it."""
        masks_RW = self.state.masks_RW
        masks_SW = masks_RW[self.rows_S.clamp(max=len(masks_RW) - 1)]
        masks_SW = masks_SW.where((self.ints(RULES) & HAS_MASK != 0)[:, None], -1)
        bit_8 = 1 << torch.arange(8, dtype=torch.uint8, device=x_SV.device)
        allowed_SV = (masks_SW.view(torch.uint8)[..., None] & bit_8).flatten(1)[:, : x_SV.shape[1]] != 0
        return x_SV.where(allowed_SV, float("-inf"))

    def _apply_rules(self, x_V: Tensor, s: int) -> Tensor:
        row, position = self.rows_S[s], self.positions_S[s]
        word_V = self.state.words_RV[row, : len(x_V)]
        count_V, in_prompt_V, slot_V = word_V & COUNT_MASK, word_V < 0, (word_V >> SLOT_SHIFT & SLOT_MASK).long()
        bias_V, until_V, banned_at_V = self.state.slots_R3S[row][:, slot_V]
        banned_V = (slot_V == BANNED_SLOT) | (position < until_V) | ((position == banned_at_V) & (slot_V > 0))
        x_V = torch.where(banned_V, float("-inf"), x_V + bias_V.view(torch.float32))
        penalty = self.floats(REPETITION)[s]
        x_V = torch.where(in_prompt_V | (count_V > 0), torch.where(x_V > 0, x_V / penalty, x_V * penalty), x_V)
        return x_V - self.floats(FREQUENCY)[s] * count_V - self.floats(PRESENCE)[s] * (count_V > 0)


@triton.jit
def int_param(params_RP, row, column: tl.constexpr):
    return tl.load(params_RP + row * PARAMS_STRIDE + column)


@triton.jit
def float_param(params_RP, row, column: tl.constexpr):
    return tl.load(params_RP + row * PARAMS_STRIDE + column).to(tl.float32, bitcast=True)


@triton.jit
def singles_out(params_RP, row, HAS_RULES: tl.constexpr = True):
    """Whether words say what is special about the row's tokens."""
    return HAS_RULES & ((int_param(params_RP, row, _RULES) & _SINGLES_OUT) != 0)


@triton.jit
def has_mask(params_RP, row, HAS_RULES: tl.constexpr):
    return HAS_RULES & ((int_param(params_RP, row, _RULES) & _HAS_MASK) != 0)


@triton.jit
def changes_logits(params_RP, row):
    """Whether a row has rules that do more than ban tokens."""
    return singles_out(params_RP, row) & ((int_param(params_RP, row, _RULES) & _ONLY_BANS) == 0)


@triton.jit
def as_logits(x):
    """Logits as they came, float32; NaN as -inf."""
    if x.dtype == tl.bfloat16:  # an instruction less than a cast
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return tl.maximum(x.to(tl.float32), float("-inf"))  # the instruction ignores NaN


@triton.jit
def source_of(
    s, row, size, logits_SV, row_stride, scratch_SV, masks_RW, masks_stride, params_RP, HAS_RULES: tl.constexpr
):  # fmt: skip
    """Where to load a row's logits from: what came, or what tile_stats has left in the scratch, and its mask."""
    in_scratch, is_masked = singles_out(params_RP, row, HAS_RULES), has_mask(params_RP, row, HAS_RULES)
    is_masked &= in_scratch == 0  # else it was applied
    return logits_SV + s * row_stride, scratch_SV + s * size, masks_RW + row * masks_stride, in_scratch, is_masked, size


@triton.jit
def load_stored(source, column):
    """Logits of a row as the scratch has them, or as they came; -inf beyond the vocabulary."""
    logits, scratch, _, in_scratch, _, size = source
    if in_scratch:
        # Where there is no scratch, this is of another type, and is never done.
        x = tl.load(scratch + column, mask=column < size, other=float("-inf")).to(tl.float32)
    else:
        x = as_logits(tl.load(logits + column, mask=column < size, other=float("-inf")))
    return x


@triton.jit
def load_logits(source, column):
    """Logits of a row with its rules applied; -inf beyond the vocabulary."""
    _, _, masks, _, is_masked, size = source
    bits = tl.load(masks + column // 32, mask=(column < size) & is_masked, other=-1)
    return tl.where(((bits >> (column % 32)) & 1) != 0, load_stored(source, column), float("-inf"))


@triton.jit
def rules_of(word):
    """Of some tokens, by their words: 0 if they have no rules but the mask, 1 if only penalties, 2 if others too."""
    slot = (word >> _SLOT_SHIFT) & _SLOT_MASK
    return tl.max(tl.where(slot > 0, 2, tl.where(word != 0, 1, 0)))


@triton.jit
def masked(x, tile, size, masks):
    """Logits of tiles [tiles, columns], -inf for tokens that the row's mask doesn't allow."""
    word = tile[:, None] * (x.shape[1] // 32) + tl.arange(0, x.shape[1] // 32)[None, :]
    bits = tl.load(masks + word, mask=word * 32 < size, other=0)
    allowed = ((bits[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1) != 0
    return tl.where(allowed.reshape(x.shape[0], x.shape[1]), x, float("-inf"))


@triton.jit
def penalized(x, word, row, params_RP):
    """What the penalties make of logits, by their tokens' words."""
    count, penalty = (word & _COUNT_MASK).to(tl.float32), float_param(params_RP, row, _REPETITION)
    x = tl.where((count > 0) | (word < 0), tl.where(x > 0, x / penalty, x * penalty), x)
    x -= float_param(params_RP, row, _FREQUENCY) * count
    return tl.where(count > 0, x - float_param(params_RP, row, _PRESENCE), x)


@triton.jit
def apply_rules(x, column, size, row, position, params_RP, words, slots_R3S):
    """RowLogits.processed on the device, but for the mask: x are raw logits of the row, words its own."""
    word = tl.load(words + column, mask=column < size, other=0)
    slot = (word >> _SLOT_SHIFT) & _SLOT_MASK
    slots = slots_R3S + row * (3 * _NUM_SLOTS) + slot
    has_slot = slot > 0
    x += tl.load(slots, mask=has_slot, other=0).to(tl.float32, bitcast=True)
    until = tl.load(slots + _NUM_SLOTS, mask=has_slot, other=0)
    banned_at = tl.load(slots + 2 * _NUM_SLOTS, mask=has_slot, other=-1)
    banned = (slot == _BANNED_SLOT) | (position < until) | (position == banned_at)
    return penalized(tl.where(banned, float("-inf"), x), word, row, params_RP)
