"""How requests come in and streams go out, and the bounds on both: sizes, times, and clients that go away."""

import asyncio
import math
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from nanollm.server.errors import ApiError, as_api_error, error_body

MAX_BODY_BYTES = 32 << 20
MAX_HEADER_BYTES = 64 << 10
HEADER_SECONDS = 30.0  # for a connection to bring a whole header
BODY_SECONDS = 60.0  # for a request to bring its whole body
STALLED_SECONDS = 30.0  # how long a reader may take nothing while the buffers are full

T = TypeVar("T")


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's, for which headers may be of any size, and headers, refused bodies and readers take any time.

    A request sent before the last one was answered is dropped, and the connection closed after that answer: uvicorn
    would keep it and read no further, and so not see that the client hangs up.
    """

    _header_bytes = 0
    _in_header = True
    _message_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None
    _answering: RequestResponseCycle = None  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(1 << 16, 0)  # once writing pauses, the buffer only shrinks until it is empty
        self._wait_for_message(HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._answering is not None and not self._answering.keep_alive and not self._answering.more_body:
            return  # nothing that comes now will be answered
        if self._in_header:
            self._header_bytes += len(data)
            self._wait_for_message(HEADER_SECONDS)
        super().data_received(data)
        if self._in_header and self._header_bytes > MAX_HEADER_BYTES:
            self.send_400_response(f"The header is larger than {MAX_HEADER_BYTES} bytes.")
        if self.pipeline:
            self.pipeline.clear()
            self.cycle = self._answering
            self.cycle.keep_alive = False
            self.flow.resume_reading()

    def on_headers_complete(self) -> None:
        self._in_header, self._header_bytes = False, 0
        self._stop_waiting()
        self._wait_for_message(BODY_SECONDS)
        if self.parser.get_http_version() == "1.0":
            self.app = self._without_chunks
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle

    def on_message_complete(self) -> None:
        self._in_header = True
        self._stop_waiting()
        super().on_message_complete()

    async def _without_chunks(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app for clients of HTTP/1.0, which know no chunks and read to the end."""

        async def send_plain(message: Message) -> None:
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, len(message.get("body", b""))
            await send(message)

        await self.config.loaded_app(scope, receive, send_plain)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader(math.inf)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader_timer is not None:
            self._reader_timer.cancel()

    def _wait_for_reader(self, before: float) -> None:
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._reader_timer = self.loop.call_later(STALLED_SECONDS, self._wait_for_reader, left)
        else:
            self.transport.abort()

    def _wait_for_message(self, seconds: float) -> None:
        if self._message_timer is None:
            self._message_timer = self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        self._message_timer = None
        if self.cycle is None or self.cycle.response_complete:  # else read_json does
            self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None


async def read_json(request: Request, kind: type[T]) -> T:
    """The request's body as a struct; ApiError says what is wrong with it."""
    try:
        body = await asyncio.wait_for(_read_body(request), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body took longer than {BODY_SECONDS:g} s") from None
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ApiError(400, f"the body is not what this path takes: {error}") from None


async def _read_body(request: Request) -> bytes:
    announced = request.headers.get("content-length", "")
    body = bytearray()
    try:
        if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body may have {MAX_BODY_BYTES} bytes, got {announced}")
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise ApiError(413, f"the body may have {MAX_BODY_BYTES} bytes, and is larger")
    except ClientDisconnect:
        raise ApiError(400, "the body is incomplete") from None
    return bytes(body)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What the coroutine returns; it is cancelled when the client goes away."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client went away")
        return task.result()
    finally:
        await _cancel(task, gone)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events. An error before the first event is raised, for a response of its own; later ones are events.

    The generator is closed when the client goes away.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self.init_headers({"cache-control": "no-cache"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender, gone = asyncio.ensure_future(self._send(send)), asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({sender, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            await _cancel(sender, gone)
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        started = False
        try:
            async for event in self._events:
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    started = True
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            if not started:
                raise
            event = b"data: " + msgspec.json.encode(error_body(as_api_error(error))) + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
