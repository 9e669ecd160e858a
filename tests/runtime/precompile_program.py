"""Goes through a start-up on the CPU as if there were an H200, with a compiler that only says what it should compile.

Arguments: model, max_num_seqs, max_num_batched_tokens, block_size, weights of a layer. Prints lists of kernel names:
compiled in parallel, and launched meanwhile; then of steps that follow, the same two.
"""

import json
import sys
import threading
from typing import Any

import numpy as np
import torch
import triton

import nanollm.llm  # noqa: F401 - all the modules that are patched
from nanollm.config import EngineConfig
from nanollm.distributed.tp_group import TPGroup
from nanollm.kernels.backend import Gpu
from nanollm.kernels.precompile import compiling_in_parallel
from nanollm.layers.attention import Attention, bind_kv_cache, use_attention_backend
from nanollm.layers.sampler import Filters
from nanollm.models.source import resolve_model
from nanollm.runtime.cuda_graphs import DecodeSteps, capture_sizes
from nanollm.runtime.mixed_steps import MixedSteps, longest_padded
from nanollm.runtime.model_runner import ModelRunner
from nanollm.runtime.step_plan import EMPTY, StepPlan
from tests.kernels.compiled import Driver

# Of 64 experts 8 are chosen: blocks of 16 rows and parts of 16 bits meet between two powers of two only.
SMALL = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 64, "mlp_only_layers": [0, 1]}
early: list[str] = []
late: list[str] = []
launched: list[str] = []


class Kernel:
    """Of a variant that is not really compiled."""

    function = packed_metadata = None

    def __init__(self, src: Any, **options: Any) -> None:
        self.name = src.name
        (late if threading.current_thread() is threading.main_thread() else early).append(src.name)

    def launch_metadata(self, *args: Any) -> None:
        launched.append(self.name)

    def run(self, *args: Any) -> None:
        pass


def pretend() -> None:
    triton.runtime.driver.set_active(Driver(90))
    triton.compiler.compile = Kernel
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    for name, module in list(sys.modules.items()):
        if name.startswith("nanollm."):
            for patched, value in (
                ("runs_triton", lambda x: True),
                ("gpu", lambda device: Gpu("NVIDIA H200", (9, 0), 227 * 1024, 132)),
                # The CPU's library can't, and there is nothing to compile.
                ("_split_by_library", lambda x, w, splits: x.new_empty(splits, len(x), len(w), dtype=torch.float32)),
            ):
                if hasattr(module, patched):
                    setattr(module, patched, value)
    # The library's matmuls would take most of the time.
    torch.nn.functional.linear = lambda x, w, bias=None: x.new_empty(len(x), len(w))
    torch.mm = lambda x, w, out=None: x.new_empty(len(x), w.shape[1]) if out is None else out  # type: ignore[assignment]
    torch.Tensor.addmm_ = lambda self, x, w: self  # type: ignore[assignment, method-assign]


def step(lengths: list[int]) -> StepPlan:
    """Every row computes so many tokens, in a new block, and samples."""
    counts = np.array(lengths, np.int32)
    rows, ones = np.arange(len(counts), dtype=np.int32), np.ones_like(counts)
    zeros, ends = ones - 1, counts.cumsum(dtype=np.int32)
    return StepPlan(
        0, rows, counts, zeros, zeros, np.zeros(ends[-1], np.int32), rows, zeros, ones, zeros, ends - 1, rows,
        *[EMPTY] * 7,
    )  # fmt: skip


@torch.inference_mode()
def main() -> None:
    model = sys.argv[1]
    num_rows, num_tokens, block_size, layer_weights = map(int, sys.argv[2:])
    shape: dict[str, Any] = {"num_hidden_layers": 3, "max_position_embeddings": 4096}
    shape |= SMALL if "a3b" in model else {}
    config = EngineConfig.from_args(
        model, dtype="bfloat16", block_size=block_size, num_kv_blocks=4, max_num_seqs=num_rows,
        max_num_batched_tokens=num_tokens, max_model_len=4096,
    )  # fmt: skip
    source = resolve_model(model, load_format="dummy", hf_overrides=shape)
    runner = ModelRunner(config, source, TPGroup(), torch.device("cpu"))
    pretend()
    use_attention_backend(runner.model, Attention.backend)
    sampler, sizes, padded = runner.decode._sampler, capture_sizes(num_rows), longest_padded(layer_weights, num_tokens)
    runner.decode = DecodeSteps(runner.model, runner.rows, sampler, num_rows, sizes)
    runner.mixed = MixedSteps(runner.model, runner.rows, sampler, num_rows, padded, capture=False)
    plan, cache = runner._largest_step()
    bind_kv_cache(runner.model, cache)
    with compiling_in_parallel(torch.device("cuda", 0), 1):
        runner._compile(plan)
    meanwhile, launched[:] = list(launched), []
    for size in sizes:
        runner.decode._forward(size)
        for filters in Filters:
            runner.decode._sample(runner.decode._logits_r[:size], filters)
    alone = [[n] for n in (1, 2, 7, 16, 30, 100, 200, 512, 2318, 4096)]
    decoding = [[1] * n + [rest - n] for n in (1, 2, 3, 5, 8, 13, 20, 39) for rest in (n + 9, 300, num_tokens)]
    for lengths in [*alone, *decoding]:
        if sum(lengths) <= num_tokens and 0 < lengths[-1] <= 4096:
            logits_r, sample = runner.mixed.forward(step(lengths))
            sample(logits_r)
    print(json.dumps([early, meanwhile, late, launched]))


if __name__ == "__main__":
    main()
