"""Start-up compiles, in parallel and without running anything, what steps will launch; no GPU is needed to see that."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_steps_launch_nothing_that_start_up_did_not_compile(tmp_path: Path) -> None:
    pytest.importorskip("triton", minversion="3.5")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.runtime.precompile_program"],
        cwd=Path(__file__).parents[2],
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-5_000:]
    compiled, launched_meanwhile, compiled_late, launched = json.loads(run.stdout)
    assert launched_meanwhile == compiled_late == []
    assert set(compiled) == set(launched) != set()
