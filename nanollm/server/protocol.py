"""OpenAI's requests and responses as structs, and how a request's fields become SamplingParams.

Fields that OpenAI doesn't have are vLLM's. Unknown ones are ignored, as clients send many that don't matter here.
"""

from dataclasses import fields, replace
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from nanollm.outputs import RequestOutput
from nanollm.sampling_params import SamplingParams
from nanollm.server.errors import ApiError

MAX_PROMPTS = 1024  # in one request
MAX_CHOICES = 128  # n
MAX_STOPS = 32
MAX_BIASES = 1024
_PARAMS = {field.name for field in fields(SamplingParams)}


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What completions and chats have in common. None everywhere is: not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    best_of: int | None = None
    response_format: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Of SamplingParams, by their names there.
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    # To be refused by name: there is no place for them in an answer, and functions can't come.
    prompt_logprobs: int | None = None
    detokenize: bool | None = None
    logits_processors: list[Any] | None = None
    # vLLM's, for clients that need the ids themselves
    return_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def params(self, defaults: SamplingParams, **others: Any) -> SamplingParams:
        """The defaults with what was given here, and `others`. ValueError names what is wrong."""
        for name, count, limit in (
            ("n", self.n or 1, MAX_CHOICES),
            ("stop", len(self.stop) if isinstance(self.stop, list) else 1, MAX_STOPS),
            ("logit_bias", len(self.logit_bias or {}), MAX_BIASES),
        ):
            if count > limit:
                what = "" if name == "n" else " entries"
                raise ValueError(f"{name} may be at most {limit}{what} in one request, got {count}")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError(f"best_of must equal n, got {self.best_of}: ask for n and choose yourself")
        for name, other in (
            ("prompt_logprobs", "echo and logprobs in /v1/completions bring them"),
            ("logits_processors", "they are for LLM alone"),
        ):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is not answered over HTTP: {other}")
        if self.detokenize is False:
            raise ValueError("detokenize must be true over HTTP: an answer is text")
        given = {name: getattr(self, name) for name in _PARAMS & set(self.__struct_fields__)}
        del given["logprobs"]  # means another thing in each request
        given["structured_outputs"] = self.structure
        given = {name: value for name, value in given.items() if value is not None}
        return replace(defaults, **given | others)

    @property
    def structure(self) -> dict[str, Any] | None:
        """What the output must be, wherever that was said. ValueError if that is in two places, or none to read."""
        guided = {name: getattr(self, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
        guided = {name: value for name, value in guided.items() if value is not None}
        ways = [self.structured_outputs, guided or None, _read_response_format(self.response_format)]
        found = [way for way in ways if way is not None]
        if len(found) > 1:
            raise ValueError("give one of response_format, structured_outputs and the guided_ fields")
        return found[0] if found else None


def _read_response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """OpenAI's field in terms of structured_outputs."""
    kind = "text" if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise ValueError(f"response_format.type must be text, json_object or json_schema, got {kind!r:.100}")
    described = given.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise ValueError(f"response_format.json_schema.schema must be a JSON schema, got {schema!r:.100}")
    return {"json": schema}


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: Any
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True

    def prompts(self) -> list[str | list[int]]:
        """One prompt or several, each text or token ids. ApiError says what is wrong."""
        prompt = self.prompt
        many = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
        if len(many) > MAX_PROMPTS:
            raise ApiError(400, f"prompt may have at most {MAX_PROMPTS} prompts in one request, got {len(many)}")
        kind = type(many[0])
        for each in many:
            if not isinstance(each, str | list) or type(each) is not kind:
                raise ApiError(
                    400, "prompt must be a string, a list of strings, of token ids, or of lists of token ids"
                )
            if not each:
                raise ApiError(400, "prompt is empty: give at least one token")
        return many


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt, or messages as for a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @staticmethod
    def of(outputs: list[RequestOutput], only_prompts: bool = False) -> "Usage":
        """Of all these prompts together. only_prompts: what was generated was not asked for."""
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        choices = [] if only_prompts else [choice for output in outputs for choice in output.outputs]
        completion = sum(len(choice.token_ids) for choice in choices)
        cached = sum(output.num_cached_tokens for output in outputs)
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # in streams only with a choice's first event


class Completion(msgspec.Struct):
    """The response of /v1/completions, and each event of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: str = "function"
    index: int | UnsetType = UNSET  # in streams only


class Message(msgspec.Struct):
    """A chat's answer, or what is new of it."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class ChatChoice(msgspec.Struct):
    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """The response of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    object: str = "chat.completion"


class ChatChunk(msgspec.Struct):
    """An event of its stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # with a choice's first event
    object: str = "chat.completion.chunk"
