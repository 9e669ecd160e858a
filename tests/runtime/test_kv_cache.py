"""The KV cache's tensor."""

import psutil
import pytest
import torch

from nanollm.config import NAMED_SHAPES, ModelConfig
from nanollm.distributed.partition import HeadPartition
from nanollm.runtime.kv_cache import allocate_kv_cache, block_bytes

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
