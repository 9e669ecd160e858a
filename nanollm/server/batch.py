"""Batch files: OpenAI's requests, one a line, answered as the server does into a file that a later run goes on with."""

import asyncio
import fcntl
import logging
import secrets
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from starlette.types import ASGIApp, Message
from tqdm import tqdm

from nanollm.async_engine import AsyncLLMEngine
from nanollm.runtime.channel import EngineDeadError
from nanollm.server.app import ServerOptions, build_app
from nanollm.server.service import Service

logger = logging.getLogger("nanollm")

URLS = ("/v1/chat/completions", "/v1/completions")
_BEGINNING = b'{"id":"batch_req_'  # of each line that we write


class Line(msgspec.Struct):
    """A line of the input. body: JSON, which the server's own checks read."""

    custom_id: str
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class LineResponse(msgspec.Struct):
    """What the server would have answered over HTTP."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct):
    code: str
    message: str


class AnsweredLine(msgspec.Struct):
    """A line of the output: a response, whatever its status, or why there could be none."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None


class _Asked(msgspec.Struct):
    """What matters of a request's body."""

    stream: Any = None


class _Said(msgspec.Struct):
    """What matters of a response's body."""

    usage: dict[str, Any] = {}


class BatchInput:
    """The lines of a file, each either answered or not.

    They are known by 64 bits of a hash of their custom_id: 9 bytes a line, however long the file.
    Raises ValueError, with the number of the line, if one is not JSON, or has no custom_id or another line's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digests = array("Q", (_digest(line.custom_id) for _, line in self._lines()))
        if not self._digests:
            raise ValueError(f"{path} has no requests")
        digests = np.frombuffer(self._digests, np.uint64)
        digests.sort()
        if twice := set(digests[1:][digests[1:] == digests[:-1]].tolist()):
            first: dict[int, int] = {}
            for number, line in self._lines():
                if (digest := _digest(line.custom_id)) in twice and number != first.setdefault(digest, number):
                    raise ValueError(
                        f"{path}: lines {first[digest]} and {number} have the same custom_id {line.custom_id!r:.200}: "
                        "give each one of its own"
                    )
        self._is_answered = bytearray(len(digests))

    def __len__(self) -> int:
        return len(self._digests)

    @property
    def num_answered(self) -> int:
        return self._is_answered.count(1)

    def mark(self, custom_id: str) -> bool:
        """This line is answered; False if there is none such."""
        if (index := self._find(custom_id)) is not None:
            self._is_answered[index] = True
        return index is not None

    def unanswered(self) -> Iterator[Line]:
        """Those that were not answered when they are read, in order."""
        for _, line in self._lines():
            if (index := self._find(line.custom_id)) is not None and not self._is_answered[index]:
                yield line

    def _find(self, custom_id: str) -> int | None:
        digest = _digest(custom_id)
        index = bisect_left(self._digests, digest)
        return index if index < len(self._digests) and self._digests[index] == digest else None

    def _lines(self) -> Iterator[tuple[int, Line]]:
        """With their numbers, from 1. Empty lines are skipped."""
        decoder = msgspec.json.Decoder(Line)
        with self.path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.isspace():
                    continue
                try:
                    yield number, decoder.decode(text)
                except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
                    raise ValueError(
                        f"{self.path}: line {number} is no request with a custom_id: {error}; mend or remove the line"
                    ) from None


def _digest(custom_id: str) -> int:
    return xxhash.xxh3_64_intdigest(custom_id.encode("utf-8", "surrogatepass"))


class BatchOutput:
    """The file of answers, which one process at a time may write. Lines that are there are marked in the input.

    What a killed run left of a last line is cut off. Raises ValueError if the file is no output of this input.
    """

    def __init__(self, path: Path, lines: BatchInput) -> None:
        if path.exists() and (not path.is_file() or path.samefile(lines.path)):
            raise ValueError(f"{path} can't be the output: name a file of its own")
        self._path = path
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path} is being written by another run: wait for its end") from None
        self._read(lines)

    def _read(self, lines: BatchInput) -> None:
        decoder = msgspec.json.Decoder(AnsweredLine)
        end = 0
        self._file.seek(0)
        for number, text in enumerate(self._file, 1):
            is_whole = text.endswith(b"\n")
            if not is_whole and _BEGINNING.startswith(text[: len(_BEGINNING)]):
                logger.warning("%s: its last line is not whole and is cut off", self._path)
                self._file.truncate(end)
                return
            try:
                custom_id = decoder.decode(text if is_whole else b"").custom_id
            except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
                raise ValueError(
                    f"{self._path}: line {number} is no answer: {error}; remove it, or name another --output"
                ) from None
            if not lines.mark(custom_id):
                raise ValueError(
                    f"{self._path}: line {number} answers {custom_id!r:.200}, which {lines.path} doesn't ask: name "
                    "another output"
                )
            end += len(text)

    def write(self, line: AnsweredLine) -> None:
        """It is the system's to keep, once this returns: no end of this process loses it."""
        with self._errors_named():
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Others may write it then. What could not be written is tried again."""
        with self._errors_named():
            self._file.close()

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(
                f"{self._path} can't be written ({error.strerror}): mend that, and the same command goes on from there"
            ) from error


def run_batch(model: str, engine_args: dict[str, Any], input_path: Path, output_path: Path, model_name: str) -> int:
    """Answer every line that the output doesn't answer yet; returns the exit code.

    ValueError, before the model is loaded, if one of the files is not what it must be. EngineDeadError if the engine
    dies; what was answered is in the output.
    """
    import uvloop

    if not input_path.is_file():
        why = "must be a regular file, since it is read more than once" if input_path.exists() else "does not exist"
        raise ValueError(f"--input {input_path} {why}")
    lines = BatchInput(input_path)
    output = BatchOutput(output_path, lines)
    try:
        if lines.num_answered < len(lines):
            uvloop.run(_run(model, engine_args, model_name, lines, output))
    finally:
        print(f"{output_path}: {lines.num_answered} of {len(lines)} lines are answered", file=sys.stderr)
        output.close()
    return int(lines.num_answered < len(lines))


async def _run(
    model: str, engine_args: dict[str, Any], model_name: str, lines: BatchInput, output: BatchOutput
) -> None:
    # No line is turned away: there are never more than the workers below have taken.
    async with AsyncLLMEngine(model, max_waiting=sys.maxsize, **engine_args) as engine:
        app = build_app(Service(engine, model_name, None), ServerOptions())
        unanswered = lines.unanswered()  # one iterator for all workers, each of which takes the next line
        with tqdm(total=len(lines), initial=lines.num_answered, unit="line", dynamic_ncols=True) as bar:
            num_tokens = num_errors = 0

            async def work() -> None:
                nonlocal num_tokens, num_errors
                for line in unanswered:
                    answer, num_new = await _answer(app, line)
                    output.write(answer)
                    lines.mark(line.custom_id)
                    num_tokens += num_new
                    speed = num_tokens / max(bar.format_dict["elapsed"], 1e-9)
                    num_errors += answer.response is None or answer.response.status_code != 200
                    bar.set_postfix_str(f"{speed:.0f} tokens/s, errors: {num_errors}", refresh=False)
                    bar.update()

            # Twice as many as run at once, so that the next ones wait in the engine's own queue.
            await asyncio.gather(*(work() for _ in range(2 * engine.config.max_num_seqs)))


async def _answer(app: ASGIApp, line: Line) -> tuple[AnsweredLine, int]:
    """The line's answer, and how many tokens were generated for it. EngineDeadError if there can be none any more."""
    asked, problem = _Asked(), None
    with suppress(msgspec.DecodeError):  # not an object: the server says so
        asked = msgspec.json.decode(line.body, type=_Asked)
    if line.method != "POST":
        problem = f"method must be POST, got {line.method!r:.200}"
    elif line.url not in URLS:
        problem = f"url must be {' or '.join(URLS)}, got {line.url!r:.200}"
    elif asked.stream:
        problem = "stream must be false: a line of a batch has one answer"
    answer = AnsweredLine(f"batch_req_{secrets.token_hex(12)}", line.custom_id, None, None)
    if problem is not None:
        answer.error = LineError("invalid_request", problem)
        return answer, 0
    status, body = await _post(app, line.url, bytes(line.body))
    if status == 503:
        raise EngineDeadError(msgspec.json.decode(body)["error"]["message"])
    try:
        said = msgspec.json.decode(body, type=_Said)
    except (msgspec.DecodeError, UnicodeError):  # it would not be one line
        answer.error = LineError("server_error", "the server's answer is not the JSON of one response")
        return answer, 0
    answer.response = LineResponse(status, f"req_{secrets.token_hex(12)}", msgspec.Raw(body))
    return answer, said.usage.get("completion_tokens", 0)


async def _post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """The status and the body that a POST to this path of the server is answered with."""
    messages: list[Message] = [{"type": "http.request", "body": body}]
    status, answer = 500, b""

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()  # this client doesn't go away
        return messages.pop()

    async def send(message: Message) -> None:
        nonlocal status, answer
        status = message.get("status", status)
        answer += message.get("body", b"")

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    try:
        await app(scope, receive, send)
    except Exception:  # of ours; the client was told 500, as over HTTP
        if not answer:
            raise
        logger.exception("POST %s failed", path)
    return status, answer
