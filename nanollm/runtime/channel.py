"""Link: the control connection between rank 0 and one other rank: plans one way, errors the other; or rank 0's client.

A stream socket, on one host and on several alike: any message size works, the kernel orders and wakes, a dead peer
shows as end-of-file, and nothing has a name that a crash could leave behind.
"""

import hmac
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum

import numpy as np

HEADER = struct.Struct("<IIQ")  # of every message: magic, kind, payload bytes
_MAGIC = 0x4E4C4E4B
TOKEN_BYTES = 32


class Kind(IntEnum):
    """What a message is. Payloads are int32 arrays unless said otherwise."""

    READY = 0  # follower: started; or loaded: then num_kv_blocks that fit, and a fingerprint to be compared
    START = 1  # rank 0: go and join: path of the store as text; or loaded: num_kv_blocks to use
    PLAN = 2  # rank 0: a packed StepPlan
    CALL = 3  # torchrun, both ways: a collective call begins; the hash of its inputs, then rank 0's: of all the same
    OUTPUTS = 4  # rank 0, torchrun: the packed EngineOutputs of a step
    CLOSE = 5  # rank 0: leave; follower, torchrun: this rank makes no more calls
    ERROR = 6  # UTF-8 text; follower: time of its failure and traceback; rank 0: which rank failed and why
    APPLY = 7  # rank 0: name of a function to call with the model; follower: what it returned, as JSON
    REQUESTS = 8  # between the engine process and its client, both ways: msgpack of nanollm.engine.engine_process
    SAMPLE = 9  # rank 0: the rank's share of a packed SamplePlan, for the step of the PLAN before


def pack(kind: Kind, payload: bytes) -> bytes:
    """A message as it crosses."""
    return HEADER.pack(_MAGIC, kind, len(payload)) + payload


def as_unicode(text: str) -> str:
    """The text with halves of surrogate pairs, which UTF-8 can't hold, as their escapes."""
    return text.encode(errors="backslashreplace").decode()


class EngineDeadError(RuntimeError):
    """The engine can't go on: a rank failed, or it was closed. Make a new LLM."""


class LinkClosedError(Exception):
    """The other side is gone."""


class Link:
    """One end of the connection. send() and recv() are each for one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = bytearray()
        self._closed = False
        self._watcher: threading.Thread | None = None
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A host that vanishes sends no end-of-file: ask whether it is there after 30 s of silence.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, kind: Kind, payload: "np.ndarray | bytes" = b"", timeout: float = 60.0) -> None:
        """Queue a message; TimeoutError if the other side has not made room for it in `timeout` seconds."""
        left = memoryview(pack(kind, payload if isinstance(payload, bytes) else payload.tobytes()))
        deadline = time.monotonic() + timeout
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                if not self._poll(select.POLLOUT, deadline - time.monotonic()):
                    raise TimeoutError(f"a rank took no message for {timeout:g} s") from None
            except OSError as error:
                raise LinkClosedError(str(error)) from error

    def recv(self, timeout: float | None = None, spin: float = 0.0) -> tuple[Kind, bytearray] | None:
        """The next message; None after `timeout` seconds without a whole one. LinkClosedError at the end.

        spin: seconds to look again and again before sleeping, since waking up takes longer than a small message.
        """
        start = time.monotonic()
        deadline = None if timeout is None else start + timeout
        sleep_from = start + (spin if timeout is None else min(spin, timeout))
        while True:
            if len(self._received) >= HEADER.size:
                magic, kind, size = HEADER.unpack_from(self._received)
                if magic != _MAGIC:
                    raise LinkClosedError("the control connection carries something else than our messages")
                end = HEADER.size + size
                if len(self._received) >= end:
                    payload = self._received[HEADER.size : end]
                    del self._received[:end]
                    return Kind(kind), payload
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                if time.monotonic() < sleep_from:
                    continue
                if not self._poll(select.POLLIN, None if deadline is None else deadline - time.monotonic()):
                    return None
                continue
            except OSError as error:
                raise LinkClosedError(str(error)) from error
            if not data:
                raise LinkClosedError("end of file")
            self._received += data

    def wait(self, timeout: float) -> None:
        """Return when there is something to receive, or after `timeout` seconds."""
        self._poll(select.POLLIN, timeout)

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread of on_hangup
        self._socket.close()
        if self._watcher is not None:
            self._watcher.join(1.0)
            self._watcher = None

    def on_hangup(self, action: Callable[[], None]) -> None:
        """Call `action`, in a thread, when the other side is gone, whatever the main thread is doing then."""

        def watch() -> None:
            with suppress(ValueError):  # closed already
                self._poll(getattr(select, "POLLRDHUP", 0), None)
            if not self._closed:
                action()

        self._watcher = threading.Thread(target=watch, daemon=True, name="nanollm-hangup")
        self._watcher.start()

    def _poll(self, event: int, timeout: float | None) -> bool:
        """Wait for an event or a hangup; False after `timeout` seconds. select() fails where many files are open."""
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(None if timeout is None else max(timeout, 0) * 1000))


class Listener:
    """Rank 0's side of connecting to ranks that somebody else started. A secret keeps strangers out.

    address: the interface to listen on; the port is a free one.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0))
        self.port: int = self._socket.getsockname()[1]
        self.token = secrets.token_bytes(TOKEN_BYTES)

    def accept(self, num_links: int, timeout: float) -> dict[int, Link]:
        """Wait for the other ranks; rank -> link. TimeoutError names how many are missing."""
        links: dict[int, Link] = {}
        deadline = time.monotonic() + timeout
        while len(links) < num_links:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                missing = num_links - len(links)
                raise TimeoutError(f"{missing} of {num_links} ranks did not connect in {timeout:g} s") from None
            hello = b""
            with suppress(OSError):  # of a stranger's connection
                connection.settimeout(5.0)
                hello = connection.recv(TOKEN_BYTES + 4, socket.MSG_WAITALL)
            if hmac.compare_digest(hello[:TOKEN_BYTES], self.token) and len(hello) == TOKEN_BYTES + 4:
                links[int.from_bytes(hello[TOKEN_BYTES:], "little")] = Link(connection)
            else:
                connection.close()
        return links

    def close(self) -> None:
        self._socket.close()


def connect(address: str, port: int, token: bytes, rank: int, timeout: float) -> Link:
    """A follower's side of Listener.accept."""
    connection = socket.create_connection((address, port), timeout=timeout)
    connection.sendall(token + rank.to_bytes(4, "little"))
    return Link(connection)
