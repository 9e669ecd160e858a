"""What a request returns: RequestOutput to users, EngineOutput from the engine to the text side."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

# The stop_reason of finish_reason "error" where nothing says whether the request or the model is at fault.
NO_TOKEN = (
    "no token is left to choose: all logits are -inf or NaN. Look at the request's bans and logits processors, for a "
    "warning of NaN weights at start-up, and, if dtype is float16, whether another one helps"
)


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of time.monotonic(); None until it happened. num_tokens: generated so far.

    Of several continuations (n > 1), those of the first.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    num_tokens: int = 0

    @property
    def ttft(self) -> float | None:
        """Time to first token, seconds: arrival to the first token read back."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, seconds; None before the end, or if there was only one."""
        if self.first_token_time is None or self.finished_time is None or self.num_tokens < 2:
            return None
        return (self.finished_time - self.first_token_time) / (self.num_tokens - 1)


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """A token's log probability and rank (1 is the likeliest), and the likeliest tokens: ids, log probabilities."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class EngineOutput(msgspec.Struct, array_like=True, gc=False):
    """What one step brought one request: token ids only, the text side turns them into text.

    It may cross processes as msgpack.

    finish_reason: None while running, then "stop" (EOS or a stop token), "length", "abort", or "error" if the model
        left no token to choose, or structured_outputs can't be kept to.
    stop_reason: the stop token id that ended it; None for EOS, as in vLLM. With "error" what is at fault,
        if that is known.
    logprobs: of the new tokens, if they were asked for. prompt_logprobs: of the second prompt token and on, likewise,
        with the first token.
    logits: for requests that asked for all logits: float32 tensors [tokens, V] on the CPU, one a step, in order of
        position.
    """

    request_id: int
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    logits: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprobs] = msgspec.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = msgspec.field(default_factory=list)


def pack_outputs(outputs: list[EngineOutput]) -> bytes:
    """The outputs of a step as msgpack, for another process. Logits stay here, who asked for them is here."""
    return msgspec.msgpack.encode([*outputs], enc_hook=lambda logits: None)


def unpack_outputs(packed: bytes | bytearray) -> list[EngineOutput]:
    """The inverse of pack_outputs."""
    return msgspec.msgpack.decode(packed, type=list[EngineOutput])


class Logprob(msgspec.Struct, gc=False):
    """A token's log probability, its rank among all tokens (1 is the likeliest) and its text. Names are vLLM's.

    token_bytes: what it adds to the text, maybe a part of a character; None for nothing, as special tokens do.

    There may be millions; garbage collection, which would take tenths of a second, needn't look at them.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    token_bytes: bytes | None = None


@dataclass
class CompletionOutput:
    """One generated continuation. Field names are vLLM's.

    stop_reason: the stop string or stop token id that ended it; None for EOS and for "length". With "error" what is at
        fault, if that is known.
    logprobs: if asked for, for each token a dict of it and the likeliest tokens. cumulative_logprob: of all tokens.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass
class RequestOutput:
    """A request's prompt and everything generated for it so far. Field names are vLLM's.

    num_cached_tokens: prompt tokens whose keys and values came from the prefix cache.
    prompt_logprobs: if asked for, for each prompt token a dict as in CompletionOutput.logprobs; None for the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
