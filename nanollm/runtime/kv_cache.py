"""How many KV blocks there may be, and the tensor that holds them."""

import math

import numpy as np
import torch
from torch import Tensor

from nanollm.config import EngineConfig, ModelConfig
from nanollm.distributed.partition import HeadPartition
from nanollm.runtime.host_memory import host_memory

CPU_CACHE_BYTES = 4 * 2**30  # takes memory only as it is used


def block_bytes(config: ModelConfig, heads: HeadPartition, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block on this rank: k and v of every layer."""
    return config.num_layers * 2 * block_size * len(heads.kv_heads) * config.head_dim * dtype.itemsize


def num_kv_blocks(config: EngineConfig, bytes_per_block: int, max_model_len: int, available_bytes: int) -> int:
    """Blocks to allocate: what the user said, or what fits `available_bytes` as far as it is of use.

    ValueError, with the numbers and the flags to change, if that is not even one block, or doesn't fit.
    """
    assert config.block_size is not None
    name = "kv_cache_memory_bytes" if config.num_kv_blocks is None else "num_kv_blocks"
    given = config.kv_cache_memory_bytes if config.num_kv_blocks is None else config.num_kv_blocks * bytes_per_block
    if given is not None and given > available_bytes:
        raise ValueError(
            f"no room for the KV cache: {name} {getattr(config, name)} takes {given / 2**30:.1f} GiB on each rank, and "
            f"there are {max(available_bytes, 0) / 2**30:.1f} GiB: lower {name}, or give none of the two"
        )
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    budget = available_bytes if given is None else given
    if budget < bytes_per_block:
        raise ValueError(
            f"no room for the KV cache: {max(budget, 0) / 2**20:.0f} MiB left, one block of {config.block_size} tokens "
            f"takes {bytes_per_block / 2**20:.2f} MiB: free memory, raise gpu_memory_utilization (now "
            f"{config.gpu_memory_utilization}) or kv_cache_memory_bytes, or lower block_size"
        )
    if given is not None:
        return min(budget // bytes_per_block, 2**31 - 1)  # ids are int32
    # A tiny model could have millions: enough for every row at its longest, and for prefixes worth keeping.
    return min(budget // bytes_per_block, max(config.max_num_seqs, 256) * -(-max_model_len // config.block_size))


def available_cpu_bytes(config: EngineConfig, num_sharing: int) -> int:
    """4 GiB; where the user gives the size, all of this host's or container's memory; of which each of so many ranks
    takes its part."""
    memory = host_memory()
    most = min(memory.total, memory.limit or memory.total) if config.gives_kv_cache_size else CPU_CACHE_BYTES
    return most // num_sharing


def available_gpu_bytes(config: EngineConfig, device: torch.device, num_sharing: int) -> int:
    """What is left for the KV cache, everything else being allocated or having peaked: of gpu_memory_utilization, or
    where the user gives the size of the whole GPU.

    num_sharing: ranks on this GPU, of which each takes its part.
    """
    utilization = 1.0 if config.gives_kv_cache_size else config.gpu_memory_utilization
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    # What PyTorch holds but doesn't use now counts as free, up to the peak that a step needs beside the cache.
    spare = stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.peak"]
    return (int(total * utilization) - (total - free)) // num_sharing + max(spare, 0)


def allocate_kv_cache(
    num_blocks: int,
    block_size: int,
    config: ModelConfig,
    heads: HeadPartition,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """[layers, 2 (k, v), blocks, block_size, K_r, H]. Zeros, so that masked reads of unused slots are finite."""
    shape = (config.num_layers, 2, num_blocks, block_size, len(heads.kv_heads), config.head_dim)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy's zeros take memory when they are first written, so a large cache costs a small prompt neither memory nor
    # the seconds that filling it takes. Cache lines start at multiples of 64 bytes.
    size = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(size + 63, np.uint8))
    start = -memory.data_ptr() % 64
    return memory[start : start + size].view(dtype).view(shape)
