"""bench/startup.py runs as a reader would run it; its parts are the whole, and nothing heavy is imported in vain."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_throughput import ROOT, run


def test_parts_add_up_and_transformers_is_not_imported(tiny: Any, tmp_path: Path) -> None:
    files = ("--json", tmp_path / "result.json", "--png", tmp_path / "result.png")
    result = run(ROOT / "bench" / "startup.py", "--model", tiny("qwen3").path, "--repeats", 1, "--cold", *files)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["loaded"] == []
    for kind in ("warm", "cold"):
        parts = found["seconds"][kind]
        assert set(parts) > {"imports", "device", "model", "weights", "KV cache", "first token"}
        assert "profile" not in parts  # which CPUs don't need
        assert sum(seconds for part, seconds in parts.items() if part != "total") == pytest.approx(
            parts["total"], abs=0.05
        )
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")


def test_a_start_that_fails_ends_the_bench(tmp_path: Path) -> None:
    result = run(ROOT / "bench" / "startup.py", "--model", tmp_path)
    assert result.returncode == 1
    assert "no config.json" in result.stderr
