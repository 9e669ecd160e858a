"""bench/tp_scaling.py runs as a reader would run it, and its predictions are sums that can be checked by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
SMALL = ("--batch", 1, 3, "--prompt-len", 6, "--output-len", 5, "--long-prompt-len", 40, "--num-prompts", 3)


def call(tmp_path: Path, *arguments: object) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "CUDA_VISIBLE_DEVICES": ""}
    files = ("--json", tmp_path / "result.json", "--png", tmp_path / "result.png")
    command = [sys.executable, ROOT / "bench" / "tp_scaling.py", *SMALL, "--max-len", 8, *files, *arguments]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, env=env)


def run(tmp_path: Path, *arguments: object) -> tuple[str, dict[str, Any]]:
    result = call(tmp_path, *arguments)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    return result.stdout, json.loads((tmp_path / "result.json").read_text())


def test_one_and_two_ranks_with_speed_ups(tiny: Any, tmp_path: Path) -> None:
    printed, found = run(tmp_path, "--model", tiny("qwen3").path, "--tp", 1, 2)
    one, two = found["runs"]
    assert (one["tp"], two["tp"]) == (1, 2) and one["workload_tokens"] == two["workload_tokens"] == 24
    assert [row["batch"] for row in two["rows"]] == [1, 3]
    gain = one["rows"][1]["tpot_ms"] / two["rows"][1]["tpot_ms"]
    assert f"{gain:.2f}" in next(line for line in printed.splitlines() if line.startswith("   2") and "batch 3" in line)
    assert one["rows"][0]["tpot_floor_ms"] == pytest.approx(2 * two["rows"][0]["tpot_floor_ms"], rel=1e-6)


def test_a_prediction_is_floor_and_overhead_and_all_reduces(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "all_reduce.json").write_text(
        json.dumps(
            {
                "ranks": 2,
                "microseconds": {
                    "128": {"fused one-shot": 5.0, "fused two-shot": 9.0},
                    "256": {"fused one-shot": 9.0, "fused two-shot": 7.0},
                },
            }
        )
    )
    arguments = ("--predict", "--all-reduce", tmp_path / "all_reduce.json")
    _, found = run(tmp_path, "--model", tiny("qwen3").path, *arguments)
    one, *others = found["runs"]
    assert [other["tp"] for other in others] == [2, 4, 8]
    overhead = one["rows"][0]["tpot_ms"] - one["rows"][0]["tpot_floor_ms"]
    # 2 layers, 64 float32 numbers a token: 5 all-reduces of 256 bytes, measured so; the choice is 8 bytes.
    expected = one["rows"][0]["tpot_floor_ms"] / 2 + overhead + (5 * 7.0 + 5.0) / 1000
    assert others[0]["rows"][0]["tpot_ms"] == pytest.approx(expected, rel=1e-6)
    # Four ranks send one and a half times the bytes: 384, beyond what was measured, so in proportion.
    expected = one["rows"][0]["tpot_floor_ms"] / 4 + overhead + (5 * 7.0 * 1.5 + 5.0) / 1000
    assert others[1]["rows"][0]["tpot_ms"] == pytest.approx(expected, rel=1e-6)


def test_runs_measured_apart_are_put_together(tiny: Any, tmp_path: Path) -> None:
    path, apart = tiny("qwen3").path, []
    for tp in (1, 2):
        _, found = run(tmp_path, "--model", path, "--tp", tp, "--num-prompts", 3 * (tp == 1))
        apart.append(tmp_path / f"{tp}.json")
        apart[-1].write_text(json.dumps(found))
    printed, together = run(tmp_path, "--model", path, "--runs", *apart, "--predict")
    assert together["runs"][:2] == [json.loads(file.read_text())["runs"][0] for file in apart]
    assert printed.count("workload W") == 4  # tp 2 was measured without
    assert printed.count("(predicted) TPOT, batch 3") == 3
    refused = call(tmp_path, "--model", path, "--runs", *apart, "--prompt-len", 7)
    assert "--runs were measured with prompt_len 6, this call has 7" in refused.stderr
    refused = call(tmp_path, "--model", path, "--runs", tmp_path / "nothing.json")
    assert "--runs: no such file" in refused.stderr
    refused = call(tmp_path, "--model", path, "--runs", apart[1], "--predict")
    assert "--predict starts from a run of one GPU" in refused.stderr
