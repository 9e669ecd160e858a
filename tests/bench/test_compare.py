"""bench/compare.py runs as a reader would run it, with transformers as the only other engine."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_throughput import ROOT, run

SMALL = ("--batch", 1, 2, "--prompt-len", 6, "--output-len", 5, "--num-prompts", 3, "--max-len", 8, "--repeats", 1)


def test_transformers_does_the_same_work(tiny: Any, tmp_path: Path) -> None:
    files = ("--json", tmp_path / "result.json", "--png", tmp_path / "result.png")
    arguments = ("--model", tiny("qwen3").path, "--engines", "transformers", *SMALL, *files)
    result = run(ROOT / "bench" / "compare.py", *arguments)
    assert result.returncode == 0, result.stderr
    ours, theirs = json.loads((tmp_path / "result.json").read_text())["results"]
    assert (ours["engine"], theirs["engine"]) == ("nanollm", "transformers")
    line = next(line for line in result.stdout.splitlines() if line.startswith("transformers"))
    assert f"({ours['tokens_per_second'] / theirs['tokens_per_second']:.2f}×)" in line
    for batch in ("1", "2"):
        assert f"{theirs['tpot_ms'][batch]:.3f} ({theirs['tpot_ms'][batch] / ours['tpot_ms'][batch]:.2f}×)" in line
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")


def test_an_engine_that_fails_leaves_the_others_their_results(tiny: Any, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no GPU >&2\nexit 3\n")
    python.chmod(0o755)
    arguments = ("--model", tiny("qwen3").path, "--engines", "vllm", "--python", f"vllm={python}", *SMALL)
    result = run(ROOT / "bench" / "compare.py", *arguments)
    assert result.returncode == 0, result.stderr
    assert "no GPU" in result.stderr
    assert "exit code 3" in next(line for line in result.stdout.splitlines() if line.startswith("vllm"))
    assert "(1.00×)" in next(line for line in result.stdout.splitlines() if line.startswith("nanollm"))


def test_another_interpreter_needs_nothing_of_ours(tiny: Any, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without any installed package
    python.chmod(0o755)
    arguments = ("--model", tiny("qwen3").path, "--engines", "vllm", "--python", f"vllm={python}", *SMALL)
    assert "No module named 'vllm'" in run(ROOT / "bench" / "compare.py", *arguments).stderr


@pytest.mark.parametrize(
    ("flags", "said"), [(("--engines", "sglang"), "not installed"), (("--output-len", 1), "--output-len")]
)
def test_what_can_not_be_measured_is_refused_before_a_model_loads(flags: tuple[object, ...], said: str) -> None:
    result = run(ROOT / "bench" / "compare.py", *flags)
    assert result.returncode == 2
    assert said in result.stderr
