"""The engine in a process of its own: the messages that cross, msgpack over a socket, and the loop that answers them.

The other side is nanollm.async_engine. Tokens only: text is its business, and HTTP never slows a step.
"""

import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from nanollm.engine.engine_core import EngineCore, EngineStats
from nanollm.outputs import EngineOutput
from nanollm.sampling_params import SamplingParams

HEADER = struct.Struct("<I")  # bytes of the message that follows
BUFFER_BYTES = 4 << 20  # asked of the kernel, so that a busy client never holds up a step
_CHECK_SECONDS = 0.5  # how often an idle engine looks whether its ranks are alive
_LAST_SECONDS = 5.0  # how long a step may take that is running when the client goes away


class Start(msgspec.Struct, tag=True):
    """Client, first of all: the engine arguments."""

    model: str
    engine_args: dict[str, Any]


class Add(msgspec.Struct, tag=True):
    """Client: a request, whose params.n continuations have the ids from request_id on.

    arrival_time: in seconds of time.monotonic(), a clock that the processes of one host share.
    """

    request_id: int
    token_ids: list[int]
    params: SamplingParams
    cache_salt: str
    bad_words: list[list[int]]
    arrival_time: float


class Abort(msgspec.Struct, tag=True):
    """Client: nobody waits for these continuations any more."""

    request_ids: list[int]


class Ready(msgspec.Struct, tag=True):
    """Engine: the model is loaded."""

    stats: EngineStats
    max_model_len: int


class Refused(msgspec.Struct, tag=True):
    """Engine: a request is bad, and not queued. error: for its user."""

    request_id: int
    error: str


class Stepped(msgspec.Struct, tag=True):
    """Engine: what a step brought; also, with no outputs, that aborts have changed the stats."""

    outputs: list[EngineOutput]
    stats: EngineStats


class Died(msgspec.Struct, tag=True):
    """Engine, last of all: why it ended. bad_argument: it never started, and the user can mend that."""

    error: str
    bad_argument: bool = False


FromClient = Start | Add | Abort
FromEngine = Ready | Refused | Stepped | Died


def pack(message: FromClient | FromEngine) -> bytes:
    """A message as it crosses: its length, then msgpack."""
    data = msgspec.msgpack.encode(message)
    return HEADER.pack(len(data)) + data


class ClientLink:
    """The engine's end of the socket. A thread takes in messages while a step runs; send() is for the main thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._inbox: queue.SimpleQueue[FromClient | None] = queue.SimpleQueue()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        threading.Thread(target=self._read, daemon=True, name="nanollm-client").start()

    def send(self, message: FromEngine) -> None:
        """OSError if the client is gone."""
        self._socket.sendall(pack(message))

    def receive(self, timeout: float) -> FromClient | None:
        """The next message; queue.Empty after `timeout` seconds without one; None if the client is gone."""
        return self._inbox.get(timeout=timeout) if timeout else self._inbox.get_nowait()

    def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromClient)
        with self._socket.makefile("rb") as stream:
            while len(header := stream.read(HEADER.size)) == HEADER.size:
                self._inbox.put(decoder.decode(stream.read(*HEADER.unpack(header))))
        self._inbox.put(None)
        time.sleep(_LAST_SECONDS)  # the main thread leaves at the end of its step, if that ends
        os._exit(1)


def serve(core: EngineCore, link: ClientLink, check: Callable[[], None]) -> None:
    """Answer the client until it goes away. check: raises if the engine can't go on; called while there is no work."""
    while True:
        changed = False
        while True:  # whatever has come in, before the next step; without work, wait for some
            try:
                message = link.receive(0.0 if core.has_unfinished or changed else _CHECK_SECONDS)
            except queue.Empty:
                if core.has_unfinished or changed:
                    break
                check()
                continue
            if message is None:
                return
            changed = True
            _take(core, link, message)
        outputs = core.step()
        for output in outputs:
            metrics = output.metrics
            if output.finish_reason is None and metrics is not None and metrics.num_tokens > 1:
                output.metrics = None  # nothing new
        link.send(Stepped(outputs, core.get_stats()))


def _take(core: EngineCore, link: ClientLink, message: FromClient) -> None:
    if isinstance(message, Abort):
        for request_id in message.request_ids:
            core.abort(request_id)
    elif isinstance(message, Add):
        core.next_request_id = message.request_id
        try:
            sequences = core.make_sequences(
                message.token_ids, message.params, cache_salt=message.cache_salt, bad_words=message.bad_words
            )
        except ValueError as error:
            link.send(Refused(message.request_id, str(error)))
            return
        for seq in sequences:
            seq.metrics.arrival_time = message.arrival_time
            core.add(seq)
