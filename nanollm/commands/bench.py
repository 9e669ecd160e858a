"""`nanollm bench`: the scripts of bench/ by name. They are in the repository, not in an installed package."""

import argparse
import ast
import os
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A name, and what the benchmark takes."""
    parser.add_argument("name", nargs="?", help="which; without one they are listed")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own: NAME --help lists them")


def run(args: argparse.Namespace) -> int:
    """Become the benchmark, or list all."""
    found = benchmarks()
    if args.name in found:
        os.execv(sys.executable, [sys.executable, str(BENCH / f"{args.name}.py"), *args.arguments])
    if args.name is not None:
        raise ValueError(f"there is no benchmark {args.name!r}; there are {', '.join(found)}")
    width = max(map(len, found))
    for name, summary in found.items():
        print(f"{name:<{width}}  {summary}")
    return 0


def benchmarks() -> dict[str, str]:
    """Name and first line of each. FileNotFoundError if this is no clone of the repository."""
    sources = {path.stem: path.read_text() for path in sorted(BENCH.glob("*.py"))}
    if not sources:
        raise FileNotFoundError(
            f"the benchmarks are no part of the installed package, and there is no {BENCH}: clone the repository and "
            "run its ./launch.sh bench"
        )
    return {
        name: (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
        for name, source in sources.items()
        if "\ndef main(" in source  # others are modules of theirs
    }
