"""POST /v1/chat/completions: the assistant's next message, with its reasoning and its calls of tools apart."""

import json
import re
import secrets
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from nanollm.engine.json_schema import check_form
from nanollm.outputs import CompletionOutput, Logprob, RequestOutput
from nanollm.sampling_params import MAX_GRAMMAR_CHARS
from nanollm.server.completions import LOWEST_LOGPROB
from nanollm.server.errors import ApiError
from nanollm.server.http import EventStream, read_json, until_disconnect
from nanollm.server.protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    FunctionCall,
    Message,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    Usage,
)
from nanollm.server.service import Service
from nanollm.text.answer_parser import AnswerParser, Piece
from nanollm.text.prompts import default_params

MAX_TOOLS = 128


async def create_chat(service: Service, request: Request) -> Response:
    """Answer the request, whole or as a stream."""
    asked = await read_json(request, ChatRequest)
    service.check_model(asked.model)
    if asked.chat_template is not None:
        raise ApiError(400, "chat_template is the server's to choose: start it with --chat-template")
    if asked.tools:  # Python may take seconds to compile a small pattern
        forced, max_calls, schema, ending = await service.in_time("reading tools", lambda: _read_tools(asked))
    else:
        forced, max_calls, schema, ending = _read_tools(asked)
    messages = [_as_template_message(i, message) for i, message in enumerate(asked.messages)]
    thinks = is_thinking = False

    def suffix(text: str) -> str:
        nonlocal thinks, is_thinking, forced
        thinks = "</think>" in str(service.engine.tokenizer.chat_template)  # type: ignore[union-attr]
        is_thinking = thinks and asked.add_generation_prompt and text.rstrip().endswith("<think>")
        if forced and is_thinking:
            forced = f"</think>\n\n{forced}"
        return forced

    text, token_ids = await service.encode_chat(
        messages, asked.tools, asked.add_generation_prompt, asked.chat_template_kwargs, suffix
    )
    max_tokens = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true")
    params = asked.params(
        default_params(service.engine.generation_config, chat=True),
        logprobs=asked.top_logprobs or 0 if asked.logprobs else None,
        **{} if max_tokens is None else {"max_tokens": max_tokens},
        **{} if schema is None else {"structured_outputs": {"json": schema}, "include_stop_str_in_output": False},
    )
    stream = bool(asked.stream)
    chat_id = service.make_id("chatcmpl", asked.request_id)
    prompt = {"prompt": text, "prompt_token_ids": token_ids, "cache_salt": asked.cache_salt}
    outputs = service.run([prompt], params, chat_id, stream=stream)
    answers = [
        _Answer(
            AnswerParser(thinks=thinks, is_thinking=is_thinking, max_calls=max_calls),
            forced,
            ending,
            params.logprobs or 0,
        )
        for _ in range(params.n)
    ]
    writer = _Writer(service.model_name, asked, chat_id, int(time.time()), answers)
    if stream:
        return EventStream(writer.events(outputs))
    body = await until_disconnect(request, writer.whole(outputs))
    return Response(body, media_type="application/json")


