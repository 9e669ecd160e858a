"""What of an assistant's text is thought, what answer, what calls of tools: Qwen3's tags, as they come in.

`<think>…</think>` at the start is reasoning; `<tool_call>{"name": …, "arguments": {…}}</tool_call>` is a call.
Whitespace next to a tag belongs to it. What can't be read as a call, or is cut off, stays content: nothing is lost.
"""

import re
from dataclasses import dataclass, field

import msgspec

from nanollm.text.output_processor import start_of_partial

_THINK, _END_THINK, _CALL, _END_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"


@dataclass
class Piece:
    """What some text added. calls: (name, arguments as JSON)."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


class AnswerParser:
    """Takes one answer's text in any pieces; what it makes of it doesn't depend on where they were cut.

    thinks: the model writes reasoning first. is_thinking: the prompt opened it already. max_calls: 0 looks for none.
    """

    def __init__(self, *, thinks: bool, is_thinking: bool = False, max_calls: int = 0) -> None:
        self._state = "thought" if is_thinking else "start" if thinks else "content"
        self._max_calls = max_calls
        self._num_calls = 0
        self._waiting = ""  # text that may yet turn out to be a tag or whitespace beside one
        self._at_tag = is_thinking  # whitespace that comes next belongs to a tag

    def push(self, text: str, last: bool = False) -> Piece:
        """Take the text that follows; last: there is no more."""
        piece = Piece()
        self._waiting += text
        while self._step(piece, last):
            pass
        return piece

    def _step(self, piece: Piece, last: bool) -> bool:
        """Decide about the text that waits, up to a tag; whether there may be more to decide."""
        if self._at_tag:
            self._waiting = self._waiting.lstrip()
            self._at_tag = not self._waiting
        if self._state == "start":
            text = self._waiting.lstrip()
            if text.startswith(_THINK):
                self._waiting, self._state, self._at_tag = text[len(_THINK) :], "thought", True
            elif last or not _THINK.startswith(text):
                self._state = "content"
            else:
                return False
            return True
        if self._state == "thought":
            text, found = self._until(_END_THINK, last)
            piece.reasoning += text
            if found:
                self._state, self._at_tag = "content", True
            return found
        if self._state == "content":
            if self._num_calls >= self._max_calls:
                if self._num_calls == 0:  # after the last call that was asked for, nothing counts
                    piece.content += self._waiting
                self._waiting = ""
                return False
            text, found = self._until(_CALL, last)
            piece.content += text
            if found:
                self._state = "call"
            return found
        body, end, rest = self._waiting.partition(_END_CALL)
        if not end:
            if last:
                piece.content += _CALL + body
                self._waiting = ""
            return False
        if (call := _read_call(body)) is None:
            piece.content += _CALL + body + end
        else:
            piece.calls.append(call)
            self._num_calls += 1
        self._waiting, self._state, self._at_tag = rest, "content", call is not None
        return True

    def _until(self, tag: str, last: bool) -> tuple[str, bool]:
        """Take the text before the tag, less whitespace; or as much as can't begin it, and whether it was found."""
        text, found, rest = self._waiting.partition(tag)
        if found:
            self._waiting = rest
            return text.rstrip(), True
        safe = len(text) if last else len(text[: start_of_partial(text, tag)].rstrip())
        self._waiting = text[safe:]
        return text[:safe], False


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")  # as they were written: a number may be larger than a float


def _read_call(body: str) -> tuple[str, str] | None:
    try:
        # Not Python's json, which takes NaN and halves of surrogate pairs for JSON.
        call = msgspec.json.decode(body, type=_Call)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    arguments = bytes(call.arguments).decode()
    return (call.name, arguments) if re.fullmatch(r"[\w.-]+", call.name) and arguments.startswith("{") else None
