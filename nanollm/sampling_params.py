"""SamplingParams: how one request's tokens are chosen and when it stops. Validated on construction.

Also how they are laid out in the int32 words that rank 0 sends and kernels read.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

MAX_TOKENS_LIMIT = 2**31 - 1
MAX_CHOICES = 16384
GREEDY_BELOW = 1e-5  # a temperature under which dividing by it would overflow, or might as well be greedy

# What a row's sampler reads, a word each; floats as their bits.
(
    TEMPERATURE,  # float; 0 is greedy
    SEED_LOW,
    SEED_HIGH,
    CHOICE,
    TOP_K,  # 0 is no limit
    TOP_P,  # float
    MIN_P,  # float
    REPETITION,  # float
    FREQUENCY,  # float
    PRESENCE,  # float
    RULES,  # the sum of what applies of SINGLES_OUT, HAS_BAD_WORDS, HAS_MASK and ONLY_BANS
) = range(11)
NUM_PARAMS = 11
# Single tokens have a bias, a ban or a penalty; bad words of several tokens are looked for; each token needs a mask of
# the host; tokens that aren't banned keep the logits that they have.
SINGLES_OUT, HAS_BAD_WORDS, HAS_MASK, ONLY_BANS = 1, 2, 4, 8
# Tokens with a bias or a ban of their own get a slot each: NUM_SLOTS less two that have a meaning.
NUM_SLOTS, BANNED_SLOT, FIRST_SLOT = 1024, 1, 2  # and 0 is none
MAX_RULED_ROWS = 1024  # rows that run with rules at once; a row's take 4 bytes for each id of the vocabulary
MAX_BAD_WORDS, BAD_PREFIX = 128, 15  # most bad words of several tokens; most tokens before the last of one
MAX_GRAMMAR_CHARS = 65536


def check_int(name: str, value: Any, low: int, high: int) -> int:
    """Return `value` as an int within [low, high]; ValueError names the field, the value and the range."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")
    return int(value)


def check_float(name: str, value: Any, low: float, high: float) -> float:
    """Return `value` as a finite float within [low, high]; ValueError names the field, the value and the range."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and low <= number <= high):
        raise ValueError(f"{name} must be a finite number from {low:g} to {high:g}, got {value!r}")
    return number


def check_list(name: str, value: Any) -> list[Any]:
    """Return a list, tuple, set or array as a list, None as an empty one; ValueError for anything else."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list | tuple | set | frozenset | type(None)):
        raise ValueError(f"{name} must be a list, got {value!r}")
    return list(values or [])


def check_unicode(name: str, text: str) -> None:
    """ValueError, naming the field and the place, if the text holds half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has half a surrogate pair at character {error.start}") from None


def check_bool(name: str, value: Any) -> bool:
    """Return `value` if it is True or False; ValueError otherwise."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the output must be, exactly one of these; names are vLLM's.

    json: a JSON schema, as text or a dict (kept as text). json_object: any JSON object. regex: for the whole output.
    choice: one of these strings. grammar: in EBNF, GBNF's form, whose start is the rule `root`.
    disable_any_whitespace: one space after each comma and colon of JSON, and no other whitespace.

    Raises ValueError, naming the field, for any other form. What is wrong inside shows when it is compiled.
    """

    json: "str | dict[str, Any] | None" = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.json, Mapping):
            try:
                object.__setattr__(self, "json", json.dumps(self.json, allow_nan=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"structured_outputs.json must be a JSON schema: {error}") from None
        given = self._given()
        if len(given) != 1:
            raise ValueError(
                "structured_outputs must have exactly one of json, regex, choice, grammar and json_object, got "
                f"{' and '.join(given) or 'none'}"
            )
        check_bool("structured_outputs.disable_any_whitespace", self.disable_any_whitespace)
        if self.json_object is not None:
            check_bool("structured_outputs.json_object", self.json_object)
        if self.choice is not None:
            object.__setattr__(self, "choice", _strings("structured_outputs.choice", self.choice))
            if not self.choice:
                raise ValueError("structured_outputs.choice must name a string, got none")
        for name in ("json", "regex", "grammar"):
            if not isinstance(value := getattr(self, name), str | None):
                what = "a JSON schema, as a dict or text" if name == "json" else "a string"
                raise ValueError(f"structured_outputs.{name} must be {what}, got {value!r:.200}")
        text = "".join(self.choice or []) + str(self.json or self.regex or self.grammar or "")
        check_unicode(f"structured_outputs.{given[0]}", text)
        if len(text) > MAX_GRAMMAR_CHARS:
            raise ValueError(f"structured_outputs.{given[0]} may have {MAX_GRAMMAR_CHARS} characters, got {len(text)}")

    @property
    def kind(self) -> str:
        """Which of the fields it is that says what the output must be."""
        return self._given()[0]

    def _given(self) -> list[str]:
        names = ("json", "regex", "choice", "grammar", "json_object")
        return [name for name in names if getattr(self, name) not in (None, False)]

    @staticmethod
    def of(value: Any) -> "StructuredOutputsParams":
        """From a mapping with the fields' names; ValueError says what is wrong with it."""
        if isinstance(value, StructuredOutputsParams):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(
                f"structured_outputs must be StructuredOutputsParams or a dict of its fields, got {value!r:.200}"
            )
        known = [f.name for f in fields(StructuredOutputsParams)]
        if unknown := [name for name, given in value.items() if name not in known and given is not None]:
            raise ValueError(f"structured_outputs has no field {unknown[0]!r:.50}; known: {', '.join(known)}")
        return StructuredOutputsParams(**{name: given for name, given in value.items() if given is not None})


