"""POST /v1/completions: prompts continued, as OpenAI's legacy API has it."""

import codecs
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from nanollm.outputs import CompletionOutput, Logprob, RequestOutput
from nanollm.server.errors import ApiError
from nanollm.server.http import EventStream, read_json, until_disconnect
from nanollm.server.protocol import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, Usage
from nanollm.server.service import Service
from nanollm.text.detokenizer import TokenPieces
from nanollm.text.prompts import Prompt, need_tokenizer
from nanollm.text.tokenizer import encode_prompt

_Token = tuple[int, dict[int, Logprob] | None]  # and its log probabilities
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
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
class _Told:
    """What of a choice was told. offset: where the next token's text begins; decoder: of the tokens' bytes."""

    num_chars: int = 0
    num_tokens: int = 0
    offset: int = 0
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: _Utf8Decoder("replace"))


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
            self._choice(index, output, completion, _Told())
            for index, output in enumerate(finished)
            for completion in output.outputs
        ]
        return msgspec.json.encode(self._response(choices, Usage.of(finished, self.only_prompt)))

    async def events(self, outputs: AsyncGenerator[tuple[int, RequestOutput], None]) -> AsyncGenerator[bytes, None]:
        told: dict[tuple[int, int], _Told] = {}
        finished: list[RequestOutput] = []
        done: set[tuple[int, int]] = set()
        async with aclosing(outputs):
            async for index, output in outputs:
                for completion in output.outputs:
                    key = index, completion.index
                    if key in done:
                        continue
                    if completion.finish_reason is not None:
                        done.add(key)
                    elif not self._is_new(completion, told.get(key)):
                        continue
                    choice = self._choice(index, output, completion, told.setdefault(key, _Told()))
                    yield self._event([choice], None)
                if output.finished:
                    finished.append(output)
        if self.asked.include_usage:
            yield self._event([], Usage.of(finished, self.only_prompt))
        yield b"data: [DONE]\n\n"

    def _is_new(self, completion: CompletionOutput, told: _Told | None) -> bool:
        if told is None:  # without a token it waits for the first one's prompt, which isn't told yet
            return bool(completion.token_ids)
        new_ids = bool(self.asked.return_token_ids) and len(completion.token_ids) > told.num_tokens
        return new_ids or len(completion.text) > told.num_chars

    def _response(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        response = Completion(self.completion_id, self.created, self.service.model_name, choices)
        if usage is not None or self.asked.include_usage:
            response.usage = usage
        return response

    def _event(self, choices: list[CompletionChoice], usage: Usage | None) -> bytes:
        return b"data: " + msgspec.json.encode(self._response(choices, usage)) + b"\n\n"

    def _choice(self, index: int, output: RequestOutput, completion: CompletionOutput, told: _Told) -> CompletionChoice:
        """What wasn't told yet of a continuation; with the prompt before it if that was asked for."""
        text = "" if self.only_prompt else completion.text[told.num_chars :]
        logprobs = None if completion.logprobs is None else CompletionLogprobs([], [], [], [])
        if self.asked.echo and told.num_chars == told.num_tokens == 0:
            prompt = output.prompt if output.prompt is not None else self._text_of(output.prompt_token_ids)
            text = prompt + text
            if logprobs is not None:
                pairs = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
                self._extend(logprobs, pairs, told, in_prompt=True)
                told.offset, told.decoder = len(prompt), _Utf8Decoder("replace")
        if logprobs is not None and not self.only_prompt:
            new = completion.token_ids[told.num_tokens :], (completion.logprobs or [])[told.num_tokens :]
            self._extend(logprobs, zip(*new, strict=True), told)
        choice = CompletionChoice(
            index * self.n + completion.index, text, logprobs, completion.finish_reason, completion.stop_reason
        )
        if self.asked.return_token_ids:
            choice.token_ids = [] if self.only_prompt else completion.token_ids[told.num_tokens :]
            if told.num_tokens == 0:
                choice.prompt_token_ids = output.prompt_token_ids
        told.num_chars, told.num_tokens = len(completion.text), len(completion.token_ids)
        return choice

    def _extend(
        self, found: CompletionLogprobs, pairs: Iterable[_Token], told: _Told, *, in_prompt: bool = False
    ) -> None:
        """Add these tokens."""
        for token_id, logprobs in pairs:
            if logprobs is None:  # of a prompt's first token only the text is known
                chosen = Logprob(0.0, None, *self._pieces.spelled_first[token_id])
            else:
                chosen = logprobs[token_id]
            found.text_offset.append(told.offset)
            found.tokens.append(_name(token_id, chosen))
            found.token_logprobs.append(None if logprobs is None else max(chosen.logprob, LOWEST_LOGPROB))
            found.top_logprobs.append(None if logprobs is None else _by_name(logprobs))
            data = chosen.token_bytes
            if data is None and in_prompt and chosen.decoded_token:  # a special token, which is in the prompt's text
                data = chosen.decoded_token.encode()
            told.offset += len(told.decoder.decode(data or b""))

    @cached_property
    def _pieces(self) -> TokenPieces:
        """Of echoed tokens, special ones too; the tokenizer's vocabulary is gone through to make it."""
        return TokenPieces(need_tokenizer(self.service.engine.tokenizer, "echo"), False, True)

    def _text_of(self, token_ids: list[int]) -> str:
        tokenizer = need_tokenizer(self.service.engine.tokenizer, "echo")
        return str(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))


def _name(token_id: int, logprob: Logprob) -> str:
    """The token's text; as OpenAI and vLLM have it, its bytes if they are no text, its id if nothing else is known."""
    text, data = logprob.decoded_token, logprob.token_bytes
    if text is None:
        return f"token_id:{token_id}"
    return text if data is None or data == text.encode() else f"bytes:{repr(data)[2:-1]}"


def _by_name(logprobs: dict[int, Logprob]) -> dict[str, float]:
    """Log probabilities by the tokens' names; by the id where the name is taken."""
    found: dict[str, float] = {}
    for token_id, logprob in logprobs.items():
        name = _name(token_id, logprob)
        found[f"token_id:{token_id}" if name in found else name] = max(logprob.logprob, LOWEST_LOGPROB)
    return found
