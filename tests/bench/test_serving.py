"""bench/serving.py runs as a reader would run it, against our server; its numbers agree with each other."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_throughput import ROOT, run
from tests.server.server_process import ServerProcess


@pytest.fixture(scope="module")
def server(tiny: Any) -> Iterator[ServerProcess]:
    with ServerProcess(
        tiny("qwen3", vocab_size=10_001).path, "--skip-tokenizer-init", "--num-kv-blocks", 128
    ) as server:
        yield server


def measure(
    server: ServerProcess, tmp_path: Path, *arguments: object, answered: bool = True
) -> tuple[str, list[dict[str, Any]]]:
    files = ("--json", tmp_path / "result.json", "--png", tmp_path / "result.png")
    result = run(ROOT / "bench" / "serving.py", "--base-url", server.url, *files, *arguments)
    assert result.returncode == (0 if answered else 1), result.stderr
    assert not answered or (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    return result.stdout, json.loads((tmp_path / "result.json").read_text())["runs"]


def test_two_rates_of_prompts_that_share_prefixes(server: ServerProcess, tmp_path: Path) -> None:
    hits = server.metric("prefix_cache_hits_total")
    lengths = ("--num-requests", 10, "--input-len", 40, "--prefix-len", 32, "--num-prefixes", 2, "--output-len", 6)
    rates = ("--workload", "shared-prefix", "--rate", 20, "inf", "--slo-ttft", 0, "--slo-tpot", 60)
    printed, rows = measure(server, tmp_path, *lengths, *rates)
    assert [row["completed"] for row in rows] == [10, 10] and printed.count("0 failed") == 2
    for row in rows:
        assert row["output_tokens_per_second"] * row["seconds"] == pytest.approx(60)
        assert row["prompt_tokens_per_second"] * row["seconds"] == pytest.approx(400)
        assert row["requests_per_second"] * row["seconds"] == pytest.approx(10)
        assert row["goodput"] == 0  # no token takes no time
        for name in ("ttft", "tpot", "itl", "e2e"):
            values = row[f"{name}_ms"]
            assert 0 <= values["p50"] <= values["p90"] <= values["p99"]
        assert row["ttft_ms"]["p50"] <= row["e2e_ms"]["p50"] < 1e3 * row["seconds"]
    assert rows[0]["seconds"] > rows[1]["seconds"]
    assert server.metric("prefix_cache_hits_total") > hits


def test_a_trace_keeps_its_times(server: ServerProcess, tmp_path: Path) -> None:
    lines = [{"timestamp": 1000 * i, "input_length": 5, "output_length": 2} for i in (0, 1)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    _, (row,) = measure(server, tmp_path, "--workload", "trace", "--trace", tmp_path / "trace.jsonl")
    assert row["completed"] == 2 and 1 < row["seconds"] < 10 and row["goodput"] == row["requests_per_second"]


def test_failures_are_counted_and_named(server: ServerProcess, tmp_path: Path) -> None:
    arguments = ("--workload", "multi-turn", "--turns", 2, "--num-requests", 4, "--concurrency", 2, 3)
    printed, (row,) = measure(
        server, tmp_path, *arguments, answered=False
    )  # text, which a server without a tokenizer refuses
    assert (row["completed"], row["failed"]) == (0, 4)
    assert "400" in row["first_error"] and "needs a tokenizer" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rate", 5, 0), "argument --rate: must be above 0, got 0"),
        (("--rate", "nan"), "argument --rate: must be above 0, got nan"),
        (("--concurrency", 0), "argument --concurrency: must be at least 1, got 0"),
        (("--output-len", 0), "argument --output-len: must be at least 1, got 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused_before_anything_is_asked(flags: tuple[object, ...], message: str) -> None:
    result = run(ROOT / "bench" / "serving.py", "--base-url", "http://nowhere.invalid", *flags)
    assert (result.returncode, result.stderr.splitlines()[-1]) == (2, f"serving.py: error: {message}")
