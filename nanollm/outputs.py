"""What a request returns: RequestOutput to users, EngineOutput from the engine to the text side."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class RequestMetrics:
    """Times of one request, in seconds of time.monotonic(); None until it happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def ttft(self) -> float | None:
        """Time to first token, seconds: arrival to the first token read back."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass
class EngineOutput:
    """What one step brought one request: token ids only, the text side turns them into text.

    finish_reason: None while running, then "stop" (EOS or a stop token), "length" or "abort".
    stop_reason: the stop token id that ended it; None for EOS, as in vLLM.
    logits: for requests that asked for all logits: float32 [tokens, V] on the CPU, one a step, in order of position.
    """

    request_id: int
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    logits: "list[torch.Tensor]" = field(default_factory=list)


@dataclass
class CompletionOutput:
    """One generated continuation. Field names are vLLM's.

    stop_reason: the stop string or stop token id that ended it; None for EOS and for "length".
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A request's prompt and everything generated for it so far. Field names are vLLM's.

    num_cached_tokens: prompt tokens whose keys and values came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
