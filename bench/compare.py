"""The same work on other engines, in the same run: vLLM, SGLang, nano-vllm and transformers, if they are installed.

    python bench/compare.py --model qwen3-0.6b --json compare.json --png compare.png
    python bench/compare.py --model qwen3-8b --engines vllm --python vllm=/opt/vllm/bin/python

Workload W as in throughput.py (second of two runs), then the time per output token (TPOT) of each batch size as in
latency.py: the same prompts, and temperature 0.6 without filters. Each engine has a process of its own, one after
another, and its own defaults. transformers runs W as one padded batch, up to the longest output.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from command_line import MODEL_HELP, at_least, parser_of, positive, pyplot
from workload import Workload, default_model_here, load_format, random_prompts

from nanollm.cli import exit_code

# Token ids of each prompt, and how many tokens to generate for each; returns how many there were.
Generate = Callable[[list[list[int]], list[int]], list[int]]
TEMPERATURE = 0.6


@dataclass(frozen=True)
class Job:
    """What one engine does. model: a directory or hub id; dummy: of whose weights there are none, so random ones."""

    engine: str
    model: str
    dummy: bool
    vocab_size: int
    max_model_len: int
    tp: int
    num_prompts: int
    max_len: int
    batch: list[int]
    prompt_len: int
    output_len: int
    repeats: int

    @property
    def max_num_seqs(self) -> int:
        return max(self.num_prompts, *self.batch)


def engine_arguments(job: Job) -> dict[str, Any]:
    """By vLLM's names, which are ours too."""
    return {
        "load_format": "dummy" if job.dummy else "auto",
        "tensor_parallel_size": job.tp,
        "max_model_len": job.max_model_len,
        "max_num_seqs": job.max_num_seqs,
        "skip_tokenizer_init": True,
    }


def start_nanollm(job: Job) -> Generate:
    from nanollm import LLM, SamplingParams

    llm = LLM(job.model, **engine_arguments(job))

    def generate(prompts: list[list[int]], lens: list[int]) -> list[int]:
        params = [SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n) for n in lens]
        return [len(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    return generate


def start_vllm(job: Job) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(job.model, **engine_arguments(job))

    def generate(prompts: list[list[int]], lens: list[int]) -> list[int]:
        params = [
            SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n, detokenize=False) for n in lens
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate


def start_sglang(job: Job) -> Generate:
    import sglang

    engine = sglang.Engine(
        model_path=job.model,
        load_format="dummy" if job.dummy else "auto",
        tp_size=job.tp,
        context_length=job.max_model_len,
        max_running_requests=job.max_num_seqs,
        skip_tokenizer_init=True,
    )

    def generate(prompts: list[list[int]], lens: list[int]) -> list[int]:
        params = [{"temperature": TEMPERATURE, "ignore_eos": True, "max_new_tokens": n} for n in lens]
        outputs = engine.generate(input_ids=prompts, sampling_params=params)
        return [output["meta_info"]["completion_tokens"] for output in outputs]

    return generate


def start_nanovllm(job: Job) -> Generate:
    from nanovllm import LLM, SamplingParams
    from nanovllm.engine import llm_engine, model_runner

    if job.dummy:  # it has no such thing, and wants a tokenizer
        if job.tp > 1:
            raise ValueError("nano-vllm's other ranks would look for weights: give a model that has some")

        class NoTokenizer:
            eos_token_id = -1

            @classmethod
            def from_pretrained(cls, *args: Any, **kwargs: Any) -> "NoTokenizer":
                return cls()

            def decode(self, token_ids: list[int]) -> str:
                return ""

        def fill(model: Any, path: str) -> None:
            for parameter in model.parameters():
                parameter.data.normal_(0.0, 0.02)

        llm_engine.AutoTokenizer, model_runner.load_model = NoTokenizer, fill
    llm = LLM(
        job.model,
        tensor_parallel_size=job.tp,
        max_model_len=job.max_model_len,
        max_num_seqs=job.max_num_seqs,
        enforce_eager=False,
    )

    def generate(prompts: list[list[int]], lens: list[int]) -> list[int]:
        params = [SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n) for n in lens]
        return [len(output["token_ids"]) for output in llm.generate(prompts, params, use_tqdm=False)]

    return generate


def start_transformers(job: Job) -> Generate:
    import torch
    import transformers

    if job.tp > 1:
        raise ValueError("transformers is measured on one GPU only: leave --tp out")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if job.dummy:
        config = transformers.AutoConfig.from_pretrained(job.model)
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        path = Path(job.model)
        where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent if where else path, dtype=dtype, **where)
    model = model.to(device).eval()

    def generate(prompts: list[list[int]], lens: list[int]) -> list[int]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        settings = transformers.GenerationConfig(
            do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, max_new_tokens=max(lens), pad_token_id=0
        )
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, generation_config=settings, eos_token_id=None)
        num_new = out.shape[1] - longest
        return [min(num_new, wanted) for wanted in lens]

    return generate


