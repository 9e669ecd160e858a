"""`nanollm bench` and `nanollm env`."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nanollm
from nanollm.cli import main
from nanollm.commands import bench, env

ROOT = Path(__file__).parents[2]


def test_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert "throughput" in names and "floor" not in names  # which others import
    assert all((ROOT / "bench" / f"{name}.py").is_file() for name in names)
    assert all(len(line.split()) > 3 for line in lines)


def test_an_unknown_benchmark_names_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "troughput"]) == 2
    assert "there is no benchmark 'troughput'; there are all_reduce, compare," in capsys.readouterr().err


def test_a_benchmark_gets_its_arguments() -> None:
    command = [sys.executable, "-m", "nanollm.cli", "bench", "host", "--batch", "2", "--steps", "3"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    result = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "schedule" in result.stdout


def test_an_installed_package_says_where_benchmarks_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "BENCH", tmp_path / "bench")
    assert main(["bench", "throughput"]) == 2
    assert "clone the repository" in capsys.readouterr().err


def test_env_has_the_facts_and_no_secret(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    monkeypatch.setenv("NANOLLM_API_KEY", "abc")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:abc@hub.example/x")
    monkeypatch.setenv("UNRELATED", "abc")
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert f"nanollm: {nanollm.__version__}" in shown and f"Python: {platform.python_version()}" in shown
    for line in (
        "NCCL_DEBUG=WARN",
        "HF_TOKEN=(set)",
        "NANOLLM_API_KEY=(set)",
        "HF_ENDPOINT=https://(set)@hub.example/x",
    ):
        assert f"\n  {line}\n" in f"{shown}\n"
    assert "abc" not in shown.replace(str(ROOT), "")


def test_env_goes_on_after_what_can_not_be_found_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> str:
        raise ImportError("libcuda.so.1: no such file\nand more")

    monkeypatch.setitem(env.FACTS, "PyTorch", broken)
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert "\nPyTorch: unknown (ImportError: libcuda.so.1: no such file\n" in shown
    assert "\nenvironment:" in shown


def test_env_names_every_package_that_is_needed() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert listed is not None
    assert {*re.findall(r'^    "(\w+)', listed[1], re.MULTILINE), "xgrammar"} <= set(env.PACKAGES)
