"""GGUF files: the header, a config.json made from it, and a Checkpoint that dequantizes what it reads.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is parsed here rather than by the gguf
library's reader, which trusts every count in it and takes seconds for a vocabulary; the library dequantizes.
"""

import functools
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from nanollm.models.checkpoint import CheckpointError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9
MAX_STRINGS = 2**24  # in one array; the largest vocabularies have 2**18
FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",  # of all experts in one tensor
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
EXPERT_FIELDS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor as it lies in the file. data: uint8 [*shape[:-1], bytes of a row], a read-only view of the file."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    data: npt.NDArray[np.uint8]


class GGUFFile:
    """A GGUF file's metadata and tensors, by GGUF's own names, tensors in file order.

    Metadata arrays of strings are lists, others NumPy arrays. Memory-mapped: opening reads the header only.
    Raises CheckpointError for a file that is damaged, of a version other than 2 and 3, big-endian, one of several
    parts, or has a tensor type that can't be dequantized.
    """

    def __init__(self, path: Path) -> None:
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise CheckpointError(f"can't read {path}: {error}") from error
        self._offset = 0
        try:
            self._parse()
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error.__cause__

    def _parse(self) -> None:
        if self._data[:4] != b"GGUF":
            raise CheckpointError(f"not a GGUF file: it starts with {self._data[:4]!r}, not b'GGUF'")
        _, version, num_tensors, num_fields = self._take("<IIQQ")
        if version not in (2, 3):
            big_endian = " (a big-endian file)" if version and version % 2**16 == 0 else ""
            raise CheckpointError(f"GGUF version {version}{big_endian} is not supported; supported: 2, 3")
        self._check_room(num_fields, 13, "metadata fields")  # key length, a type, one byte
        for _ in range(num_fields):
            key = self._string()
            if key in self.metadata:
                raise CheckpointError(f"metadata field {key!r} appears twice: the header is damaged")
            self.metadata[key] = self._value(*self._take("<I"))
        if (parts := self.metadata.get("split.count", 1)) > 1:
            raise CheckpointError(f"one of {parts} parts; join them first with llama-gguf-split --merge")
        self._check_room(num_tensors, 24, "tensors")  # name length, number of dimensions, type, offset
        infos = []
        for _ in range(num_tensors):
            name, (num_dims,) = self._string(), self._take("<I")
            if not 1 <= num_dims <= 4:
                raise CheckpointError(f"tensor {name!r} has {num_dims} dimensions, not 1 to 4: the header is damaged")
            *dims, kind, offset = self._take(f"<{num_dims}QIQ")
            if 0 in dims:
                raise CheckpointError(f"tensor {name!r} has no elements: the header is damaged")
            infos.append((offset, name, tuple(reversed(dims)), kind))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"general.alignment must be a positive integer, got {alignment!r}")
        start = -(-self._offset // alignment) * alignment
        for offset, name, shape, kind in sorted(infos):
            if name in self.tensors:
                raise CheckpointError(f"tensor {name!r} appears twice: the header is damaged")
            self.tensors[name] = self._tensor(name, shape, kind, start + offset)

    def _check_room(self, count: int, size: int, what: str) -> None:
        """What the header claims must fit in the rest of the file: checked before anything is allocated for it."""
        if count * size > len(self._data) - self._offset:
            raise CheckpointError(f"the header claims {count} {what}, more than the file holds: damaged or incomplete")

    def _take(self, layout: str) -> tuple[Any, ...]:
        self._check_room(1, struct.calcsize(layout), "more field")
        values = struct.unpack_from(layout, self._data, self._offset)
        self._offset += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = self._take("<Q")
        self._check_room(length, 1, "bytes of a string")
        self._offset += length
        return self._data[self._offset - length : self._offset].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._array(kind, 1)[0].item()
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise CheckpointError(f"unknown metadata type {kind}: the header is damaged")
        kind, count = self._take("<IQ")
        if kind in SCALARS:
            return self._array(kind, count)
        self._check_room(count, 8, "strings")
        if kind != STRING or count > MAX_STRINGS:
            raise CheckpointError(f"a metadata array of {count} values of type {kind} is not supported")
        return [self._string() for _ in range(count)]

    def _array(self, kind: int, count: int) -> npt.NDArray[Any]:
        dtype = np.dtype(SCALARS[kind])
        self._check_room(count, dtype.itemsize, "values")
        self._offset += count * dtype.itemsize
        return np.frombuffer(self._data, dtype, count, self._offset - count * dtype.itemsize)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        try:
            type_ = GGMLQuantizationType(kind)
        except ValueError:
            type_ = None
        if type_ is None or not _can_dequantize(type_):
            supported = ", ".join(known.name for known in GGMLQuantizationType if _can_dequantize(known))
            label = kind if type_ is None else type_.name
            raise CheckpointError(f"tensor {name!r} has type {label}, which is not supported; supported: {supported}")
        block, block_bytes = GGML_QUANT_SIZES[type_]
        if shape[-1] % block:
            raise CheckpointError(f"tensor {name!r}: rows of {shape[-1]} are not whole {type_.name} blocks of {block}")
        data_shape = (*shape[:-1], shape[-1] // block * block_bytes)
        size = functools.reduce(lambda a, b: a * b, data_shape)
        if offset + size > len(self._data):
            raise CheckpointError(f"tensor {name!r} ends past the end of the file: incomplete, download it again")
        return GGUFTensor(shape, type_, np.frombuffer(self._data, np.uint8, size, offset).reshape(data_shape))


@functools.cache
def _can_dequantize(type_: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[type_][1]), np.uint8), type_)  # one block of zeros
    except NotImplementedError:
        return False
    return True


