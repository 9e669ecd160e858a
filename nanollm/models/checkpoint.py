"""Checkpoint: named tensors that can be read slice by slice. From safetensors files, or made up (dummy weights)."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


class CheckpointError(ValueError):
    """Weights that can't be used: missing, damaged, of another model, or in a format that is not supported."""


class Checkpoint(Protocol):
    """shapes: every tensor's whole shape by its Hugging Face name, in the order that reads the file sequentially."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """That slice of a tensor in its stored floating-point type. One slice per dimension, step 1, not empty."""
        ...

    def close(self) -> None:
        """Let go of the files; tensors already read stay valid."""
        ...


class SafetensorsCheckpoint:
    """model.safetensors, or the shards that model.safetensors.index.json lists, memory-mapped.

    Opening reads the headers only, and raises CheckpointError if a file is missing or damaged, the index names a
    tensor that its shard doesn't have, or a tensor is not floating point.
    """

    def __init__(self, directory: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._shards: dict[str, Any] = {}  # by tensor name
        single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
        if single.is_file():
            self._add_shard(single, {})
        elif index.is_file():
            weight_map = _read_weight_map(index)
            shards = sorted(set(weight_map.values()))
            if missing := [shard for shard in shards if not (directory / shard).is_file()]:
                raise CheckpointError(f"{directory} lacks {_some(missing)} of {len(shards)} shards: download it again")
            for shard in shards:
                self._add_shard(directory / shard, weight_map)
            if absent := [f"{name} ({weight_map[name]})" for name in weight_map if name not in self.shapes]:
                raise CheckpointError(f"{index.name} names tensors that their shard doesn't have: {_some(absent)}")
        else:
            pickled = [path.name for path in directory.glob("*") if path.suffix in (".bin", ".pt", ".pth")]
            hint = f"; it has {_some(sorted(pickled))}, but nanollm never loads pickled weights: convert to safetensors"
            raise CheckpointError(
                f"no model.safetensors or model.safetensors.index.json in {directory}{hint if pickled else ''}"
            )

    def _add_shard(self, path: Path, weight_map: Mapping[str, str]) -> None:
        try:
            # Checks the header's length, its JSON, and that the tensors cover the file exactly, without overlap.
            shard = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged, incomplete or no safetensors file: {error}") from error
        for name in shard.offset_keys():
            if weight_map.get(name, path.name) != path.name:
                continue  # a second copy; the index says which one counts
            part = shard.get_slice(name)
            if (dtype := part.get_dtype()) not in FLOAT_DTYPES:
                raise CheckpointError(
                    f"{path}: tensor {name} is {dtype}; supported: {', '.join(FLOAT_DTYPES)}, or GGUF if quantized"
                )
            self.shapes[name] = tuple(part.get_shape())
            self._shards[name] = shard

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """A CPU tensor of the stored dtype; only the slice is read from the file."""
        part: torch.Tensor = self._shards[name].get_slice(name)[index]
        return part

    def close(self) -> None:
        for shard in set(self._shards.values()):
            shard.__exit__(None, None, None)
        self._shards.clear()


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        # Shards lie beside the index: a name with a folder in it could reach any file.
        if weight_map and all(Path(shard).name == shard for shard in weight_map.values()):
            return dict(weight_map)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise CheckpointError(f"{index} must be JSON with a weight_map from tensor names to file names: download it again")


def _some(names: list[str]) -> str:
    """At most 10 names, and how many more there are."""
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


class DummyCheckpoint:
    """Random weights, for benchmarks and tests without files. Normal with a standard deviation of 0.02, as models are
    initialized, around 1 for norm weights and 0 for all else.

    A tensor depends on (seed, name, whole shape, dtype, kind of device) only, so ranks that slice it agree.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shapes = dict(shapes)
        self._seed = seed
        self._dtype = dtype
        self._generator = torch.Generator(device)
        self._last: tuple[str, torch.Tensor] | None = None  # the slices of one tensor are read in a row

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """A tensor on the device; the whole tensor is generated, then sliced."""
        if self._last is None or self._last[0] != name:
            self._last = None  # frees it before the next is made
            self._last = (name, self._generate(name))
        return self._last[1][index]

    def _generate(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        digest = hashlib.blake2b(f"{self._seed} {name} {shape}".encode(), digest_size=7).digest()
        self._generator.manual_seed(int.from_bytes(digest, "little"))
        tensor = torch.empty(shape, dtype=self._dtype, device=self._generator.device)
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        return tensor.normal_(mean, 0.02, generator=self._generator)

    def close(self) -> None:
        self._last = None
