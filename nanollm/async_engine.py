"""AsyncLLMEngine: the engine for asyncio programs, such as the server. It runs in a process of its own."""

import asyncio
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from nanollm.config import EngineConfig
from nanollm.engine.engine_core import EngineStats
from nanollm.engine.engine_process import (
    Abort,
    Add,
    Died,
    FromClient,
    FromEngine,
    Ready,
    Refused,
    Start,
    Stepped,
    pack,
    receive,
    serve,
)
from nanollm.engine.grammars import Grammars
from nanollm.engine.sequence import check_token_ids
from nanollm.outputs import RequestOutput
from nanollm.runtime import channel
from nanollm.runtime.channel import EngineDeadError, Kind, Link, LinkClosedError
from nanollm.sampling_params import SamplingParams
from nanollm.text.output_processor import OutputProcessor
from nanollm.text.prompts import PreparedParams, Prompt, default_params, prepare_params, prepare_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanollm.models.source import ModelSource

T = TypeVar("T")

CLOSED = "this engine was closed: make a new AsyncLLMEngine"
_BUFFER_BYTES = 4 << 20  # between the processes, so that a busy client never holds up a step
_LAST_SECONDS = 5.0  # how long a step may take that is running when the client goes away
_CLOSE_SECONDS = 15.0  # how long the engine process may take to end by itself


class QueueFullError(Exception):
    """More requests wait than max_waiting allows: try again later."""


@dataclass
class _Mailbox:
    """Where outputs wait for one caller. A newer output replaces an older one, which it contains: a slow caller costs
    no memory and misses nothing."""

    outputs: dict[int, RequestOutput] = field(default_factory=dict)  # by index of the prompt
    error: Exception | None = None
    waiter: "asyncio.Future[None] | None" = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def take(self) -> dict[int, RequestOutput]:
        """Wait for outputs. Raises the error once there is one: then not everything that was asked for will come."""
        while self.error is None and not self.outputs:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        if self.error is not None:
            raise self.error
        outputs, self.outputs = self.outputs, {}
        return outputs


@dataclass
class _Request:
    """A request in the engine."""

    mailbox: _Mailbox
    index: int  # of its prompt in the caller's list
    external_id: str
    num_choices: int


