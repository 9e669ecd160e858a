"""The KV cache's tensor."""

from typing import Any

import psutil
import pytest
import torch

from nanollm.config import NAMED_SHAPES, EngineConfig, ModelConfig
from nanollm.distributed.partition import HeadPartition
from nanollm.runtime.host_memory import HostMemory
from nanollm.runtime.kv_cache import allocate_kv_cache, available_cpu_bytes, block_bytes, num_kv_blocks

CONFIG = ModelConfig.from_hf(NAMED_SHAPES["qwen3-0.6b"])
HEADS = HeadPartition(CONFIG.num_heads, CONFIG.num_kv_heads, tp=1, rank=0)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_zero_aligned_and_as_large_as_its_blocks(dtype: torch.dtype) -> None:
    cache = allocate_kv_cache(3, 16, CONFIG, HEADS, dtype, CPU)
    assert cache.shape == (28, 2, 3, 16, 8, 128)
    assert cache.dtype == dtype and cache.is_contiguous() and cache.data_ptr() % 64 == 0
    assert cache.nbytes == 3 * block_bytes(CONFIG, HEADS, 16, dtype)
    assert not cache.any()


def test_a_large_cache_on_the_cpu_takes_no_memory_before_it_is_used() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = allocate_kv_cache(1000, 16, CONFIG, HEADS, torch.float32, CPU)
    assert cache.nbytes > 3 * 2**30
    assert process.memory_info().rss - before < 2**27


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_kv_blocks": 101}, "num_kv_blocks 101 takes 1.0 GiB on each rank, and there are 1.0 GiB"),
        ({"kv_cache_memory_bytes": 2**49}, "kv_cache_memory_bytes 562949953421312 takes 524288.0 GiB"),
        ({"kv_cache_memory_bytes": 5}, "0 MiB left, one block of 16 tokens takes 10.24 MiB"),
    ],
)
def test_a_size_that_cannot_be_is_refused_with_the_numbers(given: dict[str, int], message: str) -> None:
    block, config = 2**30 // 100, EngineConfig("m", **given)
    assert num_kv_blocks(EngineConfig("m", num_kv_blocks=100), block, 4096, 2**30) == 100
    with pytest.raises(ValueError, match=message):
        num_kv_blocks(config, block, 4096, 2**30)


def test_on_the_cpu_a_size_that_is_given_may_take_the_whole_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_cpu_bytes(EngineConfig("m"), 2) == 2 * 2**30
    total = psutil.virtual_memory().total
    assert available_cpu_bytes(EngineConfig("m", num_kv_blocks=1), 2) == pytest.approx(total / 2, rel=0.01)
    monkeypatch.setattr("nanollm.runtime.kv_cache.host_memory", lambda: HostMemory(2**40, 2**30, 2**29))
    assert available_cpu_bytes(EngineConfig("m", num_kv_blocks=1), 2) == 2**29


def test_weights_that_memory_cannot_hold_are_refused_before_they_are_loaded(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny("qwen3").llm() as llm:
        weights = sum(parameter.nbytes for parameter in llm._executor.runner.model.parameters())
    monkeypatch.setattr("nanollm.runtime.model_runner.host_memory", lambda: HostMemory(2**40, None, weights))
    tiny("qwen3").llm().close()
    monkeypatch.setattr("nanollm.runtime.model_runner.host_memory", lambda: HostMemory(2**40, None, weights - 1))
    with pytest.raises(ValueError, match=r"weights take .* GiB, and .* of memory are free: take a smaller model"):
        tiny("qwen3").llm()
