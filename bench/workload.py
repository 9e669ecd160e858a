"""What is measured: workload W, 256 requests at once, prompts and outputs of 100 to 1024 tokens, always the same ones;
and of which model, if nobody says."""

import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Workload:
    """prompts: token ids of each request; output_lens: how many tokens it generates, whatever they are."""

    prompts: list[list[int]]
    output_lens: list[int]

    @staticmethod
    def make(num_prompts: int = 256, max_len: int = 1024, vocab_size: int = 10_001) -> "Workload":
        """max_len cuts prompts and outputs, for small machines; a vocabulary below 10,001 tokens folds the ids."""
        draw = random.Random(0)
        prompts = [[draw.randint(0, 10_000) for _ in range(draw.randint(100, 1024))] for _ in range(num_prompts)]
        output_lens = [draw.randint(100, 1024) for _ in range(num_prompts)]
        return Workload(
            [[token_id % vocab_size for token_id in prompt[:max_len]] for prompt in prompts],
            [min(output_len, max_len) for output_len in output_lens],
        )

    def shifted(self, vocab_size: int) -> "Workload":
        """The same lengths and other tokens: each id is one more, so that no cached prefix fits."""
        return Workload([[(t + 1) % vocab_size for t in prompt] for prompt in self.prompts], self.output_lens)

    @property
    def prompt_lens(self) -> list[int]:
        return [len(prompt) for prompt in self.prompts]

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def default_model_here() -> str:
    """Qwen3-0.6B's shape where there is a GPU, SmolLM2-135M on a CPU."""
    from nanollm.cli import default_model
    from nanollm.runtime.executor import resolve_device

    return "qwen3-0.6b" if resolve_device("auto").type == "cuda" else default_model()


def load_format(model: str) -> str:
    """dummy for a named shape, which has no weights."""
    from nanollm.config import NAMED_SHAPES

    return "dummy" if model.lower() in NAMED_SHAPES else "auto"


def random_prompts(draw: Any, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """draw: a random.Random, or the module."""
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