class AsyncLLMEngine:
    """A model ready to generate for many callers of one event loop.

    max_waiting: most sequences that may wait for one of the max_num_seqs places; QueueFullError beyond.
    Other keyword arguments are EngineConfig's fields. `async with AsyncLLMEngine(...) as engine:` starts and closes it.
    """

    def __init__(self, model: str, *, max_waiting: int = 1024, **kwargs: Any) -> None:
        if max_waiting < 0:
            raise ValueError(f"max_waiting must be at least 0, got {max_waiting}")
        self.config = EngineConfig.from_args(model, **kwargs)
        self.capacity = self.config.max_num_seqs + max_waiting
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.max_model_len = 0
        self.stats = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0)
        self.dead = asyncio.Event()  # the engine process has ended, by itself or by close()
        # Tokenizing and templates take a while for long texts; one thread, since the tokenizer is not safe for more.
        self._text_thread = ThreadPoolExecutor(1, thread_name_prefix="nanollm-text")
        self._kwargs = kwargs
        self.why_dead = "the engine was not started: call start(), or use `async with`"
        self._requests: dict[int, _Request] = {}  # by the id of the first continuation
        self._ids: set[str] = set()  # external ones, of requests that are not finished
        self._num_unfinished = 0  # continuations
        self._next_id = 0
        self._deliverer: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine process and load the model. Raises as LLM's constructor does."""
        ours, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        code = f"from nanollm.async_engine import engine_main; engine_main({theirs.fileno()})"
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=_BUFFER_BYTES)
        try:
            self._send(Start(self.config.model, self._kwargs))
            source = await asyncio.to_thread(self._load_text)
            message = await self._receive()
            if isinstance(message, Died):
                raise ValueError(message.error) if message.bad_argument else EngineDeadError(message.error)
            assert isinstance(message, Ready)
        except BaseException:
            self._process.kill()  # it may be loading for minutes; its ranks end when it does
            await self.close()
            raise
        self._vocab_size = source.config.vocab_size
        self._processor = OutputProcessor(self.tokenizer)
        self.stats, self.max_model_len, self.why_dead = message.stats, message.max_model_len, ""
        self._deliverer = asyncio.create_task(self._deliver())

    async def close(self) -> None:
        """End the engine process; open requests get EngineDeadError. Twice is fine."""
        self._die(CLOSED)
        self._writer.close()
        await asyncio.to_thread(_end, self._process)
        if self._deliverer is not None:
            await self._deliverer
        self._text_thread.shutdown(wait=False)

    async def __aenter__(self) -> "AsyncLLMEngine":
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output so far whenever it grew; text and token_ids are cumulative.

        prompt, sampling_params: as for LLM.generate. request_id: must differ from those of unfinished requests.
        Closing the iterator, or cancelling the task that reads it, aborts the request.
        Raises ValueError if it is bad, QueueFullError if too many wait, EngineDeadError if the engine has ended.
        """
        async with aclosing(self.generate_all([prompt], sampling_params, request_id)) as outputs:
            async for _, output in outputs:
                yield output

    async def generate_all(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        stream: bool = True,
        timeout: float | None = None,
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """generate() for several prompts: yields (index of the prompt, its output so far).

        stream: False yields each output once, when it is finished. timeout: seconds until TimeoutError is raised;
        None and 0 are never.
        """
        self._check_alive()
        mailbox = _Mailbox()
        given = sampling_params or self.get_default_sampling_params()
        arrival_time = time.monotonic()
        ids: list[int] = []
        expiry = (
            asyncio.get_running_loop().call_later(timeout, self._expire, ids, mailbox, timeout) if timeout else None
        )
        try:
            prepare = self.in_text_thread if getattr(given, "bad_words", None) else _at_once
            checked = await prepare(prepare_params, self.tokenizer, given)
            if checked.params.logits_processors:
                raise ValueError("logits_processors are for LLM only: functions can't go to the engine's process")
            if (number := len(prompts) * checked.params.n) > self.capacity:
                raise ValueError(
                    f"prompts times n must be at most {self.capacity}, max_num_seqs + max_waiting, got {number}"
                )
            for index, prompt in enumerate(prompts):
                message, text = await self._prepare(prompt, checked, arrival_time)
                external_id = str(message.request_id) if request_id is None else request_id
                if len(prompts) > 1:
                    external_id = f"{external_id}-{index}"
                self._add(message, text, _Request(mailbox, index, external_id, checked.params.n), stream)
                ids.append(message.request_id)
            left = len(prompts)
            while left:
                for index, output in (await mailbox.take()).items():
                    left -= output.finished
                    yield index, output
        finally:
            if expiry is not None:
                expiry.cancel()
            self._forget(ids)

    def get_default_sampling_params(self) -> SamplingParams:
        """As LLM.get_default_sampling_params."""
        return default_params(self.generation_config)

    def _load_text(self) -> "ModelSource":
        from nanollm.llm import find_model, find_tokenizer  # torch takes seconds, in which the other process starts

        source = find_model(self.config)
        self.generation_config = source.generation_config
        self.tokenizer = find_tokenizer(self.config, source)
        return source

    async def _prepare(self, prompt: Prompt, checked: PreparedParams, arrival_time: float) -> tuple[Add, str | None]:
        """Returns the request as the engine takes it, and its text."""
        has_ids = isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is not None
        prepare = _at_once if has_ids or not isinstance(prompt, str | Mapping) else self.in_text_thread
        prepared = await prepare(prepare_prompt, self.tokenizer, prompt, self.max_model_len)
        token_ids = check_token_ids(prepared.token_ids, self._vocab_size).tolist()
        request_id = self._next_id
        self._next_id += checked.params.n
        return (
            Add(request_id, token_ids, checked.params, prepared.cache_salt, checked.bad_words, arrival_time),
            prepared.text,
        )

    async def in_text_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call it where long texts hold nobody up. EngineDeadError if the engine has ended."""
        self._check_alive()
        return await asyncio.get_running_loop().run_in_executor(self._text_thread, function, *arguments)

    def _check_alive(self) -> None:
        if self.why_dead:
            raise EngineDeadError(self.why_dead)

    def _add(self, message: Add, text: str | None, request: _Request, stream: bool) -> None:
        self._check_alive()
        if self._num_unfinished + request.num_choices > self.capacity:
            raise QueueFullError(
                f"{self._num_unfinished} sequences run or wait, which is as many as may: try again later"
            )
        if request.external_id in self._ids:
            raise ValueError(f"request_id {request.external_id!r} is in use by a request that has not finished")
        request_id = message.request_id
        self._send(message)  # first, as text in it may be none that can be sent
        self._processor.add(request_id, str(request_id), text, message.token_ids, message.params, stream=stream)
        self._requests[request_id] = request
        self._ids.add(request.external_id)
        self._num_unfinished += request.num_choices

    def _forget(self, request_ids: list[int]) -> None:
        """Take what is left of these requests out of the engine."""
        aborts: list[int] = []
        for request_id in request_ids:
            if (request := self._take_off(request_id)) is not None:
                aborts.extend(range(request_id, request_id + request.num_choices))
        if aborts:
            self._send(Abort(aborts))

    def _expire(self, request_ids: list[int], mailbox: _Mailbox, timeout: float) -> None:
        self._forget(request_ids)
        mailbox.error = TimeoutError(f"the request was not finished after {timeout:g} s")
        mailbox.wake()

    def _take_off(self, request_id: int) -> _Request | None:
        """The request, which is done; None if that is known."""
        if (request := self._requests.pop(request_id, None)) is not None:
            self._ids.discard(request.external_id)
            self._num_unfinished -= request.num_choices
            for choice_id in range(request_id, request_id + request.num_choices):
                self._processor.discard(choice_id)
        return request

    def _send(self, message: FromClient) -> None:
        if not self.dead.is_set():
            self._writer.write(channel.pack(Kind.REQUESTS, pack(message)))

    async def _receive(self) -> FromEngine:
        """The next message; Died too if the process ended without a word."""
        try:
            _, _, size = channel.HEADER.unpack(await self._reader.readexactly(channel.HEADER.size))
            return _DECODER.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError):
            code = await asyncio.to_thread(self._process.wait)
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return Died(f"the engine process ended {how}")

    async def _deliver(self) -> None:
        """Hand what the engine sends to whoever waits for it, until it dies."""
        try:
            self._die(await self._deliver_until_death())
        except Exception:
            self._die(traceback.format_exc())

    async def _deliver_until_death(self) -> str:
        """Returns why the engine died."""
        while not isinstance(message := await self._receive(), Died):
            if isinstance(message, Refused):
                if (request := self._take_off(message.request_id)) is not None:
                    request.mailbox.error = ValueError(message.error)
                    request.mailbox.wake()
            elif isinstance(message, Stepped):
                self.stats = message.stats
                results, aborts = self._processor.process(message.outputs)
                if aborts:
                    self._send(Abort(aborts))
                for output in results:
                    self._hand_over(output)
        return message.error

    def _hand_over(self, output: RequestOutput) -> None:
        request_id = int(output.request_id)
        request = self._take_off(request_id) if output.finished else self._requests.get(request_id)
        if request is not None:
            output.request_id = request.external_id
            request.mailbox.outputs[request.index] = output
            request.mailbox.wake()

    def _die(self, why: str) -> None:
        self.why_dead = self.why_dead or why
        self.dead.set()
        for request in self._requests.values():
            request.mailbox.error = EngineDeadError(self.why_dead)
            request.mailbox.wake()


