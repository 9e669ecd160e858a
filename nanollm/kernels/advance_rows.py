"""After a token was sampled: remember it in its row, count it, and find which bad words it has made possible."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
from torch import Tensor

from nanollm.kernels.backend import gdc_launch_dependents, gdc_wait, overlap, runs_triton, tl, triton
from nanollm.kernels.token_rules import BANNED_AT, SamplerState, int_param
from nanollm.sampling_params import BAD_PREFIX, HAS_BAD_WORDS, MAX_BAD_WORDS, NUM_SLOTS, RULES, SINGLES_OUT

_RULES, _NUM_SLOTS = tl.constexpr(RULES), tl.constexpr(NUM_SLOTS)
_SINGLES_OUT, _HAS_BAD_WORDS = tl.constexpr(SINGLES_OUT), tl.constexpr(HAS_BAD_WORDS)
_BANNED_AT = tl.constexpr(BANNED_AT)


def ban_bad_words(state: SamplerState, row: int, position: int) -> None:
    """Ban at this position the last token of every bad word whose other tokens are the row's last ones."""
    slot_W, prefix_WH = state.bad_words_RWN[row, :, 0], state.bad_words_RWN[row, :, 1:]
    matches_W = ((prefix_WH == state.last_RH[row]) | (prefix_WH == -1)).all(-1) & (slot_W > 0)
    state.slots_R3S[row, BANNED_AT, slot_W[matches_W].long()] = position


def advance_rows_reference(
    ids_S: Tensor, rows_S: Tensor, positions_S: Tensor, state: SamplerState, last_token_R: Tensor, first_id: int
) -> None:
    """The definition; arguments as in advance_rows."""
    last_token_R[rows_S] = ids_S
    rules_S = state.params_RP[rows_S, RULES]
    for s in (rules_S & SINGLES_OUT).nonzero()[:, 0].tolist():
        row, token_id = int(rows_S[s]), int(ids_S[s])
        if 0 <= token_id - first_id < state.words_RV.shape[1]:
            state.words_RV[row, token_id - first_id] += 1
        if rules_S[s] & HAS_BAD_WORDS:
            state.last_RH[row] = torch.cat((state.last_RH[row, 1:], ids_S[s : s + 1].int()))
            ban_bad_words(state, row, int(positions_S[s]) + 1)


@triton.jit(do_not_specialize_on_alignment=["ids_S", "rows_S", "positions_S"])
def _advance_rows_kernel(
    ids_S, rows_S, positions_S, last_token_R, params_RP, words_RV, slots_R3S, last_RH, bad_words_RWN, words_stride,
    first_id, vocab_share,
    WORDS: tl.constexpr, PREFIX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token_id, row = tl.load(ids_S + s), tl.load(rows_S + s)
    tl.store(last_token_R + row, token_id)
    rules = int_param(params_RP, row, _RULES)
    if (rules & _SINGLES_OUT) != 0:
        index = token_id - first_id
        if (index >= 0) & (index < vocab_share):
            word = words_RV + row * words_stride + index
            tl.store(word, tl.load(word) + 1)
        if (rules & _HAS_BAD_WORDS) != 0:
            # One warp, so that every token is read before one is written.
            h = tl.arange(0, PREFIX + 1)
            last = last_RH + row * PREFIX + h
            tokens = tl.load(last + 1, mask=h < PREFIX - 1, other=0)
            tokens = tl.where(h == PREFIX - 1, token_id.to(tl.int32), tokens)
            tl.store(last, tokens, mask=h < PREFIX)
            bad_word = bad_words_RWN + (row * WORDS + tl.arange(0, WORDS)) * (PREFIX + 1)
            prefix = tl.load(bad_word[:, None] + 1 + h[None, :], mask=h[None, :] < PREFIX, other=-1)
            differs = (prefix != tokens[None, :]) & (prefix != -1)
            slot = tl.load(bad_word)
            matches = (tl.sum(differs.to(tl.int32), 1) == 0) & (slot > 0)
            banned_at = slots_R3S + (row * 3 + _BANNED_AT) * _NUM_SLOTS + slot
            tl.store(banned_at, tl.load(positions_S + s).to(tl.int32) + 1 + slot * 0, mask=matches)


def _advance_rows_triton(
    ids_S: Tensor, rows_S: Tensor, positions_S: Tensor, state: SamplerState, last_token_R: Tensor, first_id: int
) -> None:
    if len(ids_S):
        _advance_rows_kernel[(len(ids_S),)](
            ids_S,
            rows_S,
            positions_S,
            last_token_R,
            state.params_RP,
            state.words_RV,
            state.slots_R3S,
            state.last_RH,
            state.bad_words_RWN,
            state.words_RV.stride(0),
            first_id,
            state.words_RV.shape[1],
            WORDS=MAX_BAD_WORDS,
            PREFIX=BAD_PREFIX,
            num_warps=1,
            **overlap(ids_S.device),
        )


def advance_rows(
    ids_S: Tensor, rows_S: Tensor, positions_S: Tensor, state: SamplerState, last_token_R: Tensor, first_id: int
) -> None:
    """Take in the sampled tokens: int64 [S] each, ids, rows of the state, and tokens before the sampled ones.

    last_token_R: int64, gets the tokens. first_id: of this rank's share of the vocabulary, whose tokens it counts.
    """
    run = _advance_rows_triton if runs_triton(ids_S) else advance_rows_reference
    run(ids_S, rows_S, positions_S, state, last_token_R, first_id)