@dataclass
class SamplingParams:
    """Sampling settings of one request; names, defaults and meanings are vLLM's.

    n: continuations of the prompt, 1 to 16384; each has noise of its own, and they share the prompt's KV blocks.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens in the output, once or times their count;
        -2 to 2. repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output;
        0.01 to 100, 1 is off.
    temperature: logits are divided by it before the draw. Below 1e-5 it is exact greedy. Range 0 to 100.
    top_p: keep the smallest set of likeliest tokens that has this much probability; above 0, 1 is off.
    top_k: keep the k likeliest tokens (and those equal to the k-th); 0 and -1 are off.
    min_p: keep tokens of at least min_p times the likeliest token's probability; 0 to 1, 0 is off.
    seed: any integer from -2**63 to 2**63 - 1. The same (prompt, seed) gives the same tokens alone or in any batch.
        None draws one from the engine's seed.
    stop: a string or list of strings that end the text; the match itself is cut off unless include_stop_str_in_output.
    stop_token_ids: token ids that end the output, beside the model's own EOS ids; their text is cut off likewise.
    ignore_eos: keep generating past the model's EOS ids (stop and stop_token_ids still count).
    max_tokens: most tokens to generate, 1 to 2**31 - 1; None means up to the model's context.
    min_tokens: until so many are generated no EOS, stop token or stop string ends the output.
    logprobs, prompt_logprobs: how many of the likeliest tokens' log probabilities to return for each generated or
        prompt token, beside its own: 0 or more, -1 for the whole vocabulary, None for nothing at all.
    detokenize: False returns token ids only (then `stop` can't be used).
    skip_special_tokens: leave special tokens such as <|im_end|> out of the text.
    spaces_between_special_tokens: put spaces around them, where the tokenizer is one of Python code.
    logit_bias: token id -> what to add to its logit, -100 to 100. allowed_token_ids: the only ones that may come.
    bad_words: strings that must not come, with or without a space before them: the last token of each is banned where
        its other tokens were just generated.
    bad_words, logit_bias and min_tokens together may single out 1022 tokens.
    structured_outputs: what the output must be: StructuredOutputsParams, or a dict of its fields. It ends with EOS
        where that is complete, so ignore_eos and min_tokens are refused beside it. If other bans leave no token that
        fits, the request ends with finish_reason "error".
    logits_processors: functions (ids of the tokens generated so far, float32 logits [V] on the CPU) -> logits, called
        one after another at each token, before anything else is done to the logits. If one raises, so does its
        own request. For experiments with LLM: every step of the batch waits for them.

    Raises ValueError, naming the field, the value and the range, for anything else.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    structured_outputs: StructuredOutputsParams | None = None
    logits_processors: list[Any] = field(default_factory=list, repr=False)  # ranks, which compare them, have their own

    def __post_init__(self) -> None:
        for name, low, high in (
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", 0.01, 100.0),
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
        ):
            setattr(self, name, check_float(name, getattr(self, name), low, high))
        if self.top_p == 0:
            raise ValueError(
                "top_p must be above 0 and at most 1, got 0: use temperature=0 or top_k=1 for the likeliest"
            )
        self.n = check_int("n", self.n, 1, MAX_CHOICES)
        self.top_k = max(check_int("top_k", self.top_k, -1, MAX_TOKENS_LIMIT), 0)
        if self.seed is not None:
            self.seed = check_int("seed", self.seed, -(2**63), 2**63 - 1)
        self.min_tokens = check_int("min_tokens", self.min_tokens, 0, MAX_TOKENS_LIMIT)
        if self.max_tokens is not None:
            self.max_tokens = check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens must be at most max_tokens {self.max_tokens}, got {self.min_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, check_int(name, value, -1, MAX_TOKENS_LIMIT))
        self.stop, self.bad_words = _strings("stop", self.stop), _strings("bad_words", self.bad_words)
        self.stop_token_ids = _ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must name a token, got none: use None to allow all")
        self.logit_bias = _biases(self.logit_bias)
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        ):
            check_bool(name, getattr(self, name))
        if self.stop and not self.detokenize:
            raise ValueError("stop needs text: set detokenize=True, or use stop_token_ids instead")
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
            if self.ignore_eos or self.min_tokens:
                raise ValueError("structured_outputs says where the output ends: leave out ignore_eos and min_tokens")
        self.logits_processors = check_list("logits_processors", self.logits_processors)
        if not all(map(callable, self.logits_processors)):
            raise ValueError(f"logits_processors must be functions, got {self.logits_processors!r:.200}")


def _strings(name: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else check_list(name, value)
    for text in texts:
        if not isinstance(text, str) or not text.strip(" " if name == "bad_words" else ""):
            raise ValueError(f"{name} must be a non-empty string or a list of them, got {text!r}")
        check_unicode(name, text)
    return texts


def _ids(name: str, value: Any) -> list[int]:
    return [check_int(name, token_id, 0, MAX_TOKENS_LIMIT) for token_id in check_list(name, value)]


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping | None):
        raise ValueError(f"logit_bias must be a dict of token ids and biases, got {value!r}")
    biases = {}
    for token_id, bias in (value or {}).items():
        if isinstance(token_id, str) and token_id.isdecimal():  # as in JSON
            token_id = int(token_id)
        token_id = check_int("logit_bias token id", token_id, 0, MAX_TOKENS_LIMIT)
        biases[token_id] = check_float(f"logit_bias of token {token_id}", bias, -100.0, 100.0)
    return biases