# By the name of the package to import.
ENGINES = {
    "nanollm": start_nanollm,
    "vllm": start_vllm,
    "sglang": start_sglang,
    "nanovllm": start_nanovllm,
    "transformers": start_transformers,
}


def measure(job: Job) -> dict[str, Any]:
    """In the engine's own process: start-up in seconds, W in tokens/s, TPOT in ms by batch size."""
    start = time.perf_counter()
    generate = ENGINES[job.engine](job)
    startup = time.perf_counter() - start

    def seconds(prompts: list[list[int]], lens: list[int]) -> float:
        start = time.perf_counter()
        found = generate(prompts, lens)
        spent = time.perf_counter() - start
        if found != lens:
            raise RuntimeError(f"{job.engine} generated other numbers of tokens than it was asked for")
        return spent

    work = Workload.make(job.num_prompts, job.max_len, job.vocab_size)
    seconds(work.prompts, work.output_lens)
    rate = work.num_output_tokens / seconds(work.shifted(job.vocab_size).prompts, work.output_lens)
    tpot = {batch: tpot_ms(job, batch, seconds) for batch in job.batch}
    version = getattr(sys.modules[job.engine], "__version__", "")
    about = {"engine": job.engine, "version": version, "startup_s": startup}
    return about | {"tokens_per_second": rate, "tpot_ms": tpot}


def tpot_ms(job: Job, batch: int, seconds: Callable[[list[list[int]], list[int]], float]) -> float:
    """Milliseconds per output token after the first, of this many requests at once."""
    draw = random.Random(batch)

    def once(output_len: int) -> float:
        return seconds(random_prompts(draw, batch, job.prompt_len, job.vocab_size), [output_len] * batch)

    once(job.output_len)  # compiles what is missing
    first = statistics.median(once(1) for _ in range(max(job.repeats, 5 if batch == 1 else 1)))
    whole = statistics.median(once(job.output_len) for _ in range(job.repeats))
    return (whole - first) / (job.output_len - 1) * 1e3


def run(job: Job, python: str | None) -> dict[str, Any]:
    """The engine's results, from a process of its own; {"engine", "error"} if it fails."""
    env = os.environ | ({} if python is None else {"PYTHONPATH": str(Path(__file__).parents[1])})
    with tempfile.TemporaryDirectory(prefix="nanollm-compare-") as directory:
        path = Path(directory) / "job.json"
        path.write_text(json.dumps(asdict(job)))
        command = [python or sys.executable, __file__, "--job", str(path)]
        signal.signal(
            signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
        )  # so that the process ends with this one
        process = subprocess.Popen(command, stdout=sys.stderr, env=env, start_new_session=True)
        try:
            code = process.wait()
        finally:
            with suppress(ProcessLookupError):  # engines may leave processes behind, which hold the GPU's memory
                os.killpg(process.pid, signal.SIGKILL)
        if code:
            return {"engine": job.engine, "error": f"exit code {code}; what it printed says why"}
        return json.loads(path.with_suffix(".result").read_text())


def main() -> None:
    parser = parser_of(__doc__, png="speeds relative to ours")
    parser.add_argument("--model", help=MODEL_HELP)
    parser.add_argument("--engines", nargs="+", choices=[*ENGINES][1:], help="beside ours (default: all there are)")
    parser.add_argument("--python", nargs="+", default=[], metavar="ENGINE=PATH", help="interpreters that have them")
    parser.add_argument("--tp", type=positive, default=1, help="number of ranks (default: %(default)s)")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt-len", type=positive, default=512)
    parser.add_argument("--output-len", type=at_least(2), default=257)
    parser.add_argument("--num-prompts", type=positive, default=256, help="of workload W")
    parser.add_argument("--max-len", type=positive, default=1024, help="longest prompt and output of workload W")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)  # in the process of an engine
    args = parser.parse_args()
    if args.job:
        result = measure(Job(**json.loads(args.job.read_text())))
        args.job.with_suffix(".result").write_text(json.dumps(result))
        return
    pythons = dict(given.partition("=")[::2] for given in args.python)
    if unknown := set(pythons) - set(ENGINES):
        parser.error(f"--python takes ENGINE=PATH, with an engine of {', '.join(ENGINES)}; got {', '.join(unknown)}")
    if wrong := [path for path in pythons.values() if shutil.which(path) is None]:
        parser.error(f"--python: there is no interpreter {', '.join(wrong)}")
    found = [engine for engine in [*ENGINES][1:] if engine in pythons or find_spec(engine)]
    if missing := set(args.engines or ()) - set(found):
        parser.error(f"{', '.join(missing)} is not installed here: install it, or give --python {min(missing)}=PATH")
    with tempfile.TemporaryDirectory(prefix="nanollm-compare-") as directory:
        job = job_for_ours(args, Path(directory))
        results = []
        for engine in ["nanollm", *(args.engines or found)]:
            print(f"running {engine} …", file=sys.stderr)
            results.append(run(Job(**asdict(job) | {"engine": engine}), pythons.get(engine)))
            if "error" in results[0]:
                sys.exit("our own engine failed, so there is nothing to compare with")
            if args.json:  # each time, since the next may take long and fail
                args.json.write_text(json.dumps({"job": asdict(job), "results": results}, indent=2) + "\n")
    title = f"{args.model or Path(job.model).name}, tp {args.tp}"
    report(results, title)
    if args.png:
        draw(args.png, results, title)


