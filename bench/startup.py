"""Seconds from the start of Python to the first token, and where they go.

    python bench/startup.py --model qwen3-0.6b --cold --png startup.png

Every run is a process of its own. The first one isn't counted: it reads files into memory and fills Triton's cache of
compiled kernels. Medians of --repeats runs; --cold adds as many that find Triton's cache empty. Kernels compile in
threads while the weights load: "kernels awaited" is what is left to wait for then.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from command_line import MODEL_HELP, parser_of, positive, pyplot
from workload import default_model_here, load_format

from nanollm.cli import exit_code

PROMPT_LEN = 512
# Packages that a first token has no need of.
SPARED = ("transformers", "torch._dynamo", "torch._inductor")


class Clock:
    """Adds up the seconds of each part; a part within another counts as the inner one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]  # of the parts that are open

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        self._inner.append(0.0)
        try:
            yield
        finally:
            import torch

            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            spent = time.monotonic() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - self._inner.pop()
            self._inner[-1] += spent

    def watch(self, owner: Any, name: str, part: str) -> None:
        """From now on calls of this function or method are that part."""
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return function(*args, **kwargs)

        setattr(owner, name, timed)


def start_up(model: str, started: float) -> dict[str, Any]:
    """In a new process: start an engine and have it make one token. started: monotonic time when Python was started."""
    from nanollm import LLM, SamplingParams

    clock = Clock()
    clock.seconds["imports"] = time.monotonic() - started
    watch_parts(clock)
    with clock.part("rest"):
        llm = LLM(model, load_format=load_format(model), skip_tokenizer_init=True)
    seconds = dict(clock.seconds)  # steps that run from now on are no part of start-up
    params = SamplingParams(temperature=0, max_tokens=1)
    start = time.monotonic()
    (output,) = llm.generate([[7] * min(PROMPT_LEN, llm.max_model_len - 1)], params, use_tqdm=False)
    seconds["first token"] = time.monotonic() - start
    assert len(output.outputs[0].token_ids) == 1
    return {
        "seconds": seconds,
        "total": time.monotonic() - started,
        "loaded": [name for name in SPARED if name in sys.modules],
        "about": llm._executor.runner.describe(),  # type: ignore[union-attr]
    }


def watch_parts(clock: Clock) -> None:
    from nanollm import llm
    from nanollm.runtime import executor, model_runner
    from nanollm.runtime.cuda_graphs import DecodeSteps
    from nanollm.runtime.model_runner import ModelRunner, PendingResult

    clock.watch(llm, "find_engine", "device")
    clock.watch(executor, "start_ranks", "device")
    import_model, compiling = model_runner.import_model, model_runner.compiling_in_parallel

    def timed_model(path: str) -> Callable[..., Any]:
        def make(*args: Any) -> Any:
            with clock.part("model"):
                return import_model(path)(*args)

        return make

    @contextmanager
    def timed_compiling(*args: Any) -> Iterator[None]:
        context = compiling(*args)
        context.__enter__()
        yield
        with clock.part("kernels awaited"):
            context.__exit__(None, None, None)

    model_runner.import_model = timed_model  # type: ignore[assignment]
    model_runner.compiling_in_parallel = timed_compiling
    clock.watch(ModelRunner, "_compile", "kernels named")
    clock.watch(ModelRunner, "_load_weights", "weights")
    clock.watch(ModelRunner, "launch", "profile")
    clock.watch(PendingResult, "wait", "profile")
    clock.watch(ModelRunner, "_graph_bytes", "capture")
    clock.watch(model_runner, "allocate_kv_cache", "KV cache")
    clock.watch(DecodeSteps, "capture", "capture")


def measure(model: str, triton_cache: str | None = None) -> dict[str, Any]:
    """One run in a process of its own."""
    command = [sys.executable, __file__, "--model", model, "--started", str(time.monotonic())]
    env = os.environ | ({"TRITON_CACHE_DIR": triton_cache} if triton_cache else {})
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env)
    if run.returncode:
        sys.exit(f"the start-up failed, as it says above, with exit code {run.returncode}")
    return json.loads(run.stdout.splitlines()[-1])


def cold(model: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="nanollm-startup-") as directory:
        return measure(model, directory)


def median(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Of each part, and of the total, which therefore need not be the sum of the parts."""
    parts = {name: statistics.median(run["seconds"][name] for run in runs) for name in runs[0]["seconds"]}
    return parts | {"total": statistics.median(run["total"] for run in runs)}


def main() -> None:
    parser = parser_of(__doc__, png="the parts")
    parser.add_argument("--model", help=MODEL_HELP)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--cold", action="store_true", help="also with an empty Triton cache")
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)  # in a process that is measured
    args = parser.parse_args()
    if args.started is not None:
        print("\n" + json.dumps(start_up(args.model, args.started)))
        return
    model = args.model or default_model_here()
    first = measure(model)
    kinds = {"warm": [measure(model) for _ in range(args.repeats)]}
    if args.cold:
        kinds["cold"] = [cold(model) for _ in range(args.repeats)]
    report = {kind: median(runs) for kind, runs in kinds.items()}
    print(f"{Path(model).name}: {first['about']}")
    print(f"{'seconds':<16}" + "".join(f"{kind:>8}" for kind in report))
    for part in report["warm"]:
        print(f"{part:<16}" + "".join(f"{seconds[part]:8.2f}" for seconds in report.values()))
    print(f"imported without need: {', '.join(first['loaded']) or 'nothing'}")
    if args.json:
        about = {"model": Path(model).name, "about": first["about"], "loaded": first["loaded"]}
        args.json.write_text(json.dumps(about | {"seconds": report, "runs": kinds}, indent=2) + "\n")
    if args.png:
        draw(args.png, report, Path(model).name)


def draw(path: Path, report: dict[str, dict[str, float]], title: str) -> None:
    """A bar of parts for each kind of start."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 1.6 + 0.5 * len(report)), layout="constrained")
    left = dict.fromkeys(report, 0.0)
    for part in (name for name in report["warm"] if name != "total"):
        seconds = [parts[part] for parts in report.values()]
        axes.barh(list(report), seconds, left=list(left.values()), label=part)
        left = {kind: start + more for (kind, start), more in zip(left.items(), seconds, strict=True)}
    axes.set(xlabel="seconds from the start of Python to the first token", title=title)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=5, fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    sys.exit(exit_code(main))