class GGUFCheckpoint:
    """A GGUF file's weights under Hugging Face's names and in their layout.

    llama.cpp stores q and k of the llama architecture with rotary pairs interleaved; rows are read in the order that
    puts them back into halves. The experts of a layer lie in one tensor, and are a tensor each here. Tensors without a
    Hugging Face name keep their own, for the loader to report.
    Raises what GGUFFile and gguf_config raise.
    """

    def __init__(self, path: Path) -> None:
        file = GGUFFile(path)
        config = _config(file, path)
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        self._tensors: dict[str, GGUFTensor] = {}
        self._row_order: dict[str, npt.NDArray[np.int64]] = {}
        for gguf_name, tensor in file.tensors.items():
            block, base, kind = _split_name(gguf_name)
            if gguf_name == "rope_freqs.weight":
                continue  # the config says the same: _llama3_scaling
            name = f"{block}{HF_NAMES[base]}.{kind}" if base in HF_NAMES else gguf_name
            if "{}" in HF_NAMES.get(base, ""):
                for i, data in enumerate(tensor.data):
                    self._tensors[name.format(i)] = GGUFTensor(tensor.shape[1:], tensor.type, data)
                continue
            self._tensors[name] = tensor
            interleaved = base in heads and config["architectures"] == ["LlamaForCausalLM"]
            if interleaved and tensor.shape[0] == heads[base] * config["head_dim"]:  # else the loader reports it
                pairs = np.arange(tensor.shape[0]).reshape(heads[base], -1, 2)
                self._row_order[name] = pairs.swapaxes(1, 2).reshape(-1)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """A CPU tensor: float16 and bfloat16 as stored, all else float32. Dequantizes the blocks the slice touches."""
        tensor, order = self._tensors[name], self._row_order.get(name)
        if order is None:
            return _dequantize(tensor, index)
        if len(index) == 1:
            return _dequantize(tensor, (slice(0, len(order)),))[torch.from_numpy(order[index[0]])]
        return _dequantize(tensor, (order[index[0]], index[1]))

    def close(self) -> None:
        self._tensors.clear()  # the mapping goes with its last view


def _dequantize(tensor: GGUFTensor, index: tuple[Any, ...]) -> torch.Tensor:
    """index: a slice per dimension; row indices are allowed in all but the last."""
    *rows, columns = index
    block, block_bytes = GGML_QUANT_SIZES[tensor.type]
    first, last = columns.start // block, -(-columns.stop // block)
    data = tensor.data[(*rows, slice(first * block_bytes, last * block_bytes))]
    if dtype := FLOATS.get(tensor.type):
        return torch.from_numpy(data.copy()).view(dtype)  # a copy, because the mapping is read-only
    return torch.from_numpy(dequantize(data, tensor.type))[
        ..., columns.start - first * block : columns.stop - first * block
    ]