def _read_tools(asked: ChatRequest) -> tuple[str, int, dict[str, Any] | None, str]:
    """Returns (how the answer must begin so that a tool is called, most calls to look for, the schema of what follows,
    what ends it then).

    A beginning ends where a token does: tokens like ` {"` must not be cut. Where one function can be meant, the model
    writes its arguments only; else its name too. Functions with "strict": false may get any arguments.
    """
    names = [_tool_name(i, tool) for i, tool in enumerate(asked.tools or [])]
    if len(names) > MAX_TOOLS:
        raise ApiError(400, f"tools may be at most {MAX_TOOLS}, got {len(names)}")
    choice = asked.tool_choice
    many = 1 if asked.parallel_tool_calls is False else sys.maxsize
    if choice is None or choice in ("auto", "none"):
        return "", many if names and choice != "none" else 0, None, ""
    if not names:
        raise ApiError(400, f"tool_choice {choice!r:.200} needs tools")
    if choice != "required":
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if name not in names:
            wanted = '{"type": "function", "function": {"name": one of tools}}'
            raise ApiError(400, f"tool_choice must be none, auto, required or {wanted}, got {choice!r:.200}")
        names = [name]
    functions = {tool["function"]["name"]: tool["function"] for tool in asked.tools or []}
    strict = [name for name in names if functions[name].get("strict") is not False]
    if strict and asked.structure is not None:
        raise ApiError(400, f"tool_choice {choice!r:.200} says what the answer is: leave out what else says so")
    anything = {"type": "object", "additionalProperties": True}
    schemas = {name: functions[name].get("parameters") or anything for name in strict}
    if len(names) == 1:
        beginning = f'<tool_call>\n{{"name": {json.dumps(names[0])}, "arguments":'
        return beginning, 1, schemas.get(names[0]), "}\n</tool_call>" if strict else ""
    if not strict:
        return '<tool_call>\n{"name":', many, None, ""
    calls = []
    for name in names:
        arguments = schemas.get(name, anything)
        if "$ref" in json.dumps(arguments):  # which is read from the root
            arguments = anything
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return "<tool_call>\n", 1, {"anyOf": calls}, "\n</tool_call>"


def _tool_name(i: int, tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if function is None or not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,64}", name):
        raise ApiError(400, f'tools[{i}] must be {{"type": "function", "function": {{"name": …}}}}, got {tool!r:.200}')
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None) or (parameters or {}).get("type", "object") != "object":
        raise ApiError(400, f"tools[{i}].function.parameters must be a schema of type object, got {parameters!r:.200}")
    if (size := len(json.dumps(parameters))) > MAX_GRAMMAR_CHARS:
        raise ApiError(400, f"tools[{i}].function.parameters may have {MAX_GRAMMAR_CHARS} characters, got {size}")
    check_form(parameters, f"tools[{i}].function.parameters")
    return name


def _as_template_message(i: int, message: Any) -> Any:
    """The message with its calls' arguments as objects, which is how templates know them."""
    if not isinstance(message, dict):
        return message  # render_chat says what is wrong
    others = message.get("tool_calls") or message.get("reasoning_content")  # an answer may have these alone
    if message.get("content") is None and not (message.get("role") == "assistant" and others):
        raise ApiError(400, f"messages[{i}]: content is missing")
    if not (calls := message.get("tool_calls")):
        return message
    try:
        functions = [dict(call["function"]) for call in calls]
        for function in functions:
            if isinstance(function["arguments"], str):
                function["arguments"] = json.loads(function["arguments"] or "{}")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ApiError(
            400,
            f"messages[{i}].tool_calls must each have a function with a name and arguments as JSON, got {calls!r:.200}",
        ) from None
    return {**message, "tool_calls": [{"type": "function", "function": function} for function in functions]}


@dataclass
class _Answer:
    """One choice: how far it was read, and what came of it."""

    parser: AnswerParser
    forced: str  # how it begins, which the model doesn't repeat
    ending: str  # what follows what the model wrote, once that is complete
    num_top: int  # likeliest tokens to tell at each
    num_chars: int = 0
    num_tokens: int = 0
    started: bool = False
    finished: bool = False
    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def advance(self, completion: CompletionOutput) -> tuple[Piece, list[ToolCall], ChatLogprobs | None]:
        """What is new in this output, which contains what was read before."""
        text, last = completion.text[self.num_chars :], completion.finish_reason is not None
        text = text if self.started else self.forced + text
        piece = self.parser.push(text + self.ending if completion.finish_reason == "stop" else text, last)
        calls = [
            ToolCall(f"call_{secrets.token_hex(12)}", FunctionCall(name, arguments), index=index)
            for index, (name, arguments) in enumerate(piece.calls, len(self.calls))
        ]
        logprobs = None
        if completion.logprobs is not None:
            new = zip(completion.token_ids[self.num_tokens :], completion.logprobs[self.num_tokens :], strict=True)
            logprobs = ChatLogprobs([_token_logprob(*pair, self.num_top) for pair in new])
        self.num_chars, self.num_tokens = len(completion.text), len(completion.token_ids)
        self.started, self.finished = True, last
        self.reasoning += piece.reasoning
        self.content += piece.content
        self.calls += calls
        return piece, calls, logprobs

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        return "tool_calls" if completion.finish_reason == "stop" and self.calls else completion.finish_reason