def job_for_ours(args: argparse.Namespace, directory: Path) -> Job:
    """The work. directory: gets the config.json of a named shape, which other engines don't know."""
    from nanollm.models.source import resolve_model

    model = args.model or default_model_here()
    how = load_format(model)
    source, dummy = resolve_model(model, load_format=how), how == "dummy"
    if dummy:
        (directory / "config.json").write_text(json.dumps(source.hf_config | {"model_type": "qwen3"}))
    longest = max(2 * args.max_len, args.prompt_len + args.output_len)
    return Job(
        engine="nanollm",
        model=str(directory if dummy else source.path),
        dummy=dummy,
        vocab_size=source.config.vocab_size,
        max_model_len=min(longest, source.config.max_position),
        tp=args.tp,
        num_prompts=args.num_prompts,
        max_len=args.max_len,
        batch=args.batch,
        prompt_len=args.prompt_len,
        output_len=args.output_len,
        repeats=args.repeats,
    )


def gains(result: dict[str, Any], ours: dict[str, Any]) -> list[float]:
    """How many times as fast as this engine ours is: W, then each batch size."""
    tpot = [theirs / own for theirs, own in zip(result["tpot_ms"].values(), ours["tpot_ms"].values(), strict=True)]
    return [ours["tokens_per_second"] / result["tokens_per_second"], *tpot]


def report(results: list[dict[str, Any]], title: str) -> None:
    ours = results[0]
    print(f"{title}; in parentheses how many times as fast nanollm is")
    batches = "".join(f"{f'TPOT ms, {batch}':>20}" for batch in ours["tpot_ms"])
    print(f"{'engine':<24}{'start-up s':>10}{'W, tokens/s':>22}{batches}")
    for result in results:
        if "error" in result:
            print(f"{result['engine']:<24}{result['error']}")
            continue
        values = [f"{result['tokens_per_second']:,.0f}", *(f"{tpot:.3f}" for tpot in result["tpot_ms"].values())]
        cells = [f"{value} ({gain:.2f}×)" for value, gain in zip(values, gains(result, ours), strict=True)]
        name = f"{result['engine']} {result['version']}"
        print(f"{name:<24}{result['startup_s']:10.1f}{cells[0]:>22}" + "".join(f"{cell:>20}" for cell in cells[1:]))


def draw(path: Path, results: list[dict[str, Any]], title: str) -> None:
    """A group of bars for each measure: the speed of every engine, ours being 1, labelled with what was measured."""
    plt = pyplot()
    measured = [result for result in results if "error" not in result]
    groups = ["W, tokens/s", *(f"TPOT, batch {batch}, ms" for batch in results[0]["tpot_ms"])]
    width = 0.8 / len(measured)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for i, result in enumerate(measured):
        speeds = [1 / gain for gain in gains(result, results[0])]
        name = f"{result['engine']} {result['version']}"
        bars = axes.bar([group + i * width for group in range(len(groups))], speeds, width, label=name)
        values = [f"{result['tokens_per_second']:,.0f}", *(f"{ms:.3g}" for ms in result["tpot_ms"].values())]
        axes.bar_label(bars, values)
    axes.set_xticks([group + 0.4 - width / 2 for group in range(len(groups))], groups)
    axes.set(ylabel="speed, nanollm = 1: higher is faster", title=title)
    axes.margins(y=0.1)
    figure.legend(loc="outside lower center", ncols=len(measured))
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(exit_code(main))
