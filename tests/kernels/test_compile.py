"""Every Triton kernel compiles for the GPUs people own and fits their shared memory; no GPU is needed for that."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from nanollm.kernels.histogram import BINS

pytest.importorskip("triton")
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
# head dim, query heads a KV head, block size, where their tiles differ
SHAPES = ["128,4,16", "256,8,64", "80,3,16"]
KERNELS = {
    "_decode_attention_kernel",
    "_prefill_attention_kernel",
    "_rms_norm_kernel",
    "_silu_mul_kernel",
    "_route_kernel",
    "_place_kernel",
    "_gate_up_kernel",
    "_down_kernel",
    "_embedding_kernel",
    "_qkv_to_cache_kernel",
    "_tile_stats_kernel",
    "_threshold_kernel",
    "_draw_kernel",
    "_advance_rows_kernel",
    "_one_row_kernel",
    "_one_row_gate_up_kernel",
    "_one_row_down_kernel",
    "_split_matmul_kernel",
    "_prepare_decode_kernel",
    "_one_shot_kernel",
    "_two_shot_kernel",
    "_best_of_ranks_kernel",
}


def compile_for(capability: int, cache: Path) -> list[tuple[str, int, bool]]:
    """(kernel, bytes of shared memory, whether it waits first) of all, in a process without TRITON_INTERPRET."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled", str(capability), *SHAPES],
        cwd=Path(__file__).parents[2],
        env=env | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-5_000:]
    return [tuple(json.loads(line)) for line in run.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Future[list[tuple[str, int, bool]]]]]:
    with ThreadPoolExecutor(2) as pool:
        cache = tmp_path_factory.mktemp("triton")
        yield {capability: pool.submit(compile_for, capability, cache) for capability in SHARED_KIB}


@pytest.mark.parametrize("capability", SHARED_KIB)
def test_kernels_fit_the_shared_memory(
    compiled: dict[int, Future[list[tuple[str, int, bool]]]], capability: int
) -> None:
    kernels = compiled[capability].result()
    assert {name for name, _, _ in kernels} == KERNELS
    assert [(name, shared) for name, shared, _ in kernels if shared > SHARED_KIB[capability] * 1024] == []
    # Beside the bins, which Triton doesn't know of, and 1 KiB of the driver's: all that a launch has without asking.
    assert max(shared for name, shared, _ in kernels if name == "_tile_stats_kernel") <= 48 * 1024 - 4 * BINS - 1024


def test_nothing_after_the_embedding_starts_before_what_precedes_it_is_complete(
    compiled: dict[int, Future[list[tuple[str, int, bool]]]],
) -> None:
    assert ("_embedding_kernel", True) in {(name, waits_first) for name, _, waits_first in compiled[90].result()}
