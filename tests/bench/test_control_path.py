"""bench/control_path.py runs as a reader would run it, and what it measures is not out of all proportion."""

import json
from pathlib import Path
from typing import Any

from tests.bench.test_throughput import ROOT, run


def test_plans_are_quick_and_idle_ranks_sleep(tiny: Any, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    arguments = ("--rows", 1, 512, "--model", tiny("qwen3").path, "--seconds", 3, "--json", file)
    result = run(ROOT / "bench" / "control_path.py", *arguments)
    assert result.returncode == 0, result.stderr
    found = json.loads(file.read_text())
    # The limits are medians of 20 µs and 60 µs, and 2 % of a core for each rank, which a machine with free cores keeps.
    # These bounds are for one that has none: waking up a process that sleeps, or one that never does, is beyond them.
    for rows in ("1", "512"):
        assert 1 < found["microseconds"][rows]["fastest_tenth"] < 1000
    assert len(found["idle"]) >= 2
    assert max(found["idle"].values()) < 0.15
