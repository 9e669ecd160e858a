"""Which class runs which architecture of config.json, and how a program adds one of its own."""

import importlib
from typing import TYPE_CHECKING, TypeVar

from nanollm.config import SUPPORTED_ARCHITECTURES

if TYPE_CHECKING:
    from nanollm.models.qwen3 import Qwen3ForCausalLM

    Model = TypeVar("Model", bound=type[Qwen3ForCausalLM])

# "module:Class": a name reaches ranks in other processes, which import it.
MODELS = {
    "Qwen3ForCausalLM": "nanollm.models.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "nanollm.models.qwen3_moe:Qwen3MoeForCausalLM",
    "Qwen2ForCausalLM": "nanollm.models.qwen2:Qwen2ForCausalLM",
    "LlamaForCausalLM": "nanollm.models.llama:LlamaForCausalLM",
}


def register(model_class: "Model") -> "Model":
    """Class decorator: `architectures` in config.json may now name this class, at any tensor-parallel degree.

    The class may replace a known one of its name. Ranks import it by its module's name, which may be that of the script
    that is run. ValueError if it isn't at the top level of its module, where they look.
    """
    name, module = model_class.__name__, model_class.__module__
    if model_class.__qualname__ != name:
        raise ValueError(f"{model_class.__qualname__} must be at the top level of {module}: other ranks import it")
    MODELS[name] = f"{module}:{name}"
    if name not in SUPPORTED_ARCHITECTURES:
        SUPPORTED_ARCHITECTURES.append(name)
    return model_class


def import_model(path: str) -> "type[Qwen3ForCausalLM]":
    """The class that a value of MODELS names."""
    module, name = path.split(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"can't import the model class {path}: define it in a module, or in the script that is run and outside of "
            f'its `if __name__ == "__main__":` ({error})'
        ) from error
