"""Executor: runs rank 0's plans on every rank."""

from collections import deque

import torch

from nanollm.config import EngineConfig
from nanollm.distributed.tp_group import TPGroup
from nanollm.models.source import ModelSource
from nanollm.runtime.model_runner import ModelRunner, PendingResult
from nanollm.runtime.step_plan import StepPlan, StepResult


class EngineDeadError(RuntimeError):
    """The engine can't go on: a rank failed, or it was closed. Make a new LLM."""


class Executor:
    """Runs plans in order. submit() launches, collect() waits for the oldest; two may be in flight."""

    def __init__(self, config: EngineConfig, source: ModelSource, device: torch.device) -> None:
        self._runner: ModelRunner | None = ModelRunner(config, source, TPGroup(), device)
        self._pending: deque[PendingResult] = deque()
        self.num_kv_blocks = self._runner.num_kv_blocks
        self.max_model_len = self._runner.max_model_len

    @property
    def runner(self) -> ModelRunner:
        if self._runner is None:
            raise EngineDeadError("this engine was closed: make a new LLM")
        return self._runner

    def submit(self, plan: StepPlan) -> None:
        """Launch a step; returns before the device has run it."""
        self._pending.append(self.runner.launch(plan))

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step."""
        return self._pending.popleft().wait()

    def discard(self) -> None:
        """Wait for all submitted steps and forget what they bring."""
        while self._pending:
            self._pending.popleft().wait()

    def close(self) -> None:
        """Free the model and the cache; twice is fine."""
        self._pending.clear()
        if self._runner is None:
            return
        device, self._runner = self._runner.device, None
        if device.type == "cuda":
            torch.cuda.empty_cache()


def resolve_device(device: str) -> torch.device:
    """The torch device that the user's choice means; ValueError if there is no GPU to use."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but PyTorch sees no GPU: use device='cpu' or 'auto'")
    return torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
