"""Output tokens per second with many requests at once (workload W), against the floor of the hardware.

python bench/throughput.py --tp 2
torchrun --nproc_per_node=2 bench/throughput.py
"""

import argparse
import json
import os
import sys
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from command_line import parser_of, positive, pyplot
from floor import ModelCost, device_rates, workload_steps
from workload import Workload, default_model_here, load_format

from nanollm import LLM, RequestOutput, SamplingParams, __version__
from nanollm.cli import exit_code
from nanollm.config import NAMED_SHAPES
from nanollm.runtime.executor import resolve_device
from nanollm.runtime.model_runner import resolve_dtype


def main() -> None:
    parser = parser_of(__doc__, png="tokens over time beside the floor's")
    parser.add_argument(
        "--model",
        help=f"directory, .gguf file, hub id or one of {', '.join(NAMED_SHAPES)} (random weights); "
        "default: qwen3-0.6b on a GPU, SmolLM2-135M on a CPU",
    )
    parser.add_argument("--tp", type=positive, help="number of ranks; torchrun gives its own")
    parser.add_argument("--num-prompts", type=positive, default=256, help="requests at once (default: %(default)s)")
    parser.add_argument(
        "--max-len", type=positive, default=1024, help="longest prompt and output (default: %(default)s)"
    )
    args = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if args.tp not in (None, world_size) and world_size > 1:
        parser.error(f"torchrun started {world_size} ranks: leave --tp out")

    device = resolve_device("auto")
    model = args.model or default_model_here()
    llm = LLM(
        model,
        load_format=load_format(model),
        tensor_parallel_size=args.tp or world_size,
        skip_tokenizer_init=True,
    )
    with llm:
        outputs, seconds = run_twice(llm, args.num_prompts, args.max_len, show=rank == 0)
        if rank == 0:
            report(llm, device, outputs, seconds, args)


def run_twice(llm: LLM, num_prompts: int, max_len: int, *, show: bool) -> tuple[list[RequestOutput], float]:
    """Returns the second run's outputs, and its time from the call of generate to the end, in seconds."""
    vocab_size = llm.model_config.vocab_size
    warm_up = Workload.make(num_prompts, max_len, vocab_size)
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in warm_up.output_lens]
    llm.generate(warm_up.prompts, params, use_tqdm=show)
    start = time.perf_counter()
    outputs = llm.generate(warm_up.shifted(vocab_size).prompts, params, use_tqdm=show)
    return outputs, time.perf_counter() - start


def report(
    llm: LLM, device: torch.device, outputs: list[RequestOutput], seconds: float, args: argparse.Namespace
) -> None:
    tp = llm.config.tensor_parallel_size
    dtype = resolve_dtype(llm.config.dtype, llm.model_config, device)
    num_devices = min(tp, torch.cuda.device_count()) if device.type == "cuda" else 1  # ranks on a CPU share it
    llm.close()  # measuring rates needs an idle machine with free memory
    if device.type == "cpu":  # torchrun gives each rank its part of the cores, and the floor is that of all
        cores = int(os.environ.get("WORLD_SIZE", 1)) * torch.get_num_threads()
        torch.set_num_threads(min(cores, os.cpu_count() or cores))
    rates = device_rates(device, dtype)
    prompt_lens = [len(output.prompt_token_ids) for output in outputs]
    output_lens = [len(output.outputs[0].token_ids) for output in outputs]
    steps = list(
        workload_steps(ModelCost.of(llm.model_config, dtype.itemsize), prompt_lens, output_lens, rates, num_devices)
    )
    num_tokens = sum(output_lens)
    rate, floor = num_tokens / seconds, num_tokens / sum(step_seconds for step_seconds, _ in steps)
    result = {
        "model": Path(llm.config.model).name if os.path.exists(llm.config.model) else llm.config.model,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel_size": tp,
        "num_prompts": len(outputs),
        "prompt_tokens": sum(prompt_lens),
        "output_tokens": num_tokens,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(rate, 1),
        "floor_tokens_per_second": round(floor, 1),
        "achieved": round(rate / floor, 4),
        "rates": vars(rates),
        "versions": {"nanollm": __version__, "torch": torch.__version__},
    }
    print(f"{result['model']}, {result['dtype']}, tp {tp}, {result['device']}")
    print(f"{len(outputs)} requests, {sum(prompt_lens):,} prompt tokens, {num_tokens:,} output tokens, {seconds:.2f} s")
    print(f"{rate:,.1f} tokens/s, floor {floor:,.1f}: {rate / floor:.1%} of it")
    print(
        f"(floor: {rates.bytes_per_second / 1e9:,.0f} GB/s and {rates.flops_per_second / 1e9:,.0f} GFLOP/s a device, "
        f"{num_devices} of them; {rates.source})"
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    if args.png:
        draw(args.png, outputs, steps, f"{result['model']}, tp {tp}: {rate:,.0f} tokens/s, floor {floor:,.0f}")


def draw(path: Path, outputs: list[RequestOutput], steps: list[tuple[float, int]], title: str) -> None:
    """Tokens so far over time. Each request's are spread evenly between its first and its last, which is nearly so."""
    import numpy as np

    plt = pyplot()
    metrics: list[Any] = [output.metrics for output in outputs]
    start, end = min(m.arrival_time for m in metrics), max(m.finished_time for m in metrics)
    times = np.linspace(0, end - start, 400)
    ours = np.zeros_like(times)
    for output, m in zip(outputs, metrics, strict=True):
        first, last, count = m.first_token_time - start, m.finished_time - start, len(output.outputs[0].token_ids)
        ours += np.interp(times, [first, max(last, first + 1e-9)], [1, count], left=0)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([0, *accumulate(s for s, _ in steps)], [0, *accumulate(n for _, n in steps)], "--", label="floor")
    axes.plot(times, ours, label="nanollm")
    axes.set(xlabel="seconds", ylabel="output tokens so far", title=title, xlim=(0, None), ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(exit_code(main))
