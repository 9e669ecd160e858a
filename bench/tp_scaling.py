"""What more GPUs bring: TPOT by batch size, an 8k prompt and workload W at each tensor-parallel degree.

    python bench/tp_scaling.py --model qwen3-8b --tp 1 2 --json scaling.json --png scaling.png
    python bench/tp_scaling.py --model qwen3-8b --predict --all-reduce all_reduce.json
    python bench/tp_scaling.py --model qwen3-8b --runs tp1.json tp2.json --predict --png scaling.png

Speed-up is over the first degree. Communication is the time of its kernels in a step, waiting included, over the
step's. --predict runs one GPU only, and says what 2, 4 and 8 would give: the floor shrinks with their number, and so
does what steps take above it, but for what those of the smallest batch do, which is launches and waits and stays; each
all-reduce adds what bench/all_reduce.py measured for its bytes, or an estimate.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from command_line import at_least, parser_of, positive, pyplot
from floor import ModelCost, Rates, device_rates, workload_steps
from latency import add_floors, measure, params
from throughput import run_twice
from workload import Workload, load_format, random_prompts

from nanollm import LLM, __version__
from nanollm.cli import exit_code
from nanollm.config import ModelConfig
from nanollm.models.source import resolve_model
from nanollm.runtime.executor import resolve_device
from nanollm.runtime.model_runner import resolve_dtype

COMMUNICATION = ("_one_shot_kernel", "_two_shot_kernel", "_best_of_ranks_kernel", "nccl")
AllReduce = Callable[[float, int], float]  # bytes, ranks -> seconds


def main() -> None:
    parser = parser_of(__doc__, png="the speed-up")
    parser.add_argument("--model", default="qwen3-8b", help="as for throughput.py (default: %(default)s)")
    parser.add_argument("--tp", type=positive, nargs="+", help="degrees (default: 1, 2, 4 … as many as there are GPUs)")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--prompt-len", type=positive, default=512)
    parser.add_argument("--output-len", type=at_least(2), default=257)
    parser.add_argument("--long-prompt-len", type=positive, default=8192)
    parser.add_argument("--num-prompts", type=at_least(0), default=256, help="of workload W; 0: without it")
    parser.add_argument("--max-len", type=positive, default=1024, help="longest prompt and output of workload W")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--nccl", action="store_true", help="without our own all-reduce")
    parser.add_argument("--predict", action="store_true", help="from one GPU, what 2, 4 and 8 would give")
    parser.add_argument(
        "--all-reduce", type=Path, metavar="FILE", help="what bench/all_reduce.py wrote, to predict with"
    )
    parser.add_argument("--runs", type=Path, nargs="+", default=[], metavar="FILE", help="what --json wrote earlier")
    args = parser.parse_args()
    config, device = resolve_model(args.model, load_format=load_format(args.model)).config, resolve_device("auto")
    dtype = resolve_dtype("auto", config, device)
    if missing := [str(path) for path in args.runs if not path.is_file()]:
        parser.error(f"--runs: no such file: {', '.join(missing)}")
    earlier = [json.loads(path.read_text()) for path in args.runs]
    for name, value in settings(args).items():
        if other := [found.get(name) for found in earlier if found.get(name) != value]:
            parser.error(f"--runs were measured with {name} {other[0]}, this call has {value}")
    most = 0 if earlier else 1 if args.predict else max(torch.cuda.device_count(), 1)
    degrees = args.tp or [n for n in (1, 2, 4, 8) if n <= most]
    if args.predict and 1 not in {*degrees, *(run["tp"] for found in earlier for run in found["runs"])}:
        parser.error("--predict starts from a run of one GPU: add --tp 1, or --runs with one")
    # Floors of one table are of one device, and here there may be none.
    rates = Rates(**earlier[0]["rates"]) if earlier else device_rates(device, dtype)
    cost = ModelCost.of(config, earlier[0]["value_bytes"] if earlier else dtype.itemsize)
    runs = [run for found in earlier for run in found["runs"] if "predicted" not in run]
    for tp in degrees:
        with start(tp, args) as llm:
            runs.append(measure_degree(llm, tp, args))
        with_floors(runs[-1], cost, rates, args)
    runs.sort(key=lambda run: run["tp"])
    if args.predict:
        all_reduce = estimated if args.all_reduce is None else measured(json.loads(args.all_reduce.read_text()))
        runs += [predicted(runs[0], tp, config, cost, rates, all_reduce, args) for tp in (2, 4, 8)]
    if args.json:
        versions = {"nanollm": __version__, "torch": torch.__version__}
        about = settings(args) | {"rates": vars(rates), "value_bytes": cost.value_bytes, "versions": versions}
        args.json.write_text(json.dumps(about | {"runs": runs}, indent=2) + "\n")
    report(runs, args)
    if args.png:
        draw(args.png, runs, Path(args.model).name)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What runs must have in common to stand in one table."""
    names = ("model", "nccl", "batch", "prompt_len", "output_len", "long_prompt_len", "max_len")
    return {name: getattr(args, name) for name in names}


