"""resolve_model: from what the user wrote as `model` to files on disk, a checked config and a checkpoint."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanollm.config import NAMED_SHAPES, ModelConfig, read_eos_token_ids
from nanollm.models.checkpoint import Checkpoint, DummyCheckpoint, SafetensorsCheckpoint
from nanollm.models.registry import MODELS

TOKENIZER_AND_CONFIG_FILES = ["*.json", "tokenizer*", "merges.txt", "vocab*", "*.jinja"]


@dataclass
class ModelSource:
    """A model that was found and is supported.

    path: its directory or .gguf file; None for a named shape.
    hf_config: config.json, with hf_overrides merged in.
    model_class: importable name, "module:Class", of the nn.Module that runs it.
    config: from hf_config; eos_token_ids are config.json's, then generation_config.json's.
    generation_config: generation_config.json, or {}.
    load_format: "auto" or "dummy".
    """

    path: Path | None
    hf_config: dict[str, Any]
    config: ModelConfig
    generation_config: dict[str, Any]
    load_format: str
    model_class: str

    def open_checkpoint(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Checkpoint:
        """Open the weights; CheckpointError if they are missing, damaged or not supported.

        The arguments are for dummy weights, which a file would say itself: shapes by tensor name, seed, and the dtype
        and device that they are made in.
        """
        if self.load_format == "dummy" or self.path is None:
            return DummyCheckpoint(shapes, seed, dtype, torch.device(device))
        if self.path.is_dir():
            return SafetensorsCheckpoint(self.path)
        from nanollm.models.gguf import GGUFCheckpoint

        return GGUFCheckpoint(self.path)


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    load_format: str = "auto",
    hf_overrides: Mapping[str, Any] | None = None,
) -> ModelSource:
    """Find a model: a directory with config.json, a .gguf file or a directory with just one, a hub id, or with
    load_format="dummy" a named shape. hf_overrides replace fields of config.json; objects are merged one level deep.

    A hub id is downloaded: config.json first, so that a model that isn't supported costs no download of weights.
    ValueError says what to change if it can't be found, read or isn't supported.
    """
    overrides = hf_overrides or {}
    expanded = os.path.expanduser(model)
    generation_config: dict[str, Any] = {}
    path: Path | None = None
    if os.path.exists(expanded):
        path = _config_or_gguf(Path(expanded))
    elif model.startswith(("/", ".", "~")) or model.count("/") > 1 or model.endswith(".gguf"):
        raise ValueError(f"model {model!r}: no such file or directory")
    elif model.lower() in NAMED_SHAPES:
        if load_format != "dummy":
            raise ValueError(
                f"{model!r} is a shape without weights: add load_format='dummy' for random ones, or give a hub id "
                "such as Qwen/Qwen3-0.6B"
            )
    elif load_format == "dummy" and "/" not in model:
        raise ValueError(f"no shape {model!r} for load_format='dummy'; there are: {', '.join(NAMED_SHAPES)}")
    else:
        path = _download(model, revision, load_format, overrides)

    if path is None:
        hf_config = dict(NAMED_SHAPES[model.lower()])
    elif path.is_dir():
        hf_config = _read_json(path / "config.json")
        if (path / "generation_config.json").is_file():
            generation_config = _read_json(path / "generation_config.json")
    else:
        from nanollm.models.gguf import gguf_config

        hf_config = gguf_config(path)
    hf_config = _merge(hf_config, overrides)
    config = ModelConfig.from_hf(hf_config)
    eos = (*config.eos_token_ids, *read_eos_token_ids(generation_config.get("eos_token_id")))
    config = replace(config, eos_token_ids=tuple(dict.fromkeys(eos)))
    model_class = MODELS[config.architecture]
    return ModelSource(path, hf_config, config, generation_config, load_format, model_class)


def _config_or_gguf(path: Path) -> Path:
    """The directory itself if it has a config.json, else the one .gguf in it, or the .gguf file given."""
    if (path.is_file() and path.suffix == ".gguf") or (path / "config.json").is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"model {str(path)!r} must be a directory with config.json, or a .gguf file")
    gguf_files = sorted(path.glob("*.gguf"))
    if len(gguf_files) == 1:
        return gguf_files[0]
    if gguf_files:
        raise ValueError(f"{path} has several models, give the path of one: {', '.join(f.name for f in gguf_files)}")
    raise ValueError(f"no config.json (nor a .gguf file) in {path}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"can't read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _merge(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _download(model: str, revision: str | None, load_format: str, overrides: Mapping[str, Any]) -> Path:
    import huggingface_hub

    config_path = _ask_hub(huggingface_hub.hf_hub_download, model, revision, filename="config.json")
    ModelConfig.from_hf(_merge(_read_json(Path(config_path)), overrides))
    weights = [] if load_format == "dummy" else ["*.safetensors"]
    return Path(
        _ask_hub(
            huggingface_hub.snapshot_download,
            model,
            revision,
            allow_patterns=TOKENIZER_AND_CONFIG_FILES + weights,
            ignore_patterns=["*/*", "consolidated*"],  # other formats of the same weights
        )
    )


def _ask_hub(function: Callable[..., str], model: str, revision: str | None, **kwargs: Any) -> str:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return function(model, revision=revision, **kwargs)
    except errors.HFValidationError as error:
        raise ValueError(f"model {model!r} is no file or directory here, nor can it be a hub id: {error}") from error
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{model} is gated: accept its terms at https://huggingface.co/{model} and set HF_TOKEN to your token"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"{model} is no file or directory here and was not found on the hub: check the spelling, or set "
            "HF_TOKEN if it is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"{model} has no revision {revision!r} on the hub") from error
    except errors.LocalEntryNotFoundError as error:
        offline = huggingface_hub.constants.HF_HUB_OFFLINE
        raise ValueError(
            f"{model} is not in the local cache and "
            + ("HF_HUB_OFFLINE is set: unset it" if offline else "the hub can't be reached: check the network")
            + ", or give the path of a local directory or .gguf file"
        ) from error
    except errors.EntryNotFoundError as error:
        raise ValueError(f"{model} has no config.json; for a GGUF file, download it and give its path") from error
    except Exception as error:  # the hub client lets its HTTP library's errors through
        raise ValueError(f"can't get {model} from the hub: {error}") from error
