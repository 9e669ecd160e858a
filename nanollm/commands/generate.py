"""`nanollm generate`: prompts from the command line, or a batch file of them."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanollm.commands.flags import MODEL_HELP, add_engine_flags, check_one_process, default_model, engine_args

if TYPE_CHECKING:
    from nanollm.llm import LLM
    from nanollm.outputs import RequestOutput

DEFAULT_PROMPT = "Explain how rain forms in three sentences."
# Of prompts on the command line; each line of a batch file brings its own, or takes the server's.
SAMPLING = {"max_tokens": 256, "temperature": 0.7, "seed": 0}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Those of a batch, those of prompts, and the engine's."""
    parser.add_argument("prompts", nargs="*", metavar="prompt", help=f"default: {DEFAULT_PROMPT}")
    parser.add_argument("--model", help=MODEL_HELP)
    parser.add_argument("--max-tokens", type=int, help=f"most tokens per answer (default: {SAMPLING['max_tokens']})")
    parser.add_argument("--temperature", type=float, help=f"0 is greedy (default: {SAMPLING['temperature']})")
    parser.add_argument("--seed", type=int, help=f"of the sampling (default: {SAMPLING['seed']})")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument("--system", help="system message of the chat")
    batch = parser.add_argument_group("batch", "requests from a file in OpenAI's batch format, in place of prompts")
    batch.add_argument("--input", type=Path, metavar="FILE", help="the requests, one a line")
    batch.add_argument("--output", type=Path, metavar="FILE", help="where answers go; what it answers is not run again")
    batch.add_argument("--served-model-name", metavar="NAME", help="the requests' model; default: as it is called here")
    add_engine_flags(parser, without=("seed",))


def run(args: argparse.Namespace) -> int:
    """One or the other."""
    if args.input is None and args.output is None and args.served_model_name is None:
        return _run_prompts(args)
    if args.input is None or args.output is None:
        raise ValueError("--input and --output belong together: give both for a batch, or leave both out")
    for name in ("prompts", *SAMPLING, "raw", "system"):
        value = getattr(args, name)
        if value is not None and value is not False and value != []:
            raise ValueError(f"{name} can't be given with --input: the lines of the file say it")
    check_one_process("generate --input")
    from nanollm.server.batch import run_batch

    model = args.model or default_model()
    name = args.served_model_name or args.model or Path(model).name
    return run_batch(model, engine_args(args), args.input, args.output, name)


def _run_prompts(args: argparse.Namespace) -> int:
    """Stream one answer, or print several in input order as they finish; a line of timings goes to stderr."""
    from nanollm.llm import LLM
    from nanollm.sampling_params import SamplingParams

    if args.raw and args.system is not None:
        raise ValueError("--system belongs to a chat, and --raw asks for none: leave one of them out")
    given = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    params = SamplingParams(**SAMPLING | given)
    questions = args.prompts or [DEFAULT_PROMPT]
    printer = AnswerPrinter(questions)
    exit_code = 0
    with LLM(args.model or default_model(), **engine_args(args)) as llm:
        prompts = questions if args.raw else [as_chat(llm, question, args.system) for question in questions]
        try:
            for output in llm.generate_stream(prompts, params):
                printer.update(output)
        except KeyboardInterrupt:
            exit_code = 130
        printer.finish()
        for index, output in sorted(printer.latest.items()):
            if (completion := output.outputs[0]).finish_reason == "error":
                print(f"error: prompt {index}: {completion.stop_reason}", file=sys.stderr)
                exit_code = exit_code or 1
        print(timing_line(list(printer.latest.values())), file=sys.stderr)
    return exit_code


def as_chat(llm: "LLM", question: str, system: str | None) -> str | dict[str, Any]:
    """The question as a chat's first message; a model without a chat template gets it as it is."""
    if llm.tokenizer is None or llm.tokenizer.chat_template is None:
        return question
    messages = [] if system is None else [{"role": "system", "content": system}]
    return llm.chat_prompt([*messages, {"role": "user", "content": question}])


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