def _token_logprob(token_id: int, logprobs: dict[int, Logprob], num_top: int) -> TokenLogprob:
    """The chosen token, and the likeliest ones by rank."""
    chosen = _top_logprob(logprobs[token_id])
    likeliest = sorted(logprobs.values(), key=lambda each: each.rank or 0)[:num_top]
    return TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, [_top_logprob(each) for each in likeliest])


def _top_logprob(logprob: Logprob) -> TopLogprob:
    data = None if logprob.token_bytes is None else list(logprob.token_bytes)
    return TopLogprob(logprob.decoded_token or "", max(logprob.logprob, LOWEST_LOGPROB), data)


@dataclass
class _Writer:
    """Turns engine outputs into one request's response."""

    model_name: str
    asked: ChatRequest
    chat_id: str
    created: int
    answers: list[_Answer]

    async def whole(self, outputs: AsyncGenerator[tuple[int, RequestOutput], None]) -> bytes:
        async with aclosing(outputs):
            _, output = [pair async for pair in outputs][-1]
        choices = []
        for answer, completion in zip(self.answers, output.outputs, strict=True):
            _, _, logprobs = answer.advance(completion)
            message = Message("assistant", answer.content or (None if answer.calls or answer.reasoning else ""))
            if answer.reasoning:
                message.reasoning_content = answer.reasoning
            if answer.calls:
                message.tool_calls = [ToolCall(call.id, call.function) for call in answer.calls]
            reason = answer.finish_reason(completion)
            choice = ChatChoice(completion.index, message, logprobs, reason, completion.stop_reason)
            if self.asked.return_token_ids:
                choice.token_ids = completion.token_ids
            choices.append(choice)
        response = ChatCompletion(self.chat_id, self.created, self.model_name, choices, Usage.of([output]))
        if self.asked.return_token_ids:
            response.prompt_token_ids = output.prompt_token_ids
        return msgspec.json.encode(response)

    async def events(self, outputs: AsyncGenerator[tuple[int, RequestOutput], None]) -> AsyncGenerator[bytes, None]:
        async with aclosing(outputs):
            async for _, output in outputs:
                for answer, completion in zip(self.answers, output.outputs, strict=True):
                    if answer.finished:
                        continue
                    if not answer.started:
                        first = ChatChunkChoice(completion.index, Message("assistant", ""))
                        yield self._event([first], None, output.prompt_token_ids)
                    new_ids = completion.token_ids[answer.num_tokens :] if self.asked.return_token_ids else UNSET
                    piece, calls, logprobs = answer.advance(completion)
                    delta = Message()
                    if piece.reasoning:
                        delta.reasoning_content = piece.reasoning
                    if piece.content:
                        delta.content = piece.content
                    if calls:
                        delta.tool_calls = calls
                    if piece.reasoning or piece.content or calls or logprobs or new_ids or answer.finished:
                        reason, stop = answer.finish_reason(completion), completion.stop_reason
                        choice = ChatChunkChoice(completion.index, delta, logprobs, reason, stop, new_ids)
                        yield self._event([choice], None)
        if self.asked.include_usage:
            yield self._event([], Usage.of([output]))
        yield b"data: [DONE]\n\n"

    def _event(
        self, choices: list[ChatChunkChoice], usage: Usage | None, prompt_token_ids: list[int] | None = None
    ) -> bytes:
        chunk = ChatChunk(self.chat_id, self.created, self.model_name, choices)
        if self.asked.return_token_ids and prompt_token_ids is not None:
            chunk.prompt_token_ids = prompt_token_ids
        if self.asked.include_usage:
            chunk.usage = usage
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
