"""How sampled token ids become cumulative RequestOutputs: detokenized, and cut at stop strings."""

import re
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from nanollm.outputs import CompletionOutput, EngineOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprobs
from nanollm.sampling_params import SamplingParams
from nanollm.text.detokenizer import NOT_SPELLED, Detokenizer, TokenPieces, make_detokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class OutputProcessor:
    """Holds each running request's text on the caller's side of the engine.

    tokenizer: None when there is none (skip_tokenizer_init): text is then always "".
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[tuple[bool, bool], TokenPieces] = {}
        self._choices: dict[int, _Choice] = {}

    def add(
        self,
        request_id: int,
        external_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        metrics: RequestMetrics | None = None,
        *,
        stream: bool = True,
    ) -> None:
        """Register a request before its first EngineOutput. Its params.n continuations have the ids from request_id on.

        stream: False asks for the finished RequestOutput only, which costs next to nothing a token.
        Raises ValueError if an id is running already.
        """
        ids = range(request_id, request_id + params.n)
        if used := self._choices.keys() & ids:
            raise ValueError(f"request_id {min(used)} is in use by a request that has not finished")
        pieces = self._pieces_for(params)
        request = _Request(external_id, prompt, prompt_token_ids, params, metrics, pieces, stream, params.n)
        for index, choice_id in enumerate(ids):
            choice = _Choice(request, index, make_detokenizer(pieces))
            request.choices.append(choice)
            self._choices[choice_id] = choice

    def discard(self, request_id: int) -> None:
        """Forget a continuation that nobody waits for any more; what the engine still sends for it is ignored."""
        self._choices.pop(request_id, None)

    def process(self, outputs: list[EngineOutput]) -> tuple[list[RequestOutput], list[int]]:
        """Take one step's outputs; return (what to hand to callers, one a request, and ids that the engine must abort).

        A continuation is to be aborted when a stop string ended it and the engine doesn't know yet. Each finished one
        is forgotten here: what the engine still sends for it (a surplus token, the abort itself) is ignored.
        """
        changed: dict[_Request, None] = {}
        aborts = []
        for output in outputs:
            choice = self._choices.get(output.request_id)
            if choice is None:
                continue
            choice.advance(output)
            request = choice.request
            if choice.finish_reason is not None:
                del self._choices[output.request_id]
                request.num_running -= 1
                if output.finish_reason is None:
                    aborts.append(output.request_id)
            if request.stream or not request.num_running:
                changed[request] = None
        return [request.show() for request in changed], aborts

    def _pieces_for(self, params: SamplingParams) -> TokenPieces | None:
        if not params.detokenize or self._tokenizer is None:
            return None
        settings = params.skip_special_tokens, params.spaces_between_special_tokens
        if settings not in self._pieces:
            self._pieces[settings] = TokenPieces(self._tokenizer, *settings)
        return self._pieces[settings]


@dataclass(slots=True, eq=False)
class _Request:
    """A running request: its prompt, and its continuations. pieces: None for no text."""

    external_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    metrics: RequestMetrics | None
    pieces: TokenPieces | None
    stream: bool
    num_running: int  # of the continuations
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    choices: "list[_Choice]" = field(default_factory=list)

    def show(self) -> RequestOutput:
        """What to hand to the caller."""
        choices = self.choices
        if not self.num_running:
            self.choices = []  # which know their request: a cycle would keep all of it until a collection finds it
        return RequestOutput(
            self.external_id,
            self.prompt,
            self.prompt_token_ids,
            [choice.completion() for choice in choices],
            not self.num_running,
            self.metrics,
            self.num_cached_tokens,
            self.prompt_logprobs,
        )

    def logprobs(self, token_id: int, found: TokenLogprobs, is_first: bool = False) -> dict[int, Logprob]:
        """A token's log probability and those of the likeliest, in this order. is_first: of the answer."""
        pieces = self.pieces
        spelled = NOT_SPELLED if pieces is None else pieces.spelled_first if is_first else pieces.spelled
        text, data = spelled[token_id]
        logprobs = {token_id: Logprob(found.logprob, found.rank, text, data)}
        for rank, (each, logprob) in enumerate(zip(found.top_ids, found.top_logprobs, strict=True), 1):
            if each != token_id:
                text, data = spelled[each]
                logprobs[each] = Logprob(logprob, rank, text, data)
        return logprobs


