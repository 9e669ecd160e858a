"""What may be given as a prompt, and what of it and of its sampling parameters needs the tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanollm.sampling_params import SamplingParams
from nanollm.text.tokenizer import encode_bad_words, encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int] | Mapping[str, Any]
BYTES = (bytes, bytearray, memoryview)  # sequences of integers, but hardly meant as token ids
_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


@dataclass
class PreparedPrompt:
    """A prompt as the engine takes it. text: None if it came as token ids."""

    text: str | None
    token_ids: Sequence[int]
    cache_salt: str


@dataclass
class PreparedParams:
    """Sampling parameters as the engine takes them. bad_words: token ids of each."""

    params: SamplingParams
    bad_words: list[list[int]]


def prepare_params(tokenizer: "PreTrainedTokenizerBase | None", params: SamplingParams) -> PreparedParams:
    """A copy with all settings checked again: fields may have been assigned since.

    Raises ValueError if one is wrong, or needs a tokenizer and there is none.
    """
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params must be SamplingParams, got {params!r}")
    params = replace(params)
    if params.stop:
        need_tokenizer(tokenizer, "stop")
    bad_words: list[list[int]] = []
    if params.bad_words:
        bad_words = encode_bad_words(need_tokenizer(tokenizer, "bad_words"), params.bad_words)
    return PreparedParams(params, bad_words)


def default_params(generation_config: Mapping[str, Any], *, chat: bool = False) -> SamplingParams:
    """What is used where no parameters are given: the model's generation_config.json, as far as vLLM reads it, and
    SamplingParams' own defaults for the rest; but a chat's answer may be as long as the context allows."""
    names = {name: name for name in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")}
    names["max_new_tokens"] = "max_tokens"
    given = {ours: value for theirs, ours in names.items() if (value := generation_config.get(theirs)) is not None}
    try:
        return SamplingParams(**({"max_tokens": None} if chat else {}) | given)
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}; generation_config='vllm' ignores it") from None


def need_tokenizer(tokenizer: "PreTrainedTokenizerBase | None", what: str) -> "PreTrainedTokenizerBase":
    """The tokenizer; ValueError, with the ways out, if there is none."""
    if tokenizer is None:
        raise ValueError(f"{what} needs a tokenizer: give token ids, or pass tokenizer= and no skip_tokenizer_init")
    return tokenizer


def prepare_prompt(
    tokenizer: "PreTrainedTokenizerBase | None", prompt: Prompt, most: int | None = None
) -> PreparedPrompt:
    """Read and tokenize one prompt: a string, token ids or a dict, as LLM.generate takes them.

    most: as in encode_prompt. Raises ValueError if it is wrong, or needs a tokenizer and there is none.
    """

    def encode(text: str) -> list[int]:
        return encode_prompt(need_tokenizer(tokenizer, "a text prompt"), text, most=most)

    if isinstance(prompt, str):
        return PreparedPrompt(prompt, encode(prompt), "")
    if not isinstance(prompt, Mapping):
        return PreparedPrompt(None, _token_list(prompt), "")
    if unknown := sorted(set(prompt) - _PROMPT_KEYS, key=str):
        raise ValueError(f"unknown prompt field {unknown[0]!r}; known: {', '.join(sorted(_PROMPT_KEYS))}")
    text, salt = prompt.get("prompt"), prompt.get("cache_salt")
    salt = "" if salt is None else salt
    if not isinstance(salt, str) or (text is not None and not isinstance(text, str)):
        raise ValueError("prompt and cache_salt must be strings")
    if (token_ids := prompt.get("prompt_token_ids")) is not None:
        return PreparedPrompt(text, _token_list(token_ids), salt)
    if text is None:
        raise ValueError('a prompt dict needs "prompt" or "prompt_token_ids"')
    return PreparedPrompt(text, encode(text), salt)


def _token_list(prompt: object) -> Sequence[int]:
    """A prompt of token ids as a list; arrays and tensors are converted."""
    values = prompt.tolist() if hasattr(prompt, "tolist") and not isinstance(prompt, BYTES) else prompt
    if isinstance(values, (str, *BYTES)) or not isinstance(values, Sequence):
        raise ValueError(f"a prompt must be a string, a list of token ids or a dict, got {prompt!r}")
    return values
