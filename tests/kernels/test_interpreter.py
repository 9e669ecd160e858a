"""Every Triton kernel against its definition without a GPU, through Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("selected", ["filters and not filters_of", "filters_of", "not filters"])  # together every test
def test_kernels_under_the_interpreter(selected: str) -> None:
    """In a process of its own: Triton decides at import whether it interprets."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "tests/kernels/interpreted.py", "-k", selected],
        cwd=root,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