_DECODER: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


async def _at_once(function: Callable[..., T], *arguments: Any) -> T:
    """Call it here, once the other tasks had their turn."""
    await asyncio.sleep(0)
    return function(*arguments)


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(_CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def engine_main(descriptor: int) -> None:
    """The main function of the engine process; its socket has this file descriptor."""
    from nanollm.llm import find_engine, find_tokenizer, start_engine

    # Ctrl-C and `kill` may reach the whole group: the client decides what they mean, and leaving is by its hangup.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanollm").setLevel(logging.INFO)
    logging.getLogger("huggingface_hub").propagate = False  # it prints its warnings itself
    link = Link(socket.socket(fileno=descriptor))
    link.on_hangup(_leave_soon)
    executor, code = None, 1
    try:
        start = receive(link, 60.0)
        assert isinstance(start, Start)
        config, source, device = find_engine(start.model, start.engine_args)
        grammars = Grammars(lambda: find_tokenizer(config, source), source.config)
        executor, core = start_engine(config, source, device, grammars)
        link.send(Kind.REQUESTS, pack(Ready(core.get_stats(), core.scheduler.max_model_len)))
        gc.freeze()  # what is there stays: collections need not go through it, which would hold up a step
        serve(core, link, executor.check)
        code = 0
    except Exception as error:
        bad_argument = executor is None and isinstance(error, ValueError | TypeError | OSError)
        text = str(error) if bad_argument or isinstance(error, EngineDeadError) else traceback.format_exc()
        with suppress(LinkClosedError, TimeoutError):
            link.send(Kind.REQUESTS, pack(Died(text, bad_argument)))
    finally:
        if executor is not None:
            executor.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # whatever threads may be waiting for


def _leave_soon() -> None:
    """The client is gone: the main thread sees that at the end of its step; if there is none, end without."""
    time.sleep(_LAST_SECONDS)
    os._exit(1)
