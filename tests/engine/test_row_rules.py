"""What a row is told of its request's rules."""

from array import array
from typing import Any

import pytest

from nanollm import SamplingParams
from nanollm.engine.row_rules import has_rules, pack_params, row_rules
from nanollm.engine.sequence import Sequence
from nanollm.sampling_params import HAS_BAD_WORDS, HAS_MASK, ONLY_BANS, RULES, SINGLES_OUT


@pytest.mark.parametrize(
    ("params", "bad_words", "flags"),
    [
        ({}, [], 0),
        ({"allowed_token_ids": [5]}, [], SINGLES_OUT | ONLY_BANS),
        ({"min_tokens": 2, "stop_token_ids": [7]}, [], SINGLES_OUT | ONLY_BANS),
        ({}, [[3, 4]], SINGLES_OUT | HAS_BAD_WORDS | ONLY_BANS),
        ({"structured_outputs": {"regex": "a"}}, [], HAS_MASK),
        ({"structured_outputs": {"regex": "a"}, "logit_bias": {5: 1.0}}, [], SINGLES_OUT | HAS_MASK),
        ({"logit_bias": {5: 1.0}, "allowed_token_ids": [5, 6]}, [], SINGLES_OUT),
        ({"presence_penalty": 0.1}, [[3, 4]], SINGLES_OUT | HAS_BAD_WORDS),
        ({"repetition_penalty": 1.1}, [], SINGLES_OUT),
    ],
)
def test_flags_say_which_rules_there_are_and_whether_they_only_ban(
    params: dict[str, Any], bad_words: list[list[int]], flags: int
) -> None:
    seq = Sequence(0, array("i", [1, 2]), SamplingParams(**params), seed=0, max_model_len=100, bad_words=bad_words)
    assert pack_params(seq, row_rules(seq))[RULES] == flags and has_rules(seq) == bool(flags)
