"""How sampled token ids become text: incremental detokenizing, stop strings, cumulative RequestOutputs."""

import codecs
import re
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from nanollm.outputs import CompletionOutput, EngineOutput, RequestMetrics, RequestOutput
from nanollm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(rb"<0x[0-9A-F]{2}>")  # how SentencePiece vocabularies spell a single byte


class OutputProcessor:
    """Holds each running request's text on the caller's side of the engine.

    tokenizer: None when there is none (skip_tokenizer_init): text is then always "".
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[bool, _Pieces] = {}
        self._requests: dict[int, _Request] = {}

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
        """Register a request before its first EngineOutput.

        stream: False asks for the finished RequestOutput only, which costs next to nothing a token.
        Raises ValueError if request_id is running already, or if there are stop strings and no tokenizer.
        """
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id} is in use by a request that has not finished")
        if params.stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer: use stop_token_ids, or load the model with its tokenizer")
        detokenizer = None
        if params.detokenize and self._tokenizer is not None:
            detokenizer = self._detokenizer(self._tokenizer, params.skip_special_tokens)
        self._requests[request_id] = _Request(
            external_id, prompt, prompt_token_ids, params, metrics, detokenizer, stream
        )

    def discard(self, request_id: int) -> None:
        """Forget a request that nobody waits for any more; what the engine still sends for it is ignored."""
        self._requests.pop(request_id, None)

    def process(self, outputs: list[EngineOutput]) -> tuple[list[RequestOutput], list[int]]:
        """Take one step's outputs; return (what to hand to callers, request ids that the engine must abort).

        A request is to be aborted when a stop string ended it and the engine doesn't know yet. Each finished request is
        forgotten here: what the engine still sends for it (a surplus token, the abort itself) is ignored.
        """
        results, aborts = [], []
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            result = request.advance(output)
            if result is None:
                continue
            results.append(result)
            if result.finished:
                del self._requests[output.request_id]
                if output.finish_reason is None:
                    aborts.append(output.request_id)
        return results, aborts

    def _detokenizer(self, tokenizer: "PreTrainedTokenizerBase", skip_special_tokens: bool) -> "_Detokenizer":
        if skip_special_tokens not in self._pieces:
            self._pieces[skip_special_tokens] = _Pieces(tokenizer, skip_special_tokens)
        pieces = self._pieces[skip_special_tokens]
        return _ByteLevelDetokenizer(pieces) if pieces.byte_level else _WindowDetokenizer(pieces)


@dataclass(slots=True)
class _Request:
    """One running request. text[num_decided:] may yet turn out to start a stop string; the rest is safe to show."""

    external_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    metrics: RequestMetrics | None
    detokenizer: "_Detokenizer | None"
    stream: bool
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    num_decided: int = 0
    num_cached_tokens: int = 0
    first_char_of_stop: re.Pattern[str] | None = None

    def __post_init__(self) -> None:
        if self.params.stop:
            first_chars = {stop[0] for stop in self.params.stop}
            self.first_char_of_stop = re.compile("|".join(map(re.escape, sorted(first_chars))))

    def advance(self, output: EngineOutput) -> RequestOutput | None:
        """Take one step's tokens; return what to show, None if only the end is wanted and this isn't it."""
        finish_reason: str | None = output.finish_reason
        stop_reason: int | str | None = output.stop_reason
        self.metrics = output.metrics or self.metrics
        self.num_cached_tokens = output.num_cached_tokens or self.num_cached_tokens
        if self.first_char_of_stop is not None:
            matched = self._append_until_stop(output.new_token_ids, finish_reason is not None)
            if matched is not None:
                finish_reason, stop_reason = "stop", matched
                if self.metrics is not None and self.metrics.finished_time is None:
                    self.metrics.finished_time = time.monotonic()
        else:
            self._append(output.new_token_ids, finish_reason is not None)
        if finish_reason is None and not self.stream:
            return None
        if finish_reason is None:
            shows_all = self.params.include_stop_str_in_output or self.num_decided == len(self.text)
            text = self.text if shows_all else self.text[: self.num_decided]
            completion: CompletionOutput = _CompletionSoFar(text, self.token_ids)
        else:
            completion = CompletionOutput(0, self.text, self.token_ids, finish_reason, stop_reason)
        return RequestOutput(
            self.external_id,
            self.prompt,
            self.prompt_token_ids,
            [completion],
            finish_reason is not None,
            self.metrics,
            self.num_cached_tokens,
        )

    def _append(self, new_token_ids: list[int], last: bool) -> None:
        self.token_ids += new_token_ids
        if self.detokenizer is None or not (self.stream or last):
            return
        self.text += self.detokenizer.push(new_token_ids if self.stream else self.token_ids)
        if last:
            self.text += self.detokenizer.flush()
        self.num_decided = len(self.text)

    def _append_until_stop(self, new_token_ids: list[int], last: bool) -> str | None:
        """Append tokens up to the one that completes a stop string; cut the text there and return that string.

        The first match to complete, token by token, wins: so a stop string wins over a longer one that it begins.
        Of those which one token completes, the one that starts earliest wins, then the shortest.
        """
        assert self.detokenizer is not None  # SamplingParams and add() refuse stop strings without text
        for token_id in new_token_ids:
            self.token_ids.append(token_id)
            if (stop := self._extend(self.detokenizer.push([token_id]))) is not None:
                return stop
        return self._extend(self.detokenizer.flush()) if last else None

    def _extend(self, new_text: str) -> str | None:
        """Append text; if that completes a stop string, cut the text at it and return it."""
        assert self.first_char_of_stop is not None
        self.text += new_text
        candidate = self.first_char_of_stop.search(self.text, self.num_decided)
        self.num_decided = candidate.start() if candidate else len(self.text)
        if candidate is None:
            return None
        found = [(self.text.find(stop, self.num_decided), len(stop), stop) for stop in self.params.stop]
        if matches := [match for match in found if match[0] >= 0]:
            start, length, stop = min(matches)
            self.text = self.text[: start + length if self.params.include_stop_str_in_output else start]
            return stop
        self.num_decided = min(self._start_of_partial(stop) for stop in self.params.stop)
        return None

    def _start_of_partial(self, stop: str) -> int:
        """Return where the longest suffix of the text that begins `stop` starts; len(text) if none does."""
        start = max(self.num_decided, len(self.text) - len(stop) + 1)
        while (start := self.text.find(stop[0], start)) >= 0 and not stop.startswith(self.text[start:]):
            start += 1
        return start if start >= 0 else len(self.text)


class _CompletionSoFar(CompletionOutput):
    """An unfinished completion. Its token_ids are copied when read: a copy at every step would cost O(tokens) each."""

    def __init__(self, text: str, growing_token_ids: list[int]) -> None:
        self.index, self.text, self.finish_reason, self.stop_reason = 0, text, None, None
        self._growing, self._count = growing_token_ids, len(growing_token_ids)

    @cached_property
    def token_ids(self) -> list[int]:  # type: ignore[override]
        return self._growing[: self._count]


class _Pieces(dict[int, bytes | None]):
    """Token id -> its bytes, filled as ids are met; None for ids that leave no trace (skipped, or past the vocabulary).

    byte_level: whether a token's text is its bytes and nothing else, so that decoding is joining.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", skip_special_tokens: bool) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.byte_level = False
        special = set(tokenizer.all_special_tokens)
        if tokenizer.is_fast:
            from tokenizers import decoders

            backend = tokenizer.backend_tokenizer
            self.byte_level = isinstance(backend.decoder, decoders.ByteLevel)
            special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        self._skipped = special if skip_special_tokens else set()

    def __missing__(self, token_id: int) -> bytes | None:
        token: str | None = self.tokenizer.convert_ids_to_tokens([token_id])[0]
        piece = None
        if token is not None and token not in self._skipped:
            try:
                piece = bytes(_BYTE_OF_CHAR[char] for char in token) if self.byte_level else token.encode()
            except KeyError:  # an added token that isn't spelled in the byte alphabet stands for itself
                piece = token.encode()
        self[token_id] = piece
        return piece

    def decode(self, token_ids: list[int]) -> str:
        """Whole decoding; without transformers' clean-up, which changes text that was shown already."""
        return str(
            self.tokenizer.decode(
                token_ids, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the others as the characters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


class _ByteLevelDetokenizer:
    """Exact and O(1) a token for byte-level BPE: an incremental UTF-8 decoder over the tokens' bytes.

    tokenizers' DecodeStream would do the same by decoding each token twice, and raises "Invalid prefix" when a bad
    sequence is decided late. Python's "replace" and Rust's lossy decoding agree on U+FFFD: one a maximal subpart.
    """

    def __init__(self, pieces: _Pieces) -> None:
        self._pieces = pieces
        self._incomplete = b""

    def push(self, token_ids: list[int]) -> str:
        """Return the text that these tokens complete; an incomplete character waits for its other bytes."""
        pieces = self._pieces
        data = self._incomplete + b"".join([pieces[token_id] or b"" for token_id in token_ids])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._incomplete = data[used:]
        return text

    def flush(self) -> str:
        """Return what is left at the end: U+FFFD for half a character, as decode() gives it."""
        return self._incomplete.decode("utf-8", "replace")


class _WindowDetokenizer:
    """For the other tokenizers: decode the last shown tokens with the new ones, and show what that adds.

    Byte tokens wait until their run ends: SentencePiece decodes a run as a whole, to U+FFFD each if it isn't UTF-8.
    """

    def __init__(self, pieces: _Pieces) -> None:
        self._pieces = pieces
        self._window: list[int] = []  # the tokens whose text was shown last, then those that wait
        self._num_shown = 0  # of the window's tokens
        self._shown_len = 0  # characters of their text, decoded alone

    def push(self, token_ids: list[int]) -> str:
        """Return the text that these tokens complete."""
        shown = []
        for token_id in token_ids:
            if (piece := self._pieces[token_id]) is None:
                continue
            self._window.append(token_id)
            if not _BYTE_TOKEN.fullmatch(piece):
                shown.append(self.flush())
        return "".join(shown)

    def flush(self) -> str:
        """Return the text of the tokens that wait, whatever it is."""
        text = self._pieces.decode(self._window)[self._shown_len :]
        if text:
            del self._window[: self._num_shown]
            self._num_shown = len(self._window)
            self._shown_len = len(self._pieces.decode(self._window))
        return text


_Detokenizer = _ByteLevelDetokenizer | _WindowDetokenizer
