"""What a request's parameters say about single tokens, as its row is told when it starts."""

import struct

from nanollm.engine.sequence import Sequence
from nanollm.runtime.step_plan import RowRules
from nanollm.sampling_params import (
    BAD_PREFIX,
    FIRST_SLOT,
    GREEDY_BELOW,
    HAS_BAD_WORDS,
    HAS_MASK,
    MAX_BAD_WORDS,
    NUM_SLOTS,
    ONLY_BANS,
    SINGLES_OUT,
    SamplingParams,
)

_FOREVER = 2**31 - 1


def pack_params(seq: Sequence, rules: RowRules | None) -> tuple[int, ...]:
    """The row's sampling parameters as StepPlan.params has them."""
    params = seq.params
    flags = 0 if rules is None else SINGLES_OUT
    if rules is not None and rules.bad_words:
        flags |= HAS_BAD_WORDS
    if params.structured_outputs is not None:
        flags |= HAS_MASK
    if rules is not None and not params.logit_bias and not _penalizes(params):
        flags |= ONLY_BANS
    words = struct.pack(
        "<fqiifffffi",
        params.temperature if params.temperature >= GREEDY_BELOW else 0.0,
        seq.seed,
        seq.choice,
        params.top_k,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        flags,
    )
    return struct.unpack("<11i", words)


def has_rules(seq: Sequence) -> bool:
    """Whether some token is special in this sequence, or a mask may say so."""
    return seq.params.structured_outputs is not None or _singles_out(seq)


def _singles_out(seq: Sequence) -> bool:
    params = seq.params
    rules = params.logit_bias or params.allowed_token_ids or seq.bad_words or (params.min_tokens and seq.ends)
    return bool(rules or _penalizes(params))


def _penalizes(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty)


def row_rules(seq: Sequence) -> RowRules | None:
    """None if no token is special in this sequence, whatever its mask says."""
    if not _singles_out(seq):
        return None
    params = seq.params
    slots = {token_id: (bias, 0) for token_id, bias in params.logit_bias.items()}

    def ban(token_id: int, until: int) -> None:
        bias, before = slots.get(token_id, (0.0, 0))
        slots[token_id] = bias, max(until, before)

    if params.min_tokens:
        for token_id in seq.ends:
            ban(token_id, min(seq.num_prompt_tokens + params.min_tokens, _FOREVER))
    bad_words = []
    for *prefix, last in seq.bad_words:
        ban(last, 0 if prefix else _FOREVER)
        if prefix:
            bad_words.append((last, prefix))
    prompt, output = seq.token_ids[: seq.num_prompt_tokens], seq.token_ids[seq.num_prompt_tokens :]
    return RowRules(
        num_tokens=len(seq.token_ids),
        prompt_ids=list(set(prompt)) if params.repetition_penalty != 1 else [],
        output_ids=output.tolist() if _penalizes(params) or bad_words else [],
        allowed_ids=params.allowed_token_ids,
        slots=slots,
        bad_words=bad_words,
    )


def check_rules(seq: Sequence, vocab_size: int) -> None:
    """ValueError, naming the parameter, if its rules name tokens that don't exist, are too many, or leave no token."""
    params = seq.params
    for name, token_ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or []),
        ("logit_bias token ids", params.logit_bias),
    ):
        for token_id in token_ids:
            if token_id >= vocab_size:
                raise ValueError(f"{name} must be from 0 to {vocab_size - 1}, got {token_id}")
    longest = max(map(len, seq.bad_words), default=0)
    if longest > BAD_PREFIX + 1:
        raise ValueError(f"each of bad_words may have {BAD_PREFIX + 1} tokens, got one of {longest}: shorten it")
    several = sum(len(word) > 1 for word in seq.bad_words)
    if several > MAX_BAD_WORDS:
        raise ValueError(
            f"bad_words may have {MAX_BAD_WORDS} of more than one token, with and without a space before them, got "
            f"{several}: give fewer"
        )
    rules = row_rules(seq)
    if rules is None:
        return
    if len(rules.slots) > NUM_SLOTS - FIRST_SLOT:
        raise ValueError(
            f"logit_bias, bad_words and min_tokens may single out {NUM_SLOTS - FIRST_SLOT} tokens, got "
            f"{len(rules.slots)}: give fewer, or allowed_token_ids, which has no limit"
        )
    banned = {token_id for token_id, (_, until) in rules.slots.items() if until > seq.num_prompt_tokens}
    allowed = range(vocab_size) if rules.allowed_ids is None else set(rules.allowed_ids)
    if len(banned) >= len(allowed) and banned.issuperset(allowed):
        raise ValueError(
            "no token is left to generate: allowed_token_ids are all banned by bad_words, or end the output before "
            f"min_tokens {params.min_tokens}"
        )
