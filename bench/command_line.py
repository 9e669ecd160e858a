"""What the command lines of all benchmarks have in common."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL_HELP = "as for throughput.py (default: qwen3-0.6b on a GPU, SmolLM2-135M on a CPU)"


def parser_of(doc: str | None, *, png: str | None = None) -> argparse.ArgumentParser:
    """A parser with --json and, if there is something to draw, --png. doc: of the benchmark's file. png: what it shows.

    A file that can't be written is refused before anything is measured.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the result")
    if png is not None:
        parser.add_argument("--png", type=output_file, metavar="FILE", help=f"draw {png}")
    return parser


def output_file(text: str) -> Path:
    """A path in a folder that there is."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder: name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}: make it first")
    return path


def at_least(least: int) -> Callable[[str], int]:
    """The type of whole numbers from this one on."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return int(text)

    return number


positive = at_least(1)


def positive_float(text: str) -> float:
    """The type of numbers above 0; inf is one."""
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return float(text)


def pyplot() -> Any:
    """matplotlib.pyplot for files: it needs no screen."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
