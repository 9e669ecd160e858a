import json
import resource
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanollm.models.checkpoint import CheckpointError, DummyCheckpoint, SafetensorsCheckpoint


def write_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> None:
    """A safetensors file as the format says: length of the header, header, data. `length` lies about the first."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def entry(start: int, stop: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def write_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_reads_only_the_slice_in_the_stored_dtype(tmp_path):
    weight = torch.arange(12).reshape(3, 4).bfloat16()
    save_file({"w": weight, "b": torch.ones(2)}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    part = checkpoint.read("w", (slice(1, 3), slice(0, 2)))
    checkpoint.close()
    assert checkpoint.shapes == {"w": (3, 4), "b": (2,)}
    assert part.dtype == torch.bfloat16 and torch.equal(part, weight[1:3, :2])


def test_shapes_are_in_file_order_not_alphabetical(tmp_path):
    header = {"a": entry(8, 16, [2]), "b": entry(0, 8, [2])}
    write_file(tmp_path / "model.safetensors", header, struct.pack("<4f", 1, 2, 3, 4))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert list(checkpoint.shapes) == ["b", "a"]
    assert checkpoint.read("a", (slice(1, 2),)).tolist() == [4.0]


def test_shards_read_as_one_checkpoint(tmp_path):
    save_file({"x": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"y": torch.ones(3), "x": torch.ones(2)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"x": "one.safetensors", "y": "two.safetensors"})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.shapes == {"x": (2,), "y": (3,)}
    assert checkpoint.read("x", (slice(0, 2),)).tolist() == [0.0, 0.0]  # the index decides between two copies


def test_tensor_that_the_index_forgot_is_still_listed(tmp_path):
    save_file({"x": torch.zeros(2), "extra": torch.zeros(1)}, tmp_path / "one.safetensors")
    write_index(tmp_path, {"x": "one.safetensors"})
    assert "extra" in SafetensorsCheckpoint(tmp_path).shapes


def test_missing_shards_are_named(tmp_path):
    save_file({"x": torch.zeros(2)}, tmp_path / "one.safetensors")
    write_index(tmp_path, {"x": "one.safetensors", "y": "two.safetensors", "z": "three.safetensors"})
    with pytest.raises(CheckpointError, match=r"lacks three\.safetensors, two\.safetensors of 3 shards"):
        SafetensorsCheckpoint(tmp_path)


def test_index_that_names_a_tensor_its_shard_does_not_have(tmp_path):
    save_file({"x": torch.zeros(2)}, tmp_path / "one.safetensors")
    write_index(tmp_path, {"x": "one.safetensors", "y": "one.safetensors"})
    with pytest.raises(CheckpointError, match=r"their shard doesn't have: y \(one\.safetensors\)"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, ["one.safetensors"], {"x": 3}, {"x": "../one.safetensors"}])
def test_malformed_index(tmp_path, weight_map):
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match="must be JSON with a weight_map"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "not json", "[" * 100_000])
def test_index_that_is_no_json_object(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="must be JSON with a weight_map"):
        SafetensorsCheckpoint(tmp_path)


def test_directory_without_weights(tmp_path):
    with pytest.raises(CheckpointError, match=r"no model\.safetensors or model\.safetensors\.index\.json in"):
        SafetensorsCheckpoint(tmp_path)


def test_pickled_weights_are_never_loaded(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, but nanollm never loads pickled weights: convert"):
        SafetensorsCheckpoint(tmp_path)


DAMAGED = {
    "header length of 2 GB": (b"{}", b"", 2**31),
    "header length of 2**63": (b"{}", b"", 2**63),
    "data truncated": ({"a": entry(0, 16, [4])}, b"\0" * 8, None),
    "data too long": ({"a": entry(0, 8, [2])}, b"\0" * 16, None),
    "offsets overlap": ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, b"\0" * 12, None),
    "offsets do not match the shape": ({"a": entry(0, 8, [3])}, b"\0" * 8, None),
    "shape overflows": ({"a": entry(0, 8, [2**62, 2**62])}, b"\0" * 8, None),
    "unknown dtype": ({"a": entry(0, 8, [2], "Q9")}, b"\0" * 8, None),
    "not JSON": (b"hello world!", b"", None),
    "a JSON list": (b"[1, 2]", b"", None),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_file_is_a_clear_error_without_a_huge_allocation(tmp_path, damage):
    write_file(tmp_path / "model.safetensors", *DAMAGED[damage])
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged, incomplete or no safetensors file: "):
        SafetensorsCheckpoint(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 100 * 1024


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"])
def test_empty_file_and_git_lfs_pointer(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged, incomplete"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3", "U8", "I64", "BOOL"])
def test_weights_that_are_not_floating_point(tmp_path, dtype):
    size = 8 if dtype == "I64" else 1
    write_file(tmp_path / "model.safetensors", {"w": entry(0, 8 * size, [8], dtype)}, b"\0" * 8 * size)
    with pytest.raises(CheckpointError, match=f"tensor w is {dtype}; supported: F64, F32, F16, BF16"):
        SafetensorsCheckpoint(tmp_path)


SHAPES = {"layers.0.mlp.weight": (64, 48), "layers.0.input_layernorm.weight": (4096,), "layers.0.bias": (4096,)}
ALL = (slice(0, 64), slice(0, 48))


def dummy(seed: int = 0, dtype: torch.dtype = torch.float32) -> DummyCheckpoint:
    return DummyCheckpoint(SHAPES, seed, dtype, torch.device("cpu"))


def test_dummy_ranks_that_slice_one_tensor_agree():
    whole = dummy().read("layers.0.mlp.weight", ALL)
    rank0, rank1 = (dummy().read("layers.0.mlp.weight", (slice(r * 32, r * 32 + 32), ALL[1])) for r in range(2))
    assert torch.equal(torch.cat([rank0, rank1]), whole)


def test_dummy_weights_do_not_depend_on_what_was_read_before():
    fresh, used = dummy(), dummy()
    used.read("layers.0.bias", (slice(0, 4096),))
    assert torch.equal(fresh.read("layers.0.mlp.weight", ALL), used.read("layers.0.mlp.weight", ALL))


def test_dummy_weights_depend_on_the_seed_and_the_name():
    assert not torch.equal(dummy(0).read("layers.0.mlp.weight", ALL), dummy(1).read("layers.0.mlp.weight", ALL))
    bias, norm = (dummy().read(name, (slice(0, 4096),)) for name in list(SHAPES)[:0:-1])
    assert not torch.allclose(bias, norm - 1)


def test_dummy_norm_weights_are_around_one_and_all_else_around_zero():
    checkpoint = dummy(dtype=torch.bfloat16)
    for name, mean in (("layers.0.input_layernorm.weight", 1.0), ("layers.0.bias", 0.0)):
        values = checkpoint.read(name, (slice(0, 4096),))
        assert values.dtype == torch.bfloat16
        assert values.float().mean() == pytest.approx(mean, abs=2e-3)  # 0.02 / sqrt(4096) is 3e-4
        assert values.float().std() == pytest.approx(0.02, rel=0.1)
