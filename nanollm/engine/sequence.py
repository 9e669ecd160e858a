"""One request inside the engine: its tokens, its blocks, and how far it has been computed."""

import time
from array import array
from collections.abc import Sequence as AbstractSequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from nanollm.outputs import NO_TOKEN, RequestMetrics, TokenLogprobs
from nanollm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from nanollm.engine.grammars import Grammar

# What a token, or its mask, may take of the CPU: a very ambiguous grammar would hold up all requests.
MATCH_SECONDS = 0.1
_TOO_AMBIGUOUS = "structured_outputs is too ambiguous: make it simpler"


def check_token_ids(token_ids: AbstractSequence[int], vocab_size: int) -> "array[int]":
    """Return the prompt as int32 values; ValueError names the position, value and range of a bad token id."""
    if not len(token_ids):
        raise ValueError("prompt is empty: give at least one token")
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return array("i", token_ids)
    for position, token_id in enumerate(token_ids):  # find what is wrong, or integers of another type
        if type(token_id) is not int and (isinstance(token_id, bool) or not isinstance(token_id, Integral)):
            raise ValueError(f"prompt token {position} must be an integer, got {token_id!r}")
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"prompt token {position} must be from 0 to {vocab_size - 1}, got {token_id}")
    return array("i", token_ids)


def _count(num_logprobs: int | None, vocab_size: int) -> int:
    if num_logprobs is None:
        return -1
    return vocab_size if num_logprobs < 0 else min(num_logprobs, vocab_size)


class Sequence:
    """A request's state. Invariants, with P = num_pending (tokens sampled on the device, not read back yet):

    token_ids holds the prompt and every token read so far; num_tokens = len(token_ids) + P.
    num_computed_tokens counts tokens whose KV a launched step writes; it is at most num_tokens.
    in_flight counts launched steps that include this sequence; its blocks and row are freed at 0 only.
    """

    __slots__ = (
        "all_logits",
        "bad_words",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "choice",
        "content_ids",
        "ends",
        "finish_reason",
        "first_miss",
        "grammar",
        "in_flight",
        "is_too_slow",
        "leader",
        "logits",
        "logprobs",
        "matcher",
        "max_tokens_total",
        "metrics",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_logprobs",
        "num_pending",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_sent_blocks",
        "params",
        "prefix_epoch",
        "prompt_logprobs",
        "request_id",
        "row",
        "seed",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
        "token_on_device",
    )

    def __init__(
        self,
        request_id: int,
        token_ids: "array[int]",
        params: SamplingParams,
        *,
        seed: int,
        eos_token_ids: tuple[int, ...] = (),
        max_model_len: int,
        arrival_time: float = 0.0,
        all_logits: bool = False,
        cache_salt: str = "",
        bad_words: "list[list[int]] | None" = None,
        vocab_size: int = 2**31,
    ) -> None:
        self.request_id = request_id
        self.token_ids = token_ids
        self.num_prompt_tokens = len(token_ids)
        self.params = params
        self.seed = seed
        # Token id -> what stop_reason reports: None for EOS, as in vLLM.
        self.stop_token_ids: dict[int, int | None] = {} if params.ignore_eos else dict.fromkeys(eos_token_ids)
        self.stop_token_ids |= {t: t for t in params.stop_token_ids if t not in self.stop_token_ids}
        self.ends = {*eos_token_ids, *params.stop_token_ids}  # what min_tokens bans, with ignore_eos too, as in vLLM
        # A limit that is known in advance is never planned past: no token is computed to be thrown away.
        new_tokens = max_model_len if params.max_tokens is None else params.max_tokens
        # (Who wants logits of a prompt as long as the context still samples one token, as the others do.)
        self.max_tokens_total = min(self.num_prompt_tokens + new_tokens, max_model_len + all_logits)
        self.all_logits = all_logits
        self.bad_words = bad_words or []  # token ids of each
        # Top tokens whose log probabilities are wanted beside each token's own; -1 for nothing.
        self.num_logprobs = _count(params.logprobs, vocab_size)
        self.num_prompt_logprobs = _count(params.prompt_logprobs, vocab_size)
        self.choice = 0  # which of the request's n continuations
        self.leader: Sequence | None = None  # the first of them, whose prompt blocks the others share
        self.cache_salt = cache_salt
        self.metrics = RequestMetrics(arrival_time)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_pending = 0
        self.in_flight = 0
        self.row = -1
        self.token_on_device = False  # the last token was sampled in this row, so the step reads it there
        self.block_ids: list[int] = []
        self.num_sent_blocks = 0  # blocks that the ranks already have in this row's block table
        self.block_hashes: list[bytes] = []  # of full blocks of known tokens, computed once
        self.content_ids: list[int] = []  # of the blocks committed to the prefix cache, in order
        self.first_miss: bytes | None = None  # hash of the block that its last prefix match ended at
        self.prefix_epoch = -1
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.grammar: Grammar | None = None
        self.matcher: Any = None  # xgrammar.GrammarMatcher: what may follow the output so far
        self.is_too_slow = False  # making its last mask was
        self.logits: list[torch.Tensor] = []
        self.logprobs: list[TokenLogprobs] = []  # of the newest token
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the second prompt token and on

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether something is still wanted of every prompt token, so that none may come from the prefix cache."""
        return self.all_logits or (self.num_prompt_logprobs >= 0 and self.num_output_tokens == 0)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens, tokens read back and tokens sampled but not read yet."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated and read back."""
        return len(self.token_ids) - self.num_prompt_tokens

    def append(self, token_id: int) -> bool:
        """Take the oldest pending token, now read, and decide whether it ends the sequence. False: it doesn't count."""
        self.num_pending -= 1
        if self.is_too_slow:  # it may have been sampled without a mask
            self.finish_reason, self.stop_reason = "error", _TOO_AMBIGUOUS
            return False
        if token_id < 0:  # every token was impossible: all logits -inf, or not a number
            self.finish_reason, self.stop_reason = "error", NO_TOKEN
            if self.matcher is not None:
                self.stop_reason = "structured_outputs and the other settings leave no token to choose"
            return False
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", self.stop_token_ids[token_id]
        elif len(self.token_ids) >= self.max_tokens_total:
            self.finish_reason = "length"
        elif self.matcher is not None:
            self._follow(token_id)
        return True

    def _follow(self, token_id: int) -> None:
        start = time.thread_time()
        if not self.matcher.accept_token(token_id):
            self.finish_reason = "error"  # sampled against its mask
        elif time.thread_time() - start > MATCH_SECONDS:
            self.finish_reason, self.stop_reason = "error", _TOO_AMBIGUOUS
