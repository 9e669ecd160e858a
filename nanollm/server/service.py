"""What all paths share: one engine, its name, its metrics."""

import ctypes
import re
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from nanollm.async_engine import AsyncLLMEngine
from nanollm.outputs import NO_TOKEN, RequestOutput
from nanollm.sampling_params import SamplingParams
from nanollm.server.errors import ApiError
from nanollm.server.metrics import Metrics
from nanollm.text.chat import render_chat
from nanollm.text.prompts import Prompt, need_tokenizer
from nanollm.text.tokenizer import encode_prompt

TEMPLATE_SECONDS = 5.0  # for tools; for a chat template, the model's own program, and for tokenizing what it made

T = TypeVar("T")


class Service:
    """The engine as the paths use it. request_timeout: seconds after which a request is ended; None and 0 are never."""

    def __init__(self, engine: AsyncLLMEngine, model_name: str, request_timeout: float | None) -> None:
        self.engine, self.model_name = engine, model_name
        self.metrics = Metrics(engine, model_name)
        self.started = int(time.time())
        self._request_timeout = request_timeout

    def check_model(self, name: str | None) -> None:
        """ApiError 404 if this is not the model's name."""
        if name not in (None, self.model_name):
            raise ApiError(404, f"there is no model {name!r:.200} here, only {self.model_name!r}", "model_not_found")

    def make_id(self, kind: str, wished: str | None) -> str:
        """A request's id: the client's own if it gave one."""
        if wished is not None and not re.fullmatch(r"[\x21-\x7e]{1,128}", wished):
            raise ApiError(400, "request_id must be 1 to 128 printable ASCII characters without spaces")
        return f"{kind}-{wished or secrets.token_hex(12)}"

    async def run(
        self, prompts: Sequence[Prompt], params: SamplingParams, request_id: str, *, stream: bool
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """AsyncLLMEngine.generate_all, counted. ApiError if it ends with an error, 400 if the request is at fault."""
        left = len(prompts)
        outputs = self.engine.generate_all(prompts, params, request_id, stream=stream, timeout=self._request_timeout)
        try:
            async with aclosing(outputs):
                async for index, output in outputs:
                    if output.finished:
                        left -= 1
                        self.metrics.count_finished(output)
                        for completion in output.outputs:
                            if completion.finish_reason == "error":
                                reason = completion.stop_reason or "the model chose a token that may not come"
                                raise ApiError(500 if completion.stop_reason in (None, NO_TOKEN) else 400, str(reason))
                    yield index, output
        finally:
            if left:
                self.metrics.count_aborted(left * params.n)

    async def encode_chat(
        self,
        messages: list[Any],
        tools: list[Any] | None,
        add_generation_prompt: bool,
        variables: dict[str, Any] | None,
        suffix: Callable[[str], str] = lambda text: "",
    ) -> tuple[str, list[int]]:
        """The prompt of a conversation, as text and token ids. ApiError if it can't be made in time.

        variables: of the chat template. suffix: what comes after the text that it made.
        """
        if taken := {"tools", "add_generation_prompt"} & (variables or {}).keys():
            raise ApiError(400, f"chat_template_kwargs can't hold {', '.join(taken)}: these are fields of their own")

        def encode() -> tuple[str, list[int]]:
            tokenizer = need_tokenizer(self.engine.tokenizer, "chat")
            text = render_chat(
                tokenizer, messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables or {}
            )
            text += suffix(text)
            return text, encode_prompt(tokenizer, text, add_special_tokens=False, most=self.engine.max_model_len)

        return await self.in_time("the chat template", encode)

    async def in_time(self, what: str, function: Callable[[], T]) -> T:
        """Call in the text thread what a request can make slow; ApiError if it takes longer than TEMPLATE_SECONDS."""
        try:
            return await self.engine.in_text_thread(_in_time, function, TEMPLATE_SECONDS)
        except _TookTooLong:
            raise ApiError(400, f"{what} took longer than {TEMPLATE_SECONDS:g} s") from None


class _TookTooLong(BaseException):
    """Not an Exception, so that nothing on the way takes it for a failure of its own."""


def _in_time(function: Callable[[], T], seconds: float) -> T:
    """Call the function; _TookTooLong is raised in the midst of it if it takes longer, as far as it is Python."""
    thread_id = threading.get_ident()
    lock, done = threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not done:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(_TookTooLong))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        return function()
    finally:
        with lock:
            done = True
        timer.cancel()
