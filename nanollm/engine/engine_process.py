"""The engine in a process of its own: the messages that cross, msgpack over a socket, and the loop that answers them.

The other side is nanollm.async_engine. Tokens only: text is its business, and HTTP never slows a step.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from nanollm.engine.engine_core import EngineCore, EngineStats
from nanollm.engine.sequence import Sequence
from nanollm.outputs import EngineOutput
from nanollm.runtime.channel import Kind, Link, LinkClosedError, as_unicode
from nanollm.sampling_params import SamplingParams

_CHECK_SECONDS = 0.5  # how often an idle engine looks whether its ranks are alive
_COMPILING_SECONDS = 0.002  # how often one looks whether a grammar is there that requests wait for


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
_DECODER: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)


def pack(message: FromClient | FromEngine) -> bytes:
    """A message without its frame, which Link makes. An error gets through whatever its text quotes."""
    if isinstance(message, Refused | Died):
        message.error = as_unicode(message.error)
    return msgspec.msgpack.encode(message)


def receive(link: Link, timeout: float) -> FromClient | None:
    """The next message; None after `timeout` seconds without one. LinkClosedError if the client is gone."""
    message = link.recv(timeout)
    return None if message is None else _DECODER.decode(message[1])


def serve(core: EngineCore, link: Link, check: Callable[[], None]) -> None:
    """Answer the client until it goes away. check: raises if the engine can't go on; called while there is no work."""
    compiling: dict[int, list[Sequence]] = {}  # requests whose grammar is not there yet
    with suppress(LinkClosedError):
        while True:
            changed = False
            while True:  # whatever has come in, before the next step; without work, wait for some
                changed |= _start_compiled(core, link, compiling)
                is_busy = changed or core.has_unfinished
                message = receive(link, 0.0 if is_busy else _COMPILING_SECONDS if compiling else _CHECK_SECONDS)
                if message is not None:
                    _take(core, link, message, compiling)
                    changed = True
                elif is_busy:
                    break
                else:
                    check()
            outputs = core.step()
            for output in outputs:
                metrics = output.metrics
                if output.finish_reason is None and metrics is not None and metrics.num_tokens > 1:
                    output.metrics = None  # nothing new
            link.send(Kind.REQUESTS, pack(Stepped(outputs, core.get_stats())))


def _start_compiled(core: EngineCore, link: Link, compiling: dict[int, list[Sequence]]) -> bool:
    """Queue, or refuse, the requests whose grammar is decided; whether there were any."""
    decided = [key for key, (first, *_) in compiling.items() if first.grammar is None or first.grammar.is_decided]
    for request_id in decided:
        sequences = compiling.pop(request_id)
        try:
            for seq in sequences:
                core.add(seq)
        except ValueError as error:
            link.send(Kind.REQUESTS, pack(Refused(request_id, str(error))))
    return bool(decided)


def _take(core: EngineCore, link: Link, message: FromClient, compiling: dict[int, list[Sequence]]) -> None:
    if isinstance(message, Abort):
        for request_id in message.request_ids:
            compiling.pop(request_id, None)
            core.abort(request_id)
    elif isinstance(message, Add):
        core.next_request_id = message.request_id
        try:
            sequences = core.make_sequences(
                message.token_ids, message.params, cache_salt=message.cache_salt, bad_words=message.bad_words
            )
        except ValueError as error:
            link.send(Kind.REQUESTS, pack(Refused(message.request_id, str(error))))
            return
        for seq in sequences:
            seq.metrics.arrival_time = message.arrival_time
        compiling[message.request_id] = sequences
