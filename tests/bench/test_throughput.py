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


def test_a_bad_number_of_prompts_is_refused_before_a_model_loads() -> None:
    result = run(ROOT / "bench" / "throughput.py", "--num-prompts", 0)
    assert result.returncode == 2
    assert "--num-prompts" in result.stderr
