"""on_ranks: run a function on several gloo processes, for checks that must see inside each rank."""

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from nanollm.distributed.tp_group import TPGroup


def on_ranks(size: int, function: Callable[..., None], *args: Any) -> None:
    """function(tp, *args) on each of `size` processes; raises what the first that fails raises, with its traceback."""
    with tempfile.TemporaryDirectory() as directory:
        start = functools.partial(_run, size, str(Path(directory) / "store"), function, args)
        mp.spawn(start, nprocs=size)


def _run(size: int, store: str, function: Callable[..., None], args: tuple[Any, ...], rank: int) -> None:
    torch.set_num_threads(1)
    function(TPGroup.join(rank, size, torch.device("cpu"), "gloo", 60.0, store), *args)
    os._exit(0)  # quicker than the interpreter's own way
