"""bench/latency.py runs as a reader would run it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_throughput import ROOT, run


def test_times_floors_and_their_ratios(tiny: Any, tmp_path: Path) -> None:
    files = ("--json", tmp_path / "result.json", "--png", tmp_path / "result.png")
    sizes = ("--batch", 1, 3, "--prompt-len", 20, "--output-len", 5, "--repeats", 1)
    result = run(ROOT / "bench" / "latency.py", "--model", tiny("qwen3").path, *sizes, *files)
    assert result.returncode == 0, result.stderr
    (model,) = json.loads((tmp_path / "result.json").read_text())["models"]
    assert [row["batch"] for row in model["rows"]] == [1, 3]
    for row in model["rows"]:
        for time in ("ttft", "tpot"):
            assert row[f"{time}_achieved"] == pytest.approx(row[f"{time}_floor_ms"] / row[f"{time}_ms"])
    assert model["rows"][1]["ttft_floor_ms"] > model["rows"][0]["ttft_floor_ms"] > 0
    assert result.stdout.count("TPOT ms") == 1
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")


def test_an_output_of_one_token_is_refused_before_a_model_loads() -> None:
    result = run(ROOT / "bench" / "latency.py", "--output-len", 1)
    assert result.returncode == 2
    assert "--output-len" in result.stderr
