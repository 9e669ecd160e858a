"""Time to the first token (TTFT) and per output token (TPOT) for each batch size, against the floor of the hardware.

    python bench/latency.py --model qwen3-0.6b qwen3-8b --batch 1 32 256 --prompt-len 512 --png latency.png

Every request arrives at once on an idle engine, with a prompt of its own, so no prefix is cached. TTFT is the time that
`generate` takes for one token, TPOT the rest of the time for --output-len tokens over the tokens that follow the first;
medians of --repeats (TTFT of one request: of 5 at least). GPU idle is 1 - (time of the step's CUDA graphs replayed back
to back, halfway) / TPOT.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from command_line import MODEL_HELP, at_least, parser_of, positive, pyplot
from floor import ModelCost, Rates, device_rates
from tqdm import tqdm
from workload import default_model_here, load_format, random_prompts

from nanollm import LLM, SamplingParams, __version__
from nanollm.cli import exit_code
from nanollm.runtime.executor import resolve_device
from nanollm.runtime.model_runner import resolve_dtype

REPLAYS = 50


def main() -> None:
    parser = parser_of(__doc__, png="TPOT beside its floor")
    parser.add_argument("--model", nargs="+", help=MODEL_HELP)
    parser.add_argument("--tp", type=positive, default=1, help="number of ranks (default: %(default)s)")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt-len", type=positive, default=512)
    parser.add_argument("--output-len", type=at_least(2), default=257)
    parser.add_argument("--repeats", type=positive, default=3)
    args = parser.parse_args()
    device = resolve_device("auto")
    models = args.model or [default_model_here()]
    results = [measure_model(model, device, args) for model in models]
    if args.json:
        settings = {"tensor_parallel_size": args.tp, "prompt_len": args.prompt_len, "output_len": args.output_len}
        versions = {"nanollm": __version__, "torch": torch.__version__}
        args.json.write_text(json.dumps(settings | {"versions": versions, "models": results}, indent=2) + "\n")
    if args.png:
        draw(args.png, results, f"tp {args.tp}, prompts of {args.prompt_len} tokens")


def measure_model(model: str, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Print a table; returns its rows."""
    with LLM(
        model,
        load_format=load_format(model),
        tensor_parallel_size=args.tp,
        max_model_len=args.prompt_len + args.output_len,
        max_num_seqs=max(args.batch),
        skip_tokenizer_init=True,
    ) as llm:
        dtype = resolve_dtype(llm.config.dtype, llm.model_config, device)
        rows = [measure(llm, batch, args) for batch in tqdm(args.batch, desc="batch sizes", dynamic_ncols=True)]
    add_floors(rows, ModelCost.of(llm.model_config, dtype.itemsize), device_rates(device, dtype), args)
    name = Path(model).name
    print(f"{name}, {str(dtype).removeprefix('torch.')}, tp {args.tp}, prompts of {args.prompt_len} tokens")
    print(f"{'batch':>5} {'TTFT ms':>9} {'of floor':>9} {'TPOT ms':>9} {'floor ms':>9} {'of floor':>9} {'GPU idle':>9}")
    for row in rows:
        idle = f"{row['gpu_idle']:10.1%}" if "gpu_idle" in row else ""
        print(
            f"{row['batch']:5} {row['ttft_ms']:9.2f} {row['ttft_achieved']:9.1%} {row['tpot_ms']:9.3f} "
            f"{row['tpot_floor_ms']:9.3f} {row['tpot_achieved']:9.1%}{idle}"
        )
    return {"model": name, "rows": rows}


def measure(llm: LLM, batch: int, args: argparse.Namespace) -> dict[str, float]:
    """TTFT and TPOT of one batch size, in ms, and the share of TPOT in which the GPU has nothing to do."""
    draw_from = random.Random(batch)

    def prompts() -> list[list[int]]:
        return random_prompts(draw_from, batch, args.prompt_len, llm.model_config.vocab_size)

    def seconds(num_tokens: int) -> float:
        asked = prompts()
        start = time.perf_counter()
        llm.generate(asked, params(num_tokens), use_tqdm=False)
        return time.perf_counter() - start

    for _ in range(2):  # kernels compile the first time; the graph of a step with prompts is captured the second time
        seconds(args.output_len)
    ttft = statistics.median(seconds(1) for _ in range(max(args.repeats, 5 if batch == 1 else 1)))
    whole = statistics.median(seconds(args.output_len) for _ in range(args.repeats))
    tpot = (whole - ttft) / (args.output_len - 1)
    row = {"batch": batch, "ttft_ms": ttft * 1e3, "tpot_ms": tpot * 1e3}
    decode = llm._engine.executor.runner.decode  # type: ignore[attr-defined]
    if args.tp == 1 and (graphs := decode.graphs_for(batch)) is not None:
        stream: Iterator[object] = llm.generate_stream(prompts(), params(args.output_len))
        for _ in islice(stream, batch * args.output_len // 2):
            pass
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(REPLAYS):
            graphs.replay()
        torch.cuda.synchronize()
        row["gpu_idle"] = 1 - (time.perf_counter() - start) / REPLAYS / tpot
        stream.close()  # type: ignore[attr-defined]
        llm.reset_prefix_cache()  # the replays wrote other tokens over the last one
    return row


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=num_tokens)


def add_floors(rows: list[dict[str, float]], cost: ModelCost, rates: Rates, args: argparse.Namespace) -> None:
    """Floors of both times, and how much of each was achieved. A first token also needs one look at the head."""
    for row in rows:
        batch, middle = int(row["batch"]), args.prompt_len + args.output_len // 2
        head = cost.head_weights * cost.value_bytes / rates.bytes_per_second / args.tp
        ttft = 1e3 * (cost.prompt_seconds([args.prompt_len] * batch, rates, args.tp) + head)
        tpot = 1e3 * cost.decode_seconds([middle] * batch, rates, args.tp)
        row |= {"ttft_floor_ms": ttft, "ttft_achieved": ttft / row["ttft_ms"]}
        row |= {"tpot_floor_ms": tpot, "tpot_achieved": tpot / row["tpot_ms"]}


def draw(path: Path, results: list[dict[str, Any]], title: str) -> None:
    """TPOT over batch size, ours and the floors'."""
    from matplotlib.ticker import LogLocator, NullLocator

    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for color, result in enumerate(results):
        batches = [row["batch"] for row in result["rows"]]
        for label, key, style in ((result["model"], "tpot_ms", "o-"), ("its floor", "tpot_floor_ms", "--")):
            axes.plot(batches, [row[key] for row in result["rows"]], style, color=f"C{color}", label=label)
    axes.set(xlabel="batch size", ylabel="ms per output token", title=title, xscale="log", yscale="log")
    axes.set_xticks(batches, map(str, batches))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(exit_code(main))
