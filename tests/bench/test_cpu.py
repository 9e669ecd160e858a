"""bench/cpu.py runs as a reader would run it. What it measures is no test's business: machines are noisy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def test_it_reports_both_engines_and_16_prompts_at_once(smollm2_path: Path, tmp_path: Path) -> None:
    flags = ("--rounds", "1", "--tokens", "3", "--threads", "1", "--json", tmp_path / "result.json")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, ROOT / "bench" / "cpu.py", *flags]
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    assert result.returncode in (0, 1), result.stderr  # 1: not as fast as it should be
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["faster"] == pytest.approx(found["seconds"]["theirs"] / found["seconds"]["one"])
    assert found["gain"] == pytest.approx(16 * found["seconds"]["one"] / found["seconds"]["many"])
    assert 0 < found["floors"]["one"] <= found["floors"]["many"]
    assert "16 prompts at once" in result.stdout
    passes = found["faster"] >= 1 and found["gain"] >= 4
    assert result.returncode == (0 if passes else 1)
