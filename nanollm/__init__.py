"""nanollm: a small tensor-parallel LLM inference engine. Public names load on first use: `import nanollm` is quick."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanollm.async_engine import AsyncLLMEngine, QueueFullError
    from nanollm.config import EngineConfig
    from nanollm.llm import LLM
    from nanollm.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from nanollm.runtime.channel import EngineDeadError
    from nanollm.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineConfig",
    "EngineDeadError",
    "QueueFullError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_HOMES = {
    "LLM": "nanollm.llm",
    "AsyncLLMEngine": "nanollm.async_engine",
    "CompletionOutput": "nanollm.outputs",
    "EngineConfig": "nanollm.config",
    "EngineDeadError": "nanollm.runtime.channel",
    "QueueFullError": "nanollm.async_engine",
    "RequestMetrics": "nanollm.outputs",
    "RequestOutput": "nanollm.outputs",
    "SamplingParams": "nanollm.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nanollm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
