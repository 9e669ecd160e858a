"""POST /v1/completions: prompts continued, as OpenAI's legacy API has it."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from nanollm.outputs import CompletionOutput, Logprob, RequestOutput
from nanollm.server.errors import ApiError
from nanollm.server.http import EventStream, read_json, until_disconnect
from nanollm.server.protocol import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, Usage
from nanollm.server.service import Service
from nanollm.text.prompts import Prompt, need_tokenizer
from nanollm.text.tokenizer import encode_prompt

_Token = tuple[int, dict[int, Logprob] | None]  # and its log probabilities
LOWEST_LOGPROB = -9999.0  # in place of minus infinity, which JSON doesn't have


async def create_completion(service: Service, request: Request) -> Response:
    """Answer the request, whole or as a stream."""
    asked = await read_json(request, CompletionRequest)
    service.check_model(asked.model)
    if asked.suffix:
        raise ApiError(400, "suffix is not supported: this model continues text, it doesn't fill in")
    prompts = [await _as_prompt(service, asked, prompt) for prompt in asked.prompts()]
    wants_nothing_new = asked.max_tokens == 0 and bool(asked.echo)  # but the prompt's log probabilities
    params = asked.params(
        service.engine.get_default_sampling_params(),
        logprobs=asked.logprobs,
        prompt_logprobs=asked.logprobs if asked.echo else None,
        **{"max_tokens": 1} if wants_nothing_new else {},
    )
    stream = bool(asked.stream)
    completion_id = service.make_id("cmpl", asked.request_id)
    outputs = service.run(prompts, params, completion_id, stream=stream)
    writer = _Writer(service, asked, completion_id, int(time.time()), params.n, wants_nothing_new)
    if stream:
        return EventStream(writer.events(outputs))
    body = await until_disconnect(request, writer.whole(outputs, len(prompts)))
    return Response(body, media_type="application/json")


async def _as_prompt(service: Service, asked: CompletionRequest, prompt: str | list[int]) -> Prompt:
    if not isinstance(prompt, str):
        return {"prompt_token_ids": prompt, "cache_salt": asked.cache_salt}
    found: dict[str, Any] = {"prompt": prompt, "cache_salt": asked.cache_salt}
    if not asked.add_special_tokens:
        tokenizer = need_tokenizer(service.engine.tokenizer, "a text prompt")
        encode = partial(encode_prompt, add_special_tokens=False, most=service.engine.max_model_len)
        ids = await service.engine.in_text_thread(encode, tokenizer, prompt)
        found["prompt_token_ids"] = ids
    return found


@dataclass
class _Writer:
    """Turns engine outputs into one request's response."""

    service: Service
    asked: CompletionRequest
    completion_id: str
    created: int
    n: int
    only_prompt: bool

    async def whole(self, outputs: AsyncGenerator[tuple[int, RequestOutput], None], num_prompts: int) -> bytes:
        found: list[RequestOutput | None] = [None] * num_prompts
        async with aclosing(outputs):
            async for index, output in outputs:
                found[index] = output
        finished = [output for output in found if output is not None]
        choices = [
            self._choice(index, output, completion, 0, 0)
            for index, output in enumerate(finished)
            for completion in output.outputs
        ]
        return msgspec.json.encode(self._response(choices, Usage.of(finished, self.only_prompt)))

    async def events(self, outputs: AsyncGenerator[tuple[int, RequestOutput], None]) -> AsyncGenerator[bytes, None]:
        sent: dict[tuple[int, int], tuple[int, int]] = {}  # characters and tokens of each choice
        finished: list[RequestOutput] = []
        done: set[tuple[int, int]] = set()
        async with aclosing(outputs):
            async for index, output in outputs:
                for completion in output.outputs:
                    key = index, completion.index
                    if key in done:
                        continue
                    num_chars, num_tokens = sent.get(key, (0, 0))
                    if completion.finish_reason is not None:
                        done.add(key)
                    elif key in sent and len(completion.text) == num_chars:
                        continue
                    choice = self._choice(index, output, completion, num_chars, num_tokens)
                    sent[key] = len(completion.text), len(completion.token_ids)
                    yield self._event([choice], None)
                if output.finished:
                    finished.append(output)
        if self.asked.include_usage:
            yield self._event([], Usage.of(finished, self.only_prompt))
        yield b"data: [DONE]\n\n"

    def _response(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        response = Completion(self.completion_id, self.created, self.service.model_name, choices)
        if usage is not None or self.asked.include_usage:
            response.usage = usage
        return response

    def _event(self, choices: list[CompletionChoice], usage: Usage | None) -> bytes:
        return b"data: " + msgspec.json.encode(self._response(choices, usage)) + b"\n\n"

    def _choice(
        self, index: int, output: RequestOutput, completion: CompletionOutput, num_chars: int, num_tokens: int
    ) -> CompletionChoice:
        """A continuation from this character and token on; with the prompt before it if that was asked for."""
        text = "" if self.only_prompt else completion.text[num_chars:]
        first = num_chars == num_tokens == 0
        logprobs = None
        if completion.logprobs is not None:
            new: list[_Token] = (
                [] if self.only_prompt else list(zip(completion.token_ids, completion.logprobs, strict=True))
            )
            logprobs = self._logprobs(new[num_tokens:], num_chars)
        if self.asked.echo:
            prompt = output.prompt if output.prompt is not None else self._text_of(output.prompt_token_ids)
            if first:
                text = prompt + text
                if logprobs is not None:
                    pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True))
                    logprobs = self._logprobs([*pairs, *new], 0)
            elif logprobs is not None:
                logprobs.text_offset = [offset + len(prompt) for offset in logprobs.text_offset]
        return CompletionChoice(
            index * self.n + completion.index, text, logprobs, completion.finish_reason, completion.stop_reason
        )

    def _logprobs(self, pairs: list[_Token], offset: int) -> CompletionLogprobs:
        found = CompletionLogprobs([], [], [], [])
        for token_id, logprobs in pairs:
            known = None if logprobs is None else logprobs[token_id].decoded_token
            token = self._text_of([token_id]) if known is None else known
            found.text_offset.append(offset)
            found.tokens.append(token)
            found.token_logprobs.append(None if logprobs is None else max(logprobs[token_id].logprob, LOWEST_LOGPROB))
            found.top_logprobs.append(
                None
                if logprobs is None
                else {str(each.decoded_token): max(each.logprob, LOWEST_LOGPROB) for each in logprobs.values()}
            )
            offset += len(token)
        return found

    def _text_of(self, token_ids: list[int]) -> str:
        tokenizer = need_tokenizer(self.service.engine.tokenizer, "echo")
        return str(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
