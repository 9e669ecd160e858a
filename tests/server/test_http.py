"""EventStream against a client of a few lines: errors before and after the first event, and who reads nothing."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from nanollm.server import http
from nanollm.server.errors import ApiError


class Client:
    """Takes num_events messages, then no more; never hangs up."""

    def __init__(self, num_events: int = 99) -> None:
        self.messages: list[Any] = []
        self.num_events = num_events
        self.aborted = self.closed = False

    async def send(self, message: Any) -> None:
        if len(self.messages) == self.num_events:
            await asyncio.Event().wait()
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
        scope = {"extensions": {"nanollm.abort": {"call": lambda: setattr(self, "aborted", True)}}}
        stream = http.EventStream(self.events(*items))
        asyncio.run(asyncio.wait_for(stream(scope, self.receive, self.send), 10))  # type: ignore[arg-type]


def test_events_go_out_as_they_are() -> None:
    client = Client()
    client.read(b"a", b"b")
    assert [message.get("body") for message in client.messages] == [None, b"a", b"b", b""]
    assert client.messages[0]["status"] == 200 and not client.messages[-1]["more_body"]
    assert client.closed and not client.aborted


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


def test_a_client_that_reads_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "STALLED_SECONDS", 0.1)
    client = Client(num_events=2)
    client.read(b"a", b"b", b"c")
    assert client.aborted and client.closed
