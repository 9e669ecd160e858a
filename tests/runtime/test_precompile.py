"""Start-up compiles, in parallel and without running anything, what steps will launch; no GPU is needed to see that."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.6")

NOT_COMPILED = """
import json, os, threading, time
from contextlib import suppress
import torch, triton
from nanollm.kernels.precompile import compiling_in_parallel, launching_nothing
from nanollm.kernels.rms_norm import rms_norm
from tests.runtime import precompile_program as program

def compile_late(src, **options):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.1)  # the others have to wait
        raise OSError("no space left on device")
    return program.Kernel(src, **options)

program.pretend()
triton.compiler.compile = compile_late
os.sched_getaffinity = lambda process: {0}
for fails, sizes in ((False, (64, 128)), (True, (256, 512, 1024))):
    inputs = [torch.ones(2, size, dtype=torch.bfloat16) for size in sizes]
    with suppress(KeyError), compiling_in_parallel(torch.device("cuda", 0), 1):
        with launching_nothing():
            for x in inputs:
                rms_norm(x, x[0], 1e-6)
        if fails:
            raise KeyError
    for x in inputs:
        rms_norm(x, x[0], 1e-6)
print(json.dumps([program.early, program.late, program.launched]))
"""


def run(cache: Path, *program: str) -> list[list[str]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, *program],
        cwd=Path(__file__).parents[2],
        env=env | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-5_000:]
    return json.loads(process.stdout)


def test_what_was_not_compiled_in_parallel_is_when_it_is_launched(tmp_path: Path) -> None:
    once_each = ["_rms_norm_kernel"] * 5
    assert run(tmp_path, "-c", NOT_COMPILED) == [[], once_each, once_each]


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("qwen3-0.6b", "40 2400 64 60_000_000"),
        ("qwen3-0.6b", "40 100 64 16_000_000"),
        ("qwen3-0.6b", "40 12 16 16_000_000"),
        ("qwen3-0.6b", "256 8192 128 16_000_000"),
        ("qwen3-30b-a3b", "40 2400 64 60_000_000"),
    ],
)
def test_steps_launch_nothing_that_start_up_did_not_compile(tmp_path: Path, model: str, sizes: str) -> None:
    program = ("-m", "tests.runtime.precompile_program", model, *sizes.split())
    compiled, launched_meanwhile, compiled_late, launched = run(tmp_path, *program)
    assert launched_meanwhile == compiled_late == []
    assert set(compiled) == set(launched) != set()
