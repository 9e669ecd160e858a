"""TensorPart: which slice of a checkpoint's tensor goes to which slice of a parameter."""

from dataclasses import dataclass

import torch


@dataclass
class TensorPart:
    """One copy that loading makes. A layer lists the parts of its own parameters, for this rank only.

    name: the tensor's name in the checkpoint (Hugging Face's names).
    shape: its whole shape there.
    index: the part this rank reads: one slice a dimension, concrete bounds, step 1.
    target: where it goes: a view into a parameter, of the part's shape.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    target: torch.Tensor
