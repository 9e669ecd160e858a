"""Models of one's own: how they are named, found and refused. That two ranks run one is shown in test_examples.py."""

from collections.abc import Iterator

import pytest
from torch import nn

from nanollm import LLM, SamplingParams, config
from nanollm.config import ModelConfig
from nanollm.distributed.tp_group import TPGroup
from nanollm.models import registry
from nanollm.models.qwen3 import DecoderLayer, Qwen3ForCausalLM


class PlainForCausalLM(Qwen3ForCausalLM):
    def make_layer(self, config: ModelConfig, tp: TPGroup, index: int) -> nn.Module:
        return DecoderLayer(config, tp, qk_norm=False)


SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 100}


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    """A test leaves no models of its own behind."""
    yield
    registry.MODELS.pop("PlainForCausalLM", None)
    config.SUPPORTED_ARCHITECTURES[:] = registry.MODELS


def make(architecture: str) -> LLM:
    overrides = SHAPE | {"architectures": [architecture]}
    return LLM("qwen3-0.6b", load_format="dummy", device="cpu", hf_overrides=overrides, num_kv_blocks=8)


def test_a_registered_class_runs_and_one_that_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"PlainForCausalLM.*supported: Qwen3ForCausalLM.*register"):
        make("PlainForCausalLM")
    assert registry.register(PlainForCausalLM) is PlainForCausalLM
    with make("PlainForCausalLM") as llm:
        assert type(llm._executor.runner.model) is PlainForCausalLM  # type: ignore[union-attr]
        assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids) == 3


def test_registering_twice_lists_the_name_once() -> None:
    registry.register(PlainForCausalLM)
    registry.register(PlainForCausalLM)
    assert config.SUPPORTED_ARCHITECTURES.count("PlainForCausalLM") == 1


def test_the_builtin_models_are_those_that_config_supports() -> None:
    assert list(registry.MODELS) == config.SUPPORTED_ARCHITECTURES
    for name, path in registry.MODELS.items():
        assert registry.import_model(path).__name__ == name


def test_a_class_that_ranks_could_not_import_is_refused() -> None:
    class Local(Qwen3ForCausalLM):
        pass

    with pytest.raises(ValueError, match="top level"):
        registry.register(Local)
    with pytest.raises(ValueError, match=r"can't import the model class tests\.nowhere:Model"):
        registry.import_model("tests.nowhere:Model")
    with pytest.raises(ValueError, match=r"no attribute 'Model'"):
        registry.import_model("tests.conftest:Model")
