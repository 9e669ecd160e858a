"""EventStream and BoundedHttpProtocol against clients of a few lines: errors, and who reads, sends or asks oddly."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from nanollm.server import http
from nanollm.server.errors import ApiError


class Client:
    """Takes all messages and never hangs up."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.closed = False

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    async def events(self, *items: bytes | Exception) -> AsyncGenerator[bytes, None]:
        try:
            for item in items:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True

    def read(self, *items: bytes | Exception) -> None:
        stream = http.EventStream(self.events(*items))
        asyncio.run(asyncio.wait_for(stream({}, self.receive, self.send), 10))  # type: ignore[arg-type]


def test_events_go_out_as_they_are() -> None:
    client = Client()
    client.read(b"a", b"b")
    assert [message.get("body") for message in client.messages] == [None, b"a", b"b", b""]
    assert client.messages[0]["status"] == 200 and not client.messages[-1]["more_body"]
    assert client.closed


def test_an_error_before_the_first_event_is_left_to_the_caller() -> None:
    client = Client()
    with pytest.raises(ApiError, match="no"):
        client.read(ApiError(404, "no"))
    assert client.messages == [] and client.closed


def test_an_error_after_it_is_an_event() -> None:
    client = Client()
    client.read(b"a", ApiError(504, "late"))
    assert client.messages[-2]["body"].startswith(b'data: {"error":{"message":"late"')
    assert not client.messages[-1]["more_body"]


Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi"


def converse(app: Any, talk: Talk) -> None:
    """Let a client talk to this app; then the server must come to have no connection and no request."""

    async def run() -> None:
        state = ServerState()
        config = uvicorn.Config(app, ws="none", lifespan="off", proxy_headers=False, log_config=None, access_log=False)
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(lambda: http.BoundedHttpProtocol(config, state, {}), "127.0.0.1", 0)
        async with listener:
            reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname(), limit=1 << 12)
            await talk(reader, writer)
            while state.connections or state.tasks:
                await asyncio.sleep(0.01)
            writer.close()

    async def in_time() -> None:
        await asyncio.wait_for(run(), 10)

    uvloop.run(in_time())


async def events_without_end(size: int) -> AsyncGenerator[bytes, None]:
    while True:
        yield b"x" * size
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [b"", POST, POST[:-1], b"GET /"])
@pytest.mark.parametrize("at_once", [False, True])
def test_who_hangs_up_loses_the_request_whatever_was_sent_behind_it(
    stream: bool, more: bytes, at_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        assert await request.body() == b"hi"
        if stream:
            await http.EventStream(events_without_end(9))(scope, receive, send)
        else:
            with suppress(ApiError):
                await http.until_disconnect(request, asyncio.Event().wait())

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for data in [POST + more] if at_once else [POST, more]:
            writer.write(data)
            await asyncio.sleep(0.05)
        writer.close()

    converse(app, talk)
    assert not caplog.records


def test_of_requests_sent_behind_each_other_the_first_is_answered() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(await Request(scope, receive).body())(scope, receive, send)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(POST + POST.replace(b"hi", b"ho") + POST)
        head, body = (await reader.read()).split(b"\r\n\r\n")
        assert body == b"hi" and b"connection: close" in head

    converse(app, talk)


@pytest.mark.parametrize("stream", [False, True])
def test_who_reads_nothing_is_dropped(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "STALLED_SECONDS", 0.2)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        answer = http.EventStream(events_without_end(1 << 20)) if stream else Response(b"x" * (16 << 20))
        await answer(scope, receive, send)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(POST)

    converse(app, talk)


def test_who_reads_slowly_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "STALLED_SECONDS", 0.5)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(b"x" * (16 << 20))(scope, receive, send)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(POST)
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(16):
            await asyncio.sleep(0.1)
            await reader.readexactly(1 << 20)
        writer.close()

    converse(app, talk)


def test_a_body_that_was_refused_may_not_come_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_SECONDS", 0.3)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(status_code=404)(scope, receive, send)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(POST.replace(b"2", b"1000000000"))
        await reader.readuntil(b"\r\n\r\n")
        with suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"x")
                await asyncio.sleep(0.01)

    converse(app, talk)


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_has_no_chunks(stream: bool) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        for event in (b"a", b"b"):
            yield event

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (http.EventStream(events()) if stream else Response(b"ab"))(scope, receive, send)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(POST.replace(b"1.1", b"1.0"))
        head, body = (await reader.read()).split(b"\r\n\r\n")
        assert body == b"ab" and b"chunked" not in head and (b"content-length: 2" in head) != stream

    converse(app, talk)