def start(tp: int, args: argparse.Namespace) -> LLM:
    return LLM(
        args.model,
        load_format=load_format(args.model),
        tensor_parallel_size=tp,
        max_model_len=max(args.prompt_len + args.output_len, args.long_prompt_len + 1, 2 * args.max_len),
        max_num_seqs=max(*args.batch, args.num_prompts),
        disable_custom_all_reduce=args.nccl,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )


def measure_degree(llm: LLM, tp: int, args: argparse.Namespace) -> dict[str, Any]:
    """All times of one degree."""
    rows = []
    for batch in args.batch:
        row = measure(llm, batch, argparse.Namespace(**vars(args) | {"tp": tp}))
        if tp > 1 and torch.cuda.is_available():
            row["communication"] = communication_seconds(llm, batch, args) * 1e3 / row["tpot_ms"]
        rows.append(row)
    run = {"tp": tp, "rows": rows, "long_prompt_ms": long_prompt_seconds(llm, args) * 1e3}
    if args.num_prompts:
        outputs, run["workload_seconds"] = run_twice(llm, args.num_prompts, args.max_len, show=False)
        run["workload_tokens"] = sum(len(output.outputs[0].token_ids) for output in outputs)
    return run


def long_prompt_seconds(llm: LLM, args: argparse.Namespace) -> float:
    """Of one prompt and its first token, the best of a few."""
    seconds = []
    for _ in range(1 + args.repeats):
        asked = random_prompts(random, 1, args.long_prompt_len, llm.model_config.vocab_size)
        before = time.perf_counter()
        llm.generate(asked, params(1), use_tqdm=False)
        seconds.append(time.perf_counter() - before)
    return min(seconds)


def communication_seconds(llm: LLM, batch: int, args: argparse.Namespace) -> float:
    """What rank 0's GPU spends on it in a decode step: each kernel's launches a step times its median, since a wait for
    a rank that is late now and then is no part of it. The difference of two lengths leaves the prompts out."""
    lengths: tuple[int, int] = (4, 24)
    found: list[dict[str, list[float]]] = []
    for num_tokens in lengths:
        asked = random_prompts(random, batch, min(args.prompt_len, 64), llm.model_config.vocab_size)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            llm.generate(asked, params(num_tokens), use_tqdm=False)
            torch.cuda.synchronize()
        found.append({})
        for event in profile.events():
            if any(name in event.name.lower() for name in COMMUNICATION):
                found[-1].setdefault(event.name, []).append(event.time_range.elapsed_us() * 1e-6)
    gc.collect()  # of so many events, which else takes half a second of what is measured next
    return sum(
        statistics.median(times) * (len(times) - len(found[0].get(name, []))) / (lengths[1] - lengths[0])
        for name, times in found[1].items()
    )


def workload(args: argparse.Namespace) -> Workload:
    return Workload.make(args.num_prompts, args.max_len)


def with_floors(run: dict[str, Any], cost: ModelCost, rates: Rates, args: argparse.Namespace) -> None:
    tp, w = run["tp"], workload(args)
    add_floors(run["rows"], cost, rates, argparse.Namespace(**vars(args) | {"tp": tp}))
    if "workload_tokens" in run:
        steps = workload_steps(cost, w.prompt_lens, w.output_lens, rates, tp)
        run["workload_floor_seconds"] = sum(seconds for seconds, _ in steps)
    run["long_prompt_floor_ms"] = cost.prompt_seconds([args.long_prompt_len], rates, tp) * 1e3


def estimated(nbytes: float, ranks: int) -> float:
    """Two H200s joined by NVLink: the trip, then bytes at 350 GB/s each way."""
    return 4.5e-6 + 2 * (ranks - 1) / ranks * nbytes / 350e9


