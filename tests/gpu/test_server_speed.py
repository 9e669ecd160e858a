"""Serving costs little: output tokens per second of 256 streams against those of the offline engine on the same GPU.

The model has random weights in Qwen3-0.6B's shape and Qwen3's tokenizer, so that there is text to stream.
"""

import json
from pathlib import Path

import pytest
import torch

from tests.bench.test_throughput import ROOT, run
from tests.server.server_process import ServerProcess

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MODEL = "qwen3-0.6b"


@pytest.mark.timeout(900)
def test_256_streams_are_nearly_as_fast_as_offline(tmp_path: Path) -> None:
    found = sorted((ROOT / ".cache/qwen3-tokenizer").glob("**/tokenizer.json"))
    if not found:
        pytest.skip("the Qwen3 tokenizer is not in .cache/qwen3-tokenizer: ./launch.sh test puts it there")
    offline = run(ROOT / "bench" / "throughput.py", "--model", MODEL, "--json", tmp_path / "offline.json", device="0")
    assert offline.returncode == 0, offline.stderr
    flags = ("--load-format", "dummy", "--tokenizer", found[0].parent)
    with ServerProcess(MODEL, *flags) as server:
        arguments = ("--base-url", server.url, "--workload", "w", "--concurrency", 256, 256)  # the second one counts
        served = run(ROOT / "bench" / "serving.py", *arguments, "--json", tmp_path / "served.json")
    print(offline.stdout, served.stdout)
    assert served.returncode == 0, served.stderr
    offline_rate = json.loads((tmp_path / "offline.json").read_text())["tokens_per_second"]
    served_rate = json.loads((tmp_path / "served.json").read_text())["runs"][1]["output_tokens_per_second"]
    assert served_rate >= 0.93 * offline_rate
