"""`nanollm chat`: a conversation in the terminal."""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from nanollm.commands.flags import MODEL_HELP, add_engine_flags, check_one_process, default_model, engine_args
from nanollm.commands.generate import timing_line

if TYPE_CHECKING:
    from nanollm.llm import LLM
    from nanollm.sampling_params import SamplingParams

_NO_STATS = "no answer yet"
HELP = """\
/reset          forget the conversation
/system TEXT    set the system message; without TEXT there is none
/stats          time and tokens of the last answer, and how full the context is
/help           this text
/exit           leave, as Ctrl-D does
Ctrl-C stops an answer."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Those of the conversation, then all of EngineConfig."""
    parser.add_argument("model", nargs="?", help=MODEL_HELP)
    parser.add_argument("--system", help="system message")
    parser.add_argument("--max-tokens", type=int, help="most tokens per answer; default: what the context has room for")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default: %(default)s)")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Answer line after line until the input ends. 1 if that is no terminal, and a line got no answer."""
    from nanollm.llm import LLM

    check_one_process("chat")
    if sys.stdin is None:
        raise ValueError("chat reads lines from its standard input, which is closed")
    with LLM(args.model or default_model(), **engine_args(args)) as llm:
        params = replace(llm.get_default_sampling_params(), temperature=args.temperature, max_tokens=args.max_tokens)
        chat = Chat(llm, params, args.system)
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            with suppress(ImportError):
                import readline  # noqa: F401  (its import gives input() editing and a history)
            print("/help lists the commands, Ctrl-D leaves.")
        while True:
            try:
                line = input(">>> " if is_terminal else "").strip()
                if line == "/exit":
                    break
                if line:
                    chat.take(line)
            except EOFError:
                break
            except KeyboardInterrupt:
                if not is_terminal:
                    raise
                print("\nCtrl-D leaves.")
        return int(chat.failed and not is_terminal)


class Chat:
    """The conversation so far. ValueError if the model has no chat template."""

    def __init__(self, llm: "LLM", params: "SamplingParams", system: str | None) -> None:
        self._llm, self._params, self._system = llm, params, system
        self._history: list[dict[str, str]] = []
        self._stats = _NO_STATS
        self.failed = False  # to answer any line
        llm.chat_prompt([{"role": "user", "content": ""}])

    def take(self, line: str) -> None:
        """A command, or what to answer."""
        command, _, rest = line.partition(" ")
        if command == "/reset":
            self._history.clear()
            self._stats = _NO_STATS
        elif command == "/system":
            self._system = rest.strip() or None
        elif command == "/stats":
            print(self._stats)
        elif command == "/help":
            print(HELP)
        elif command.startswith("/") and command[1:].isalpha():
            print(f"There is no command {command}: /help lists them.")
            self.failed = True
        else:
            try:
                self._answer({"role": "user", "content": line})
            except ValueError as error:  # the conversation may have outgrown the context
                print(f"error: {error}; /reset forgets the conversation", file=sys.stderr)
                self.failed = True

    def _answer(self, question: dict[str, str]) -> None:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        prompt = self._llm.chat_prompt([*system, *self._history, question])
        output, num_printed = None, 0
        with _presses_of_ctrl_c() as presses, suppress(KeyboardInterrupt):
            for output in self._llm.generate_stream([prompt], self._params):
                text = output.outputs[0].text
                print(text[num_printed:], end="", flush=True)
                num_printed = max(num_printed, len(text))
                if presses:
                    break  # which closes the stream, and so takes the request out of the engine
        print(flush=True)
        if output is not None:
            if output.outputs[0].finish_reason == "error":
                raise ValueError(output.outputs[0].stop_reason)
            self._history += [question, {"role": "assistant", "content": output.outputs[0].text}]
            num_tokens = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
            self._stats = (
                f"{timing_line([output])}; context: {num_tokens} of {self._llm.max_model_len} tokens, of which "
                f"{output.num_cached_tokens} came from the prefix cache"
            )


@contextmanager
def _presses_of_ctrl_c() -> Iterator[list[int]]:
    """Presses are counted; from the second on they also raise KeyboardInterrupt, in case a step takes long."""
    presses: list[int] = []

    def press(number: int, frame: object) -> None:
        presses.append(number)
        if len(presses) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, press)
    try:
        yield presses
    finally:
        signal.signal(signal.SIGINT, before)
