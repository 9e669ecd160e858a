"""bench/throughput.py runs as a reader would run it, on several ranks either way."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def run(*arguments: object, device: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "CUDA_VISIBLE_DEVICES": device}
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, env=env)


@pytest.mark.parametrize(("launcher", "flags"), [((), ("--tp", 2)), (TORCHRUN, ())])
def test_two_ranks_report_tokens_floor_and_their_ratio(
    tiny: Any, tmp_path: Path, launcher: tuple[str, ...], flags: tuple[str | int, ...]
) -> None:
    files = ("--json", tmp_path / "result.json", "--png", tmp_path / "result.png")
    workload = ("--model", tiny("qwen3").path, "--num-prompts", 3, "--max-len", 8)
    result = run(*launcher, ROOT / "bench" / "throughput.py", *workload, *flags, *files)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["tensor_parallel_size"], found["num_prompts"]) == (2, 3)
    assert (found["prompt_tokens"], found["output_tokens"]) == (24, 24)  # both cut to 8 a request
    assert found["tokens_per_second"] == pytest.approx(24 / found["seconds"], rel=0.01)
    assert found["achieved"] == pytest.approx(found["tokens_per_second"] / found["floor_tokens_per_second"], abs=1e-3)
    assert result.stdout.count("tokens/s, floor ") == 1  # one rank reports
    assert "generating" in result.stderr  # the progress bar
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--num-prompts", 0), "argument --num-prompts: must be at least 1, got 0"),
        (("--json", "no/such/x.json"), "argument --json: there is no folder no/such: make it first"),
        (("--png", "/"), "argument --png: / is a folder: name a file"),
        (("--model", "./nothing"), "error: model './nothing': no such file or directory"),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_is_measured(flags: tuple[object, ...], message: str) -> None:
    result = run(ROOT / "bench" / "throughput.py", *flags)
    assert (result.returncode, result.stderr.splitlines()[-1].removeprefix("throughput.py: error: ")) == (2, message)
    assert "Traceback" not in result.stderr
