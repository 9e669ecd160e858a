"""SamplingParams: how one request's tokens are chosen and when it stops. Validated on construction."""

import math
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

MAX_TOKENS_LIMIT = 2**31 - 1
GREEDY_BELOW = 1e-5  # a temperature under which dividing by it would overflow, or might as well be greedy


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


def check_bool(name: str, value: Any) -> bool:
    """Return `value` if it is True or False; ValueError otherwise."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


@dataclass
class SamplingParams:
    """Sampling settings of one request; names, defaults and meanings are vLLM's.

    temperature: logits are divided by it before the draw. Below 1e-5 it is exact greedy. Range 0 to 100.
    max_tokens: most tokens to generate, 1 to 2**31 - 1; None means up to the model's context.
    stop: a string or list of strings that end the text; the match itself is cut off unless include_stop_str_in_output.
    stop_token_ids: token ids that end the output, beside the model's own EOS ids.
    ignore_eos: keep generating past the model's EOS ids (stop and stop_token_ids still count).
    seed: any integer from -2**63 to 2**63 - 1. The same (prompt, seed) gives the same tokens alone or in any batch.
        None draws one from the engine's seed.
    detokenize: False returns token ids only (then `stop` can't be used).
    skip_special_tokens: leave special tokens such as <|im_end|> out of the text.

    Raises ValueError, naming the field, the value and the range, for anything else.
    """

    temperature: float = 1.0
    max_tokens: int | None = 16
    stop: str | list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    seed: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self.temperature = check_float("temperature", self.temperature, 0.0, 100.0)
        if self.max_tokens is not None:
            self.max_tokens = check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        if self.seed is not None:
            self.seed = check_int("seed", self.seed, -(2**63), 2**63 - 1)
        self.stop = [self.stop] if isinstance(self.stop, str) else check_list("stop", self.stop)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must be a non-empty string or a list of them, got {text!r}")
        self.stop_token_ids = [
            check_int("stop_token_ids", token_id, 0, MAX_TOKENS_LIMIT)
            for token_id in check_list("stop_token_ids", self.stop_token_ids)
        ]
        for name in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"):
            check_bool(name, getattr(self, name))
        if self.stop and not self.detokenize:
            raise ValueError("stop needs text: set detokenize=True, or use stop_token_ids instead")