def measured(found: dict[str, Any]) -> AllReduce:
    """The fused all-reduce's times, straight lines between; for other numbers of ranks by the bytes that they send."""
    points = sorted((int(nbytes), times) for nbytes, times in found["microseconds"].items())
    sizes = [float(nbytes) for nbytes, _ in points]
    seconds = [min(times["fused one-shot"], times["fused two-shot"]) * 1e-6 for _, times in points]
    share = 2 * (found["ranks"] - 1) / found["ranks"]

    def all_reduce(nbytes: float, ranks: int) -> float:
        nbytes *= 2 * (ranks - 1) / ranks / share
        if nbytes >= sizes[-1]:
            return seconds[-1] * nbytes / sizes[-1]
        i = next(i for i, size in enumerate(sizes) if size >= nbytes)
        if i == 0:
            return seconds[0]
        part = (nbytes - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return seconds[i - 1] + part * (seconds[i] - seconds[i - 1])

    return all_reduce


def predicted(
    one: dict[str, Any], tp: int, config: ModelConfig, cost: ModelCost, rates: Rates, all_reduce: AllReduce,
    args: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """The run of `tp` GPUs, from that of one."""

    def communication(tokens: int) -> float:
        """Seconds of a step: after attention, after the feed-forward layer, and after the embedding; the choice."""
        nbytes = tokens * config.hidden_size * cost.value_bytes
        return (2 * config.num_layers + 1) * all_reduce(nbytes, tp) + all_reduce(8 * tokens, tp)

    w = workload(args)
    run: dict[str, Any] = {"tp": tp, "predicted": True}
    if "workload_tokens" in one:
        run["workload_tokens"] = one["workload_tokens"]
    run["rows"] = [{"batch": row["batch"], "ttft_ms": 1.0, "tpot_ms": 1.0} for row in one["rows"]]
    with_floors(run, cost, rates, args)
    run["rows"] = [{k: v for k, v in row.items() if not k.startswith("ttft")} for row in run["rows"]]
    fixed_ms = one["rows"][0]["tpot_ms"] - one["rows"][0]["tpot_floor_ms"]

    def shrunk(above: float, fixed: float) -> float:
        return min(above, fixed) + max(above - fixed, 0.0) / tp

    for row, single in zip(run["rows"], one["rows"], strict=True):
        comm = communication(int(row["batch"])) * 1e3
        row["tpot_ms"] = row["tpot_floor_ms"] + shrunk(single["tpot_ms"] - single["tpot_floor_ms"], fixed_ms) + comm
        row |= {"communication": comm / row["tpot_ms"], "tpot_achieved": row["tpot_floor_ms"] / row["tpot_ms"]}
    if "workload_tokens" in one:
        steps = list(workload_steps(cost, w.prompt_lens, w.output_lens, rates, tp))[1:]
        comm = communication(sum(w.prompt_lens)) + sum(communication(num_rows) for _, num_rows in steps)
        above = one["workload_seconds"] - one["workload_floor_seconds"]
        run["workload_seconds"] = run["workload_floor_seconds"] + shrunk(above, fixed_ms * 1e-3 * len(steps)) + comm
    above = one["long_prompt_ms"] - one["long_prompt_floor_ms"]
    run["long_prompt_ms"] = run["long_prompt_floor_ms"] + above / tp + communication(args.long_prompt_len) * 1e3
    return run


def report(runs: list[dict[str, Any]], args: argparse.Namespace) -> None:
    first = runs[0]
    print(f"{Path(args.model).name}, {'NCCL' if args.nccl else 'our all-reduce'}; prompts of {args.prompt_len} tokens")
    print(f"{'tp':>4} {'':24} {'time':>12} {'of floor':>9} {'speed-up':>9} {'communication':>14}")
    for run in runs:
        label = f"{run['tp']:>4}{' (predicted)' if run.get('predicted') else ''}"
        for row, base in zip(run["rows"], first["rows"], strict=True):
            communication = f"{row['communication']:15.1%}" if "communication" in row else ""
            print(
                f"{label:16} TPOT, batch {row['batch']:<4} {row['tpot_ms']:9.3f} ms {row['tpot_achieved']:9.1%} "
                f"{base['tpot_ms'] / row['tpot_ms']:9.2f}{communication}"
            )
        print(
            f"{label:16} prompt of {args.long_prompt_len:<6} {run['long_prompt_ms']:9.2f} ms "
            f"{run['long_prompt_floor_ms'] / run['long_prompt_ms']:9.1%} "
            f"{first['long_prompt_ms'] / run['long_prompt_ms']:9.2f}"
        )
        if "workload_tokens" in run:
            rate, floor = run["workload_tokens"] / run["workload_seconds"], run["workload_floor_seconds"]
            gain = first.get("workload_seconds", float("nan")) / run["workload_seconds"]
            print(f"{label:16} workload W {rate:13,.0f} tok/s {floor / run['workload_seconds']:8.1%} {gain:9.2f}")


def draw(path: Path, runs: list[dict[str, Any]], title: str) -> None:
    """Speed-up over the number of GPUs: of each batch size, and of workload W."""
    plt = pyplot()
    first, degrees = runs[0], sorted({run["tp"] for run in runs})
    labels = [f"TPOT, batch {row['batch']}" for row in first["rows"]]
    none = float("nan")
    if "workload_seconds" in first:
        labels.append("workload W")

    def gains(run: dict[str, Any]) -> list[float]:
        of_batches = [base["tpot_ms"] / row["tpot_ms"] for base, row in zip(first["rows"], run["rows"], strict=True)]
        return [*of_batches, first.get("workload_seconds", none) / run.get("workload_seconds", none)]

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(degrees, [tp / first["tp"] for tp in degrees], "k--", linewidth=0.8, label="as many times as GPUs")
    found = [run for run in runs if "predicted" not in run]
    for style, some in (("o-", found), ("x:", [first, *(run for run in runs if "predicted" in run)])):
        for i, label in enumerate(labels):
            speed_ups = [gains(run)[i] for run in some]
            label = label if style == "o-" else "_"  # once in the legend
            axes.plot([run["tp"] for run in some], speed_ups, style, color=f"C{i}", label=label)
    if len(found) < len(runs):
        title += "; dotted: predicted from one GPU"
    axes.set(xlabel="tensor-parallel degree", ylabel="speed-up", title=title, xticks=degrees)
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(exit_code(main))