@dataclass(slots=True)
class _Choice:
    """One continuation. held: what follows `text`, but may yet turn out to start a stop string."""

    request: _Request
    index: int
    detokenizer: Detokenizer | None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    held: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    is_empty: bool = True  # no token of self.logprobs left a trace
    first_char_of_stop: re.Pattern[str] | None = None

    def __post_init__(self) -> None:
        if self.request.params.logprobs is not None:
            self.logprobs, self.cumulative_logprob = [], 0.0
        if stops := self.request.params.stop:
            self.first_char_of_stop = re.compile("|".join(map(re.escape, sorted({stop[0] for stop in stops}))))

    def advance(self, output: EngineOutput) -> None:
        """Take one step's tokens."""
        request = self.request
        if self.index == 0:
            request.metrics = output.metrics or request.metrics
            request.num_cached_tokens = output.num_cached_tokens or request.num_cached_tokens
            asked = request.params.prompt_logprobs is not None and request.prompt_logprobs is None
            if asked and (output.new_token_ids or output.prompt_logprobs):
                rest = zip(request.prompt_token_ids[1:], output.prompt_logprobs, strict=True)
                request.prompt_logprobs = [None, *(request.logprobs(*pair) for pair in rest)]
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        # What ended it, here a token, leaves no text, as in vLLM.
        num_silent = int(self.finish_reason == "stop" and not request.params.include_stop_str_in_output)
        if self.first_char_of_stop is not None:
            matched = self._append_until_stop(output.new_token_ids, self.finish_reason is not None, num_silent)
            if matched is not None:
                self.finish_reason, self.stop_reason = "stop", matched
                if self.index == 0 and request.metrics is not None and request.metrics.finished_time is None:
                    request.metrics.finished_time = time.monotonic()
        else:
            self._append(output.new_token_ids, self.finish_reason is not None, num_silent)
        if self.logprobs is not None:
            new_token_ids = self.token_ids[len(self.logprobs) :]
            for token_id, found in zip(new_token_ids, output.logprobs, strict=False):
                self.logprobs.append(request.logprobs(token_id, found, self.is_empty))
                self.is_empty &= self.logprobs[-1][token_id].token_bytes is None
                self.cumulative_logprob = (self.cumulative_logprob or 0.0) + found.logprob

    def completion(self) -> CompletionOutput:
        """What there is of it so far."""
        if self.finish_reason is None:
            shows_all = self.held and self.request.params.include_stop_str_in_output
            text = self.text + self.held if shows_all else self.text
            return _CompletionSoFar(self.index, text, self.token_ids, self.logprobs, self.cumulative_logprob)
        return CompletionOutput(
            self.index,
            self.text,
            self.token_ids,
            self.finish_reason,
            self.stop_reason,
            self.cumulative_logprob,
            self.logprobs,
        )

    def _append(self, new_token_ids: list[int], last: bool, num_silent: int) -> None:
        self.token_ids += new_token_ids
        if self.detokenizer is None or not (self.request.stream or last):
            return
        told = new_token_ids if self.request.stream else self.token_ids
        self.text += self.detokenizer.push(told[: len(told) - num_silent])
        if last:
            self.text += self.detokenizer.flush()

    def _append_until_stop(self, new_token_ids: list[int], last: bool, num_silent: int) -> str | None:
        """Append tokens up to the one that completes a stop string; cut the text there and return that string.

        The first match to complete, token by token, wins: so a stop string wins over a longer one that it begins.
        Of those which one token completes, the one that starts earliest wins, then the shortest.
        """
        assert self.detokenizer is not None  # SamplingParams and prepare_params refuse stop strings without text
        for i, token_id in enumerate(new_token_ids):
            self.token_ids.append(token_id)
            new_text = self.detokenizer.push([token_id]) if i < len(new_token_ids) - num_silent else ""
            if len(self.token_ids) <= self.request.params.min_tokens:  # no match counts that is complete by here
                self._hold(self.held + new_text)
            elif (stop := self._extend(new_text)) is not None:
                return stop
        if not last:
            return None
        stop = self._extend(self.detokenizer.flush())
        self.text += self.held
        return stop

    def _extend(self, new_text: str) -> str | None:
        """Append text; if that completes a stop string, cut the text at it and return it."""
        assert self.first_char_of_stop is not None
        rest = self.held + new_text
        if self.first_char_of_stop.search(rest) is None:
            self.text += rest
            self.held = ""
            return None
        # What ends in the held text was complete before, and didn't count: min_tokens.
        first_end = len(self.held) + 1
        found = [(rest.find(stop, max(first_end - len(stop), 0)), len(stop), stop) for stop in self.request.params.stop]
        if matches := [match for match in found if match[0] >= 0]:
            start, length, stop = min(matches)
            self.text += rest[: start + length if self.request.params.include_stop_str_in_output else start]
            self.held = ""
            return stop
        self._hold(rest)
        return None

    def _hold(self, rest: str) -> None:
        """Append to the text what of `rest` can't start a stop string any more, and hold what can."""
        start = min(start_of_partial(rest, stop) for stop in self.request.params.stop)
        self.text += rest[:start]
        self.held = rest[start:]


def start_of_partial(text: str, stop: str) -> int:
    """Where the longest suffix of the text starts that begins `stop` but is shorter; len(text) if there is none."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0 and not stop.startswith(text[start:]):
        start += 1
    return start if start >= 0 else len(text)


class _CompletionSoFar(CompletionOutput):
    """An unfinished completion. What grows is copied when read: a copy at every step would cost O(tokens) each.

    What is None as in the class is not set: this is made for every row in every step.
    """

    _growing_logprobs: list[dict[int, Logprob]] | None = None

    def __init__(
        self,
        index: int,
        text: str,
        growing_token_ids: list[int],
        growing_logprobs: list[dict[int, Logprob]] | None,
        cumulative_logprob: float | None,
    ) -> None:
        self.index, self.text = index, text
        self._growing, self._count = growing_token_ids, len(growing_token_ids)
        if growing_logprobs is not None:
            self._growing_logprobs, self.cumulative_logprob = growing_logprobs, cumulative_logprob

    @cached_property
    def token_ids(self) -> list[int]:  # type: ignore[override]
        return self._growing[: self._count]

    @cached_property
    def logprobs(self) -> list[dict[int, Logprob]] | None:  # type: ignore[override]
        return None if self._growing_logprobs is None else self._growing_logprobs[: self._count]
