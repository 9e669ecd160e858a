"""A whole engine on every rank, all given the same requests, so that a check can look inside each rank.

Light on imports: every process of on_ranks reads this file.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from nanollm.config import EngineConfig
from nanollm.distributed.tp_group import TPGroup
from nanollm.engine.engine_core import EngineCore
from nanollm.layers.attention import Attention
from nanollm.layers.hidden import Hidden
from nanollm.models.source import resolve_model
from nanollm.runtime.model_runner import ModelRunner, PendingResult
from nanollm.runtime.step_plan import StepPlan, StepResult
from nanollm.sampling_params import SamplingParams

BLOCK_SIZE = 4  # not the default
PROMPTS = [[5, 6, 7], list(range(20, 53)), [7] * 8]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=3, max_tokens=5, ignore_eos=True)


class LocalExecutor:
    """Runs plans on this rank; the other ranks do so too, by plans of their own that are the same."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.num_kv_blocks, self.max_model_len = runner.num_kv_blocks, runner.max_model_len
        self._pending: deque[PendingResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._pending.append(self.runner.launch(StepPlan.unpack(plan.pack(), plan.step)))

    def collect(self) -> StepResult:
        return self._pending.popleft().wait(60)

    def discard(self) -> None:
        self._pending.clear()


class Engine:
    """One rank's, with the weights at `path` in `dtype`."""

    def __init__(
        self, path: str, tp: TPGroup, dtype: str = "float32", device: str = "cpu", *, enforce_eager: bool = False
    ) -> None:
        config = EngineConfig(
            path, dtype=dtype, block_size=BLOCK_SIZE, num_kv_blocks=40, max_num_seqs=4, enforce_eager=enforce_eager
        )
        source = resolve_model(path)
        self.runner = ModelRunner(config, source, tp, torch.device(device))
        self.runner.allocate_kv_cache(self.runner.max_kv_blocks)
        self._core = EngineCore(config, source.config, LocalExecutor(self.runner), overlap=True)

    def run(self, params: SamplingParams, *, all_logits: bool = False) -> tuple[list[list[int]], list[torch.Tensor]]:
        """Tokens, and logits if asked for, of each of PROMPTS."""
        seqs = [self._core.make_sequences(prompt, params, all_logits=all_logits)[0] for prompt in PROMPTS]
        tokens: dict[int, list[int]] = {seq.request_id: [] for seq in seqs}
        for seq in seqs:
            self._core.add(seq)
        while self._core.has_unfinished:
            for output in self._core.step():
                tokens[output.request_id] += output.new_token_ids
        return list(tokens.values()), [torch.cat(seq.logits) for seq in seqs if all_logits]

    def kv_cache(self) -> torch.Tensor:
        """[layers, 2, blocks, block size, this rank's KV heads, head dim]"""
        layers = [module for module in self.runner.model.modules() if isinstance(module, Attention)]
        return torch.stack([torch.stack((layer.k_cache, layer.v_cache)) for layer in layers])


def results(path: str, tp: TPGroup) -> dict[str, Any]:
    """What must be the same whatever the degree; the KV cache only for this rank's heads."""
    engine = Engine(path, tp)
    _, logits = engine.run(GREEDY, all_logits=True)
    return {
        "logits": logits,
        "kv_cache": engine.kv_cache().clone(),
        "greedy": engine.run(GREEDY)[0],
        "seeded": engine.run(SEEDED)[0],
        "kv_heads": engine.runner.heads.kv_heads,
    }


@contextmanager
def hidden_states_compared(tp: TPGroup) -> Iterator[list[int]]:
    """Inside, whatever comes out of an all-reduce and its norm must be bitwise equal on every rank; counts them."""
    resolve, count = Hidden.resolve, [0]

    def compared(self: Hidden, group: TPGroup) -> tuple[torch.Tensor, torch.Tensor]:
        resolved = resolve(self, group)
        for x_TD in resolved:
            copies = tp.all_gather(x_TD)
            assert all(torch.equal(copies[0], copy) for copy in copies)
        count[0] += 1
        return resolved

    Hidden.resolve = compared  # type: ignore[method-assign]
    try:
        yield count
    finally:
        Hidden.resolve = resolve  # type: ignore[method-assign]


def check_degrees(world: TPGroup, models: dict[str, tuple[str, str, list[int]]]) -> None:
    """models: name -> (path, file of what one rank gives, degrees to check)."""
    groups = {size: dist.new_group(list(range(size))) for size in range(2, world.size + 1)}
    for name, (path, expected_file, degrees) in models.items():
        expected = torch.load(expected_file)
        for size in degrees:
            if world.rank >= size:
                continue
            tp = TPGroup(world.rank, size, groups[size])
            got = results(path, tp)
            where = f"{name} at {size} ranks"
            for ours, theirs in zip(got["logits"], expected["logits"], strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, msg=lambda m, w=where: f"{w}: {m}")
            heads = list(got["kv_heads"])
            cache = expected["kv_cache"][..., heads, :]
            torch.testing.assert_close(got["kv_cache"], cache, atol=1e-5, rtol=1e-5)
            assert got["greedy"] == expected["greedy"], where
            assert got["seeded"] == expected["seeded"], where
            for dtype in ("float32", "bfloat16") if size < 5 else ("bfloat16",):
                engine = Engine(path, tp, dtype)
                with hidden_states_compared(tp) as count:
                    engine.run(SamplingParams(temperature=0, max_tokens=2))
                num_steps, num_layers = 2, engine.runner.model_config.num_layers
                assert count[0] == num_steps * (2 * num_layers + 1)