def _split_name(gguf_name: str) -> tuple[str, str, str]:
    """ "blk.3.attn_q.weight" -> ("model.layers.3.", "attn_q", "weight")."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", gguf_name)
    if match is None:
        return "", gguf_name, ""
    layer, base, kind = match.groups()
    return "" if layer is None else f"model.layers.{layer}.", base, kind


def gguf_config(path: Path) -> dict[str, Any]:
    """What config.json would say, from the header of a GGUF file.

    eos_token_id lists the end of text, turn (eot) and message (eom). Raises CheckpointError for an architecture that
    is not supported, a field that is missing, and rotary frequencies that config.json can't express.
    """
    return _config(GGUFFile(path), path)


def _config(file: GGUFFile, path: Path) -> dict[str, Any]:
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: GGUF architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    model = {
        key.removeprefix(f"{architecture}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{architecture}.")
    }
    needed = ("embedding_length", "feed_forward_length", "block_count", "attention.head_count", "context_length")
    experts = EXPERT_FIELDS if architecture == "qwen3moe" else {}
    for key in (*needed, *experts):
        if not (isinstance(size := model.get(key), int) and size > 0):
            raise CheckpointError(f"{path}: {architecture}.{key} must be a positive integer, got {size!r}")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{path} lacks the tensor token_embd.weight")
    if model.get("expert_count") and not experts:
        raise CheckpointError(
            f"{path}: a mixture of experts is not supported in architecture {architecture!r}; supported in: qwen3moe"
        )
    moe = {name: model[key] for key, name in experts.items()}
    if experts:
        moe["norm_topk_prob"] = True
        moe["mlp_only_layers"] = [i for i in range(model["block_count"]) if f"blk.{i}.ffn_gate.weight" in file.tensors]
    heads = model["attention.head_count"]
    head_dim = model.get("attention.key_length") or max(model["embedding_length"] // heads, 1)
    if (value_dim := model.get("attention.value_length", head_dim)) != head_dim:
        raise CheckpointError(f"{path}: key length {head_dim} and value length {value_dim} must be equal")
    theta = model.get("rope.freq_base", 10000.0)
    tokens = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return {
        "architectures": [ARCHITECTURES[architecture]],
        "hidden_size": model["embedding_length"],
        "intermediate_size": model["feed_forward_length"],
        "num_hidden_layers": model["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": model.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": model["context_length"],
        "rms_norm_eps": model.get("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, model, theta, head_dim, path),
        "partial_rotary_factor": model.get("rope.dimension_count", head_dim) / head_dim,
        "use_sliding_window": bool(model.get("attention.sliding_window")),
        "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": list(dict.fromkeys(token for token in tokens if token is not None)),
        "torch_dtype": "float32",
        **moe,
    }


def _rope_scaling(
    file: GGUFFile, model: dict[str, Any], theta: float, head_dim: int, path: Path
) -> dict[str, Any] | None:
    kind = model.get("rope.scaling.type", "linear" if "rope.scale_linear" in model else "none")
    if factors := file.tensors.get("rope_freqs.weight"):
        if kind != "none":
            raise CheckpointError(f"{path} has both rope_freqs.weight and rope scaling {kind!r}: not supported")
        return _llama3_scaling(factors, theta, head_dim, path)
    if kind == "none":
        return None
    names = {
        "rope.scale_linear": "factor",
        "rope.scaling.factor": "factor",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
        "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
    }
    known = (*names, "rope.scaling.type", "rope.scaling.finetuned")
    if unknown := [key for key in model if key.startswith("rope.scaling.") and key not in known]:
        raise CheckpointError(f"{path}: {', '.join(unknown)} are not supported")
    return {"rope_type": kind} | {name: model[key] for key, name in names.items() if key in model}


def _llama3_scaling(factors: GGUFTensor, theta: float, head_dim: int, path: Path) -> dict[str, Any]:
    """Llama 3's rope scaling from rope_freqs.weight, float32 [head_dim / 2]: what each wavelength is multiplied by.

    llama.cpp writes these factors instead of the settings. All Llama 3 models were scaled with the same settings but
    for the factor, which is the largest in the tensor; any other tensor is an error.
    """
    message = f"{path}: rope_freqs.weight is not Llama 3's rope scaling, the only one supported"
    if factors.shape != (head_dim // 2,):
        raise CheckpointError(message)
    found = _dequantize(factors, (slice(0, head_dim // 2),)).double()
    factor, low, high, original = found.max().item(), 1.0, 4.0, 8192
    wavelengths = 2 * torch.pi * theta ** (torch.arange(0, head_dim, 2).double() / head_dim)
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(found, expected, rtol=1e-3):
        raise CheckpointError(message)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
