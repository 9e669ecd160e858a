"""After start-up no kernel is compiled: not by prompts of any length, nor by rows with filters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROGRAM = """
import json, random, sys, threading
from triton import knobs
from nanollm import LLM, SamplingParams

compiled = {}  # by thread

def listen(src, **about):
    compiled.setdefault(threading.current_thread().name, []).append(src.name)

knobs.compilation.listener = listen
few = {"num_hidden_layers": 3}
llm = LLM(sys.argv[1], load_format="dummy", hf_overrides=few, max_num_seqs=40, num_kv_blocks=999)
prompts = [[random.randrange(9999) for _ in range(n)] for n in (1, 2, 15, 16, 17, 100, 700, *range(30, 60))]
for top_p in (1.0, 0.9):
    for count in (1, 3, 40):
        llm.generate(prompts[:count], SamplingParams(max_tokens=9, ignore_eos=True, top_p=top_p), use_tqdm=False)
print(json.dumps(compiled))
"""


@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-30b-a3b"])
def test_steps_compile_nothing(model: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, model],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-5_000:]
    compiled = json.loads(run.stdout.splitlines()[-1])
    assert compiled.get("MainThread", []) == []
    assert sum(len(names) for thread, names in compiled.items() if thread.startswith("nanollm-compile")) > 30
