"""What of an assistant's text is thought, what answer, what calls of tools: Qwen3's tags, as they come in.

`<think>…</think>` at the start is reasoning; `<tool_call>{"name": …, "arguments": {…}}</tool_call>` is a call.
Whitespace next to a tag belongs to it. What can't be read as a call, or is cut off, stays content: nothing is lost.
"""

import json
import re
from dataclasses import dataclass, field

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
        safe = len(text) if last else len(text[: _start_of_partial(text, tag)].rstrip())
        self._waiting = text[safe:]
        return text[:safe], False


def _start_of_partial(text: str, tag: str) -> int:
    """Where a suffix of the text begins that begins the tag; len(text) if none does."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return len(text) - length
    return len(text)


def _read_call(body: str) -> tuple[str, str] | None:
    try:
        call = json.loads(body)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name) or not isinstance(arguments, dict):
        return None
    # An escape of half a surrogate pair stays one: it can't be sent as a character.
    return name, json.dumps(arguments, ensure_ascii=False).encode(errors="backslashreplace").decode()
