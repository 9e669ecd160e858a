"""The command line: `nanollm generate | chat | serve | bench | env`."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence

import nanollm
from nanollm.commands import bench, chat, env, generate, serve
from nanollm.commands.flags import default_model

__all__ = ["build_parser", "default_model", "exit_code", "main"]

COMMANDS = {
    "generate": (generate, "generate text from prompts, or from a batch file"),
    "chat": (chat, "talk to a model in the terminal"),
    "serve": (serve, "serve a model over HTTP, as OpenAI's API"),
    "bench": (bench, "run a benchmark"),
    "env": (env, "print what a bug report needs"),
}


def build_parser() -> argparse.ArgumentParser:
    """All commands with their flags."""
    parser = argparse.ArgumentParser(prog="nanollm", description="A small tensor-parallel LLM inference engine.")
    parser.add_argument("--version", action="version", version=nanollm.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (command, summary) in COMMANDS.items():
        command_parser = commands.add_parser(name, help=summary, description=summary)
        command_parser.set_defaults(run=command.run)
        command.add_flags(command_parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("nanollm").setLevel(logging.INFO)
    logging.getLogger("huggingface_hub").propagate = False  # it prints its warnings itself
    return exit_code(lambda: args.run(args))


def exit_code(run: Callable[[], int | None]) -> int:
    """What it returns, or 0. What the user can mend is one line on stderr and exit code 2."""
    try:
        return run() or 0
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
