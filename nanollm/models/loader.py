"""load_weights: fill a model's parameters from a checkpoint, every tensor exactly once."""

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from tqdm import tqdm

from nanollm.layers.weights import TensorPart
from nanollm.models.checkpoint import Checkpoint, CheckpointError

logger = logging.getLogger("nanollm")


class LoadableModel(Protocol):
    """What the loader needs of an nn.Module. Optional: `ignored_tensors()`, names a checkpoint may have for nothing,
    such as lm_head.weight of a tied model; `num_padding` on a parameter, how many elements no part fills."""

    def tensor_parts(self) -> list[TensorPart]: ...
    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...


@torch.no_grad()
def load_weights(
    model: LoadableModel,
    checkpoint: Checkpoint,
    *,
    show_progress: bool = True,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Copy every part of the model from the checkpoint to its target, casting to the target's dtype.

    Slices go straight to their target, one at a time, so that loading a GPU takes no second copy of the model in host
    memory. CheckpointError names the tensors that are missing, not expected or of the wrong shape, before any is read.
    check is called before each tensor, and may raise.
    A NaN or infinity only logs a warning: a damaged tensor is better known than guessed at.
    """
    parts_by_name: dict[str, list[TensorPart]] = defaultdict(list)
    for part in model.tensor_parts():
        parts_by_name[part.name].append(part)
    ignored = set(getattr(model, "ignored_tensors", tuple)())
    _check_tensors(parts_by_name, checkpoint.shapes, ignored)
    _check_coverage(model, parts_by_name)

    extremes: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    names = [name for name in checkpoint.shapes if name in parts_by_name]
    bar = tqdm(names, "loading weights", unit="tensor", delay=1, disable=None) if show_progress else names
    for name in bar:
        check()
        for part in parts_by_name[name]:
            if part.target.numel():
                part.target.copy_(checkpoint.read(name, part.index), non_blocking=True)
                extremes.append((name, *torch.aminmax(part.target)))  # both are NaN if any element is
    _warn_not_finite(extremes)


def _check_tensors(
    parts_by_name: dict[str, list[TensorPart]], shapes: dict[str, tuple[int, ...]], ignored: set[str]
) -> None:
    missing = [name for name in parts_by_name if name not in shapes]
    unexpected = [
        name
        for name in shapes
        if name not in parts_by_name and name not in ignored and not name.endswith("rotary_emb.inv_freq")
    ]
    mismatched = [
        f"{name} is {list(shapes[name])}, the model needs {list(parts[0].shape)}"
        for name, parts in parts_by_name.items()
        if name in shapes and shapes[name] != parts[0].shape
    ]
    problems = [
        f"{len(found)} {kind} ({', '.join(found[:10])}{', …' if len(found) > 10 else ''})"
        for kind, found in (("missing", missing), ("unexpected", unexpected), ("of the wrong shape", mismatched))
        if found
    ]
    if problems:
        raise CheckpointError(f"the checkpoint does not fit config.json; tensors: {'; '.join(problems)}")


def _check_coverage(model: LoadableModel, parts_by_name: dict[str, list[TensorPart]]) -> None:
    """Each parameter is filled exactly once, but for its padding. What this finds is a bug in a layer."""
    filled: Counter[int] = Counter()
    for part in (part for parts in parts_by_name.values() for part in parts):
        lengths = tuple(piece.stop - piece.start for piece in part.index)
        if lengths != part.target.shape or part.shape != parts_by_name[part.name][0].shape:
            raise RuntimeError(f"{part.name}: {part.index} of {part.shape} can't fill {tuple(part.target.shape)}")
        filled[part.target.untyped_storage().data_ptr()] += math.prod(lengths)
    for name, parameter in model.named_parameters():
        expected = parameter.numel() - getattr(parameter, "num_padding", 0)
        if (count := filled[parameter.untyped_storage().data_ptr()]) != expected:
            raise RuntimeError(f"the parts of parameter {name} fill {count} elements, not {expected}")


def _warn_not_finite(extremes: list[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    """One read-back for all tensors, because each would wait for the GPU."""
    if extremes:
        flags = torch.stack([low.isfinite() & high.isfinite() for _, low, high in extremes]).tolist()
        for name in dict.fromkeys(name for (name, _, _), finite in zip(extremes, flags, strict=True) if not finite):
            logger.warning("tensor %s has NaN or infinite values", name)
