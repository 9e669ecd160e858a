"""Where the time of a step goes: CPU phases and GPU kernels of 50 decode steps, as numbers, a PNG and a Perfetto trace.

    python bench/step_timeline.py --model qwen3-0.6b --batch 256 --png steps.png --trace steps.json

Open the trace at ui.perfetto.dev. GPU idle is the share of the wall time in which no kernel or copy runs.
"""

import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from command_line import MODEL_HELP, at_least, output_file, parser_of, positive, pyplot
from torch.profiler import ProfilerActivity, profile, record_function
from workload import default_model_here, load_format, random_prompts

from nanollm import LLM, SamplingParams
from nanollm.cli import exit_code

PHASES = ("schedule", "submit", "collect", "update", "process")


def mark(owner: Any, name: str, phase: str) -> None:
    """Show every call of a bound method as `phase` in the trace."""
    method = getattr(owner, name)

    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(phase):
            return method(*args, **kwargs)

    setattr(owner, name, marked)


def merged(spans: list[tuple[float, float]]) -> float:
    """Total length of a union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total


def record(llm: LLM, batch: int, context: int, steps: int, trace: Path) -> None:
    """Profile `steps` decode steps of a full batch, after all prompts are in, and write the trace."""
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=steps + 64)
    vocab = min(llm.model_config.vocab_size, 10_000)
    prompts = random_prompts(random, batch, context, vocab)
    llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)  # compile and warm up
    engine = llm._engine
    mark(engine.scheduler, "schedule", "schedule")
    mark(engine.executor, "submit", "submit")
    mark(engine.executor, "collect", "collect")
    mark(engine.scheduler, "update", "update")
    mark(llm._processor, "process", "process")
    stream = llm.generate_stream([[t + 1 for t in prompt] for prompt in prompts], params)
    grown = 0
    while grown < 8 * batch:  # until every prompt has its first tokens
        next(stream)
        grown += 1
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    ) as run:
        for _ in range(steps * batch):
            next(stream)
    stream.close()  # type: ignore[attr-defined]
    run.export_chrome_trace(str(trace))


def read(trace: Path) -> tuple[dict[str, list[tuple[float, float]]], list[tuple[str, float, float]]]:
    """CPU phases and GPU work of a trace: spans in ms from its first phase."""
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("ph") == "X"]
    phases: dict[str, list[tuple[float, float]]] = defaultdict(list)
    zero = min(e["ts"] for e in events if e["name"] in PHASES)
    gpu = []
    for event in events:
        start, stop = (event["ts"] - zero) / 1e3, (event["ts"] + event["dur"] - zero) / 1e3
        if event["name"] in PHASES and event.get("cat") == "user_annotation":
            phases[event["name"]].append((start, stop))
        elif event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            gpu.append((event["name"], start, stop))
    return phases, gpu


def draw(phases: dict[str, list[tuple[float, float]]], gpu: list[tuple[str, float, float]], png: Path) -> None:
    """The middle few steps, a lane for each CPU phase and one for the GPU."""
    plt = pyplot()
    submits = sorted(phases["submit"])[len(phases["submit"]) // 2 :][:5]
    first, last = submits[0][0], submits[-1][1]
    figure, axis = plt.subplots(figsize=(12, 3.5))
    lanes = [("GPU", [(start, stop) for _, start, stop in gpu]), *((p, phases[p]) for p in PHASES)]
    for lane, (name, spans) in enumerate(lanes):
        shown = [(max(a, first) - first, min(b, last) - max(a, first)) for a, b in spans if b > first and a < last]
        axis.broken_barh(shown, (-lane - 0.4, 0.8), facecolors=f"C{lane}", edgecolor="none", label=name)
    axis.set_yticks([-lane for lane in range(len(lanes))], [name for name, _ in lanes])
    axis.set_xlabel("ms")
    axis.set_title(f"{len(submits) - 1} decode steps")
    figure.tight_layout()
    figure.savefig(png, dpi=120)


def main() -> None:
    parser = parser_of(__doc__, png="four decode steps")
    parser.add_argument("--model", help=MODEL_HELP)
    parser.add_argument("--batch", type=positive, default=256, help="(default: %(default)s)")
    parser.add_argument("--context", type=positive, default=512, help="tokens (default: %(default)s)")
    parser.add_argument("--steps", type=at_least(2), default=50, help="(default: %(default)s)")
    parser.add_argument("--trace", type=output_file, metavar="FILE", help="write the Perfetto trace")
    args = parser.parse_args()
    random.seed(0)
    model = args.model or default_model_here()
    max_model_len = args.context + args.steps + 128
    settings = {"load_format": load_format(model), "skip_tokenizer_init": True}
    with tempfile.TemporaryDirectory() as directory, LLM(model, max_model_len=max_model_len, **settings) as llm:
        trace = args.trace or Path(directory) / "trace.json"
        started = time.monotonic()
        record(llm, args.batch, args.context, args.steps, trace)
        phases, gpu = read(trace)
        print(f"{Path(model).name}, batch {args.batch}: profiled in {time.monotonic() - started:.1f} s")
    submits = sorted(phases["submit"])
    count = len(submits) - 1
    wall = submits[-1][0] - submits[0][0]
    figures: dict[str, float] = {"step_ms": wall / count}
    for name in PHASES:
        figures[f"{name}_ms"] = sum(stop - start for start, stop in phases[name]) / len(submits)
    inside = [(a, b) for _, a, b in gpu if a >= submits[0][0] and b <= submits[-1][0]]
    if gpu:
        figures |= {"gpu_busy_ms": merged(inside) / count, "gpu_idle": 1 - merged(inside) / wall}
    kernels: dict[str, float] = defaultdict(float)
    for name, start, stop in gpu:
        kernels[name[:60]] += (stop - start) / len(submits)
    for name, value in figures.items():
        print(f"{name:16} {value:9.3f}")
    for name, value in sorted(kernels.items(), key=lambda item: -item[1])[:12]:
        print(f"  {value:8.4f} ms a step  {name}")
    if args.png:
        draw(phases, gpu, args.png)
    if args.json:
        args.json.write_text(json.dumps({"model": Path(model).name, "batch": args.batch} | figures, indent=1))


if __name__ == "__main__":
    sys.exit(exit_code(main))
