import json
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from huggingface_hub import constants, errors
from safetensors.torch import save_file

from nanollm.config import NAMED_SHAPES
from nanollm.models.checkpoint import CheckpointError, DummyCheckpoint, SafetensorsCheckpoint
from nanollm.models.source import resolve_model

CONFIG = NAMED_SHAPES["qwen3-0.6b"] | {"eos_token_id": 7}


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture
def directory(tmp_path):
    write_json(tmp_path / "config.json", CONFIG)
    return tmp_path


def write_gguf(path: Path) -> None:
    writer = GGUFWriter(path, "qwen3")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_eos_token_id(3)
    writer.add_tensor("token_embd.weight", np.ones((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def no_hub(monkeypatch):
    def refuse(*args: object, **kwargs: object) -> str:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


def test_directory_with_config_json(directory, no_hub):
    save_file({"w": torch.ones(2)}, directory / "model.safetensors")
    source = resolve_model(str(directory))
    assert (source.path, source.hf_config) == (directory, CONFIG)
    assert source.config.architecture == "Qwen3ForCausalLM" and source.generation_config == {}
    checkpoint = source.open_checkpoint({})
    assert isinstance(checkpoint, SafetensorsCheckpoint) and checkpoint.shapes == {"w": (2,)}


def test_home_directory_is_expanded(directory, no_hub, monkeypatch):
    monkeypatch.setenv("HOME", str(directory.parent))
    assert resolve_model(f"~/{directory.name}").path == directory


def test_eos_ids_are_those_of_both_files_without_duplicates(directory):
    write_json(directory / "config.json", CONFIG | {"eos_token_id": [7, 5]})
    write_json(directory / "generation_config.json", {"eos_token_id": [9, 7], "temperature": 0.6})
    source = resolve_model(str(directory))
    assert source.config.eos_token_ids == (7, 5, 9)
    assert source.generation_config["temperature"] == 0.6


def test_directory_without_config_or_gguf(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json \(nor a \.gguf file\) in"):
        resolve_model(str(tmp_path))


def test_directory_without_weights_resolves_but_does_not_open(directory):
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        resolve_model(str(directory)).open_checkpoint({})


def test_gguf_file_and_the_directory_around_it(tmp_path, no_hub):
    write_gguf(tmp_path / "m.gguf")
    for model in (tmp_path / "m.gguf", tmp_path):
        source = resolve_model(str(model))
        assert source.path == tmp_path / "m.gguf"
        assert source.config.eos_token_ids == (3,)
        assert source.open_checkpoint({}).shapes == {"model.embed_tokens.weight": (4, 8)}


def test_directory_with_two_gguf_files_names_them(tmp_path):
    (tmp_path / "b.gguf").touch()
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ValueError, match=r"several models, give the path of one: a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))


def test_other_file(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"must be a directory with config\.json, or a \.gguf file"):
        resolve_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("model", ["/nowhere", "./nowhere", "../no/where", "~/nowhere", "a/b/c", "org/m.gguf"])
def test_path_that_does_not_exist_never_asks_the_hub(no_hub, model):
    with pytest.raises(ValueError, match="no such file or directory"):
        resolve_model(model)


@pytest.mark.parametrize("content", ["", "{", "\xff", "[" * 100_000, "[1]", "3"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_malformed_json(directory, name, content):
    (directory / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=name):
        resolve_model(str(directory))


def test_eos_of_the_wrong_type_is_an_error(directory):
    write_json(directory / "generation_config.json", {"eos_token_id": "<|im_end|>"})
    with pytest.raises(ValueError, match="eos_token_id must be an integer from 0"):
        resolve_model(str(directory))


def test_unsupported_model_is_refused(directory):
    write_json(directory / "config.json", CONFIG | {"architectures": ["BertModel"]})
    with pytest.raises(ValueError, match="'BertModel' is not supported; supported: Qwen3ForCausalLM, "):
        resolve_model(str(directory))


def test_overrides_replace_fields_and_merge_objects_one_level_deep(directory):
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 100}
    write_json(directory / "config.json", CONFIG | {"rope_scaling": rope})
    overrides = {"num_hidden_layers": 2, "rope_scaling": {"factor": 4.0}, "eos_token_id": [1]}
    source = resolve_model(str(directory), hf_overrides=overrides)
    assert source.config.num_layers == 2 and source.config.eos_token_ids == (1,)
    assert (source.config.rope.factor, source.config.rope.original_max_position) == (4.0, 100)
    assert overrides["rope_scaling"] == {"factor": 4.0}


def test_dummy_weights_need_only_a_config(directory):
    source = resolve_model(str(directory), load_format="dummy")
    checkpoint = source.open_checkpoint({"w": (2, 3)}, seed=1, dtype=torch.bfloat16)
    assert isinstance(checkpoint, DummyCheckpoint)
    assert checkpoint.read("w", (slice(0, 2), slice(0, 1))).shape == (2, 1)


@pytest.mark.parametrize("name", ["qwen3-8b", "Qwen3-8B"])
def test_named_shape(no_hub, name):
    source = resolve_model(name, load_format="dummy", hf_overrides={"num_hidden_layers": 1})
    assert source.path is None and source.config.hidden_size == 4096 and source.config.num_layers == 1
    assert NAMED_SHAPES["qwen3-8b"]["num_hidden_layers"] == 36
    assert isinstance(source.open_checkpoint({}), DummyCheckpoint)


def test_named_shape_without_dummy_says_how(no_hub):
    with pytest.raises(ValueError, match=r"add load_format='dummy' .* hub id such as Qwen/Qwen3-0\.6B"):
        resolve_model("qwen3-0.6b")


def test_unknown_shape_lists_the_known_ones(no_hub):
    with pytest.raises(ValueError, match=r"no shape 'qwen3-9b' for load_format='dummy'; there are: qwen3-0\.6b, "):
        resolve_model("qwen3-9b", load_format="dummy")


@pytest.fixture
def offline_cache(tmp_path, monkeypatch):
    """An empty hub cache, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_hub_id_that_is_not_cached_while_offline(offline_cache):
    with pytest.raises(ValueError, match="org/model is not in the local cache") as error:
        resolve_model("org/model")
    assert all(way in str(error.value) for way in ("HF_HUB_OFFLINE", "path of a local directory"))


def test_hub_id_that_is_cached_while_offline(offline_cache):
    repo = offline_cache / "models--org--model"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    write_json(snapshot / "config.json", CONFIG)
    save_file({"w": torch.ones(2)}, snapshot / "model.safetensors")
    source = resolve_model("org/model")
    assert source.path == snapshot
    assert source.open_checkpoint({}).shapes == {"w": (2,)}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError, r"is gated: accept its terms at https://huggingface\.co/org/model and set HF_TOKEN"),
        (errors.RepositoryNotFoundError, "was not found on the hub: check the spelling, or set HF_TOKEN"),
        (errors.RevisionNotFoundError, "has no revision 'v9' on the hub"),
        (errors.EntryNotFoundError, r"has no config\.json; for a GGUF file, download it"),
        (ConnectionError, "can't get org/model from the hub: boom"),
    ],
)
def test_what_the_hub_answers_becomes_one_clear_error(monkeypatch, error, message):
    def fail(*args: object, **kwargs: object) -> str:
        raise error.__new__(error, "boom")  # the real constructors need an HTTP response

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(ValueError, match=message):
        resolve_model("org/model", revision="v9")


def test_name_that_can_not_be_a_hub_id(offline_cache):
    with pytest.raises(ValueError, match="'my model' is no file or directory here, nor can it be a hub id"):
        resolve_model("my model")


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_download_takes_config_tokenizer_and_weights_only(directory, monkeypatch, load_format):
    asked = {}

    def snapshot(model: str, **kwargs: object) -> str:
        asked.update(kwargs)
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: str(directory / "config.json"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    resolve_model("org/model", revision="v1", load_format=load_format)
    wanted = ["config.json", "tokenizer.model", "merges.txt", "vocab.json", "chat_template.jinja"]
    weights = ["model-00001-of-00002.safetensors"]
    others = ["pytorch_model.bin", "original/model.safetensors", "consolidated.safetensors", "README.md", "m.gguf"]
    found = huggingface_hub.utils.filter_repo_objects(
        wanted + weights + others, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(found) == (wanted + weights if load_format == "auto" else wanted)
    assert asked["revision"] == "v1"


def test_unsupported_hub_model_is_refused_before_its_weights_are_downloaded(directory, monkeypatch, no_hub):
    write_json(directory / "config.json", CONFIG | {"architectures": ["Gemma3ForCausalLM"]})
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: str(directory / "config.json"))
    with pytest.raises(ValueError, match="'Gemma3ForCausalLM' is not supported"):
        resolve_model("google/gemma-3-1b-it")
