"""What goes wrong on one rank: a ModelSource whose open_checkpoint() does harm there, as the tests of failures need it.

Ranks unpickle the source that rank 0 was given, so nothing of this is known to nanollm itself. Light on imports: every
rank reads this file.
"""

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from nanollm.layers.activation import GatedMLP
from nanollm.models.source import ModelSource
from nanollm.runtime import kv_cache, model_runner


def this_rank() -> int:
    """Of a process that torch.multiprocessing started for nanollm, or torchrun; else 0."""
    return int(mp.current_process().name.partition("nanollm-rank")[2] or os.environ.get("RANK", "0"))


@dataclasses.dataclass
class SabotagedSource(ModelSource):
    """harms: rank -> what it does before it opens the checkpoint."""

    harms: dict[int, Callable[[], None]]

    @staticmethod
    def of(source: ModelSource, harms: dict[int, Callable[[], None]]) -> "SabotagedSource":
        values = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
        return SabotagedSource(**values, harms=harms)

    def open_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        self.harms.get(this_rank(), lambda: None)()
        return super().open_checkpoint(*args, **kwargs)


def raise_now() -> None:
    raise RuntimeError(f"rank {this_rank()} can't load")


def die_now() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def load_slowly() -> None:
    time.sleep(60)


def load_in_small_steps() -> None:
    """Half a second for each tensor, as from a slow disk."""
    load = model_runner.load_weights

    def slow(model: Any, checkpoint: Any, **kwargs: Any) -> None:
        read = checkpoint.read
        checkpoint.read = lambda *args: time.sleep(0.5) or read(*args)
        load(model, checkpoint, **kwargs)

    model_runner.load_weights = slow  # type: ignore[assignment]


def have_little_memory() -> None:
    kv_cache.CPU_CACHE_BYTES = 2**20  # type: ignore[misc]


def at_call(number: int, act: Callable[[], None]) -> None:
    """Let the feed-forward layers act in their `number`th call."""
    forward, calls = GatedMLP.forward, [0]

    def harmful(self: GatedMLP, hidden: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            act()
        return forward(self, hidden)

    GatedMLP.forward = harmful  # type: ignore[method-assign]


def _raise_in_layer() -> None:
    raise ArithmeticError(f"a layer of rank {this_rank()}")


def raise_in_layer() -> None:
    at_call(9, _raise_in_layer)


def sleep_in_layer() -> None:
    at_call(9, lambda: time.sleep(2.0))


def hang_in_layer() -> None:
    at_call(9, lambda: time.sleep(60.0))
