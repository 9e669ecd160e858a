"""bench/host.py runs without a GPU, and every phase of a step is in it."""

import json
from pathlib import Path

from tests.bench.test_throughput import ROOT, run


def test_phases_add_up(tmp_path: Path, smollm2_path: Path) -> None:
    args = ("--batch", 3, "--steps", 40, "--tokenizer", smollm2_path, "--json", tmp_path / "host.json")
    result = run(ROOT / "bench" / "host.py", *args)
    assert result.returncode == 0, result.stderr
    times = json.loads((tmp_path / "host.json").read_text())["microseconds"]["3"]
    assert all(times[phase] > 0 for phase in ("schedule", "launch", "update", "text"))
    assert times["all"] > max(times[phase] for phase in ("schedule", "launch", "update"))
