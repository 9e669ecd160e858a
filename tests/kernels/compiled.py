"""Compiles for one GPU architecture, without the GPU, what the launchers would launch there; test_compile.py runs it.

`python -m tests.kernels.compiled 90 128,4,16` compiles for compute capability 9.0, attention with head dim 128, 4 query
heads a KV head and blocks of 16 tokens. It prints a line of JSON for each kernel: name, bytes of shared memory, and
whether it waits for the kernel before it, and only then lets the next one start (see backend.overlap).
"""

import dataclasses
import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from nanollm.kernels import (
    advance_rows,
    all_reduce,
    backend,
    decode_attention,
    draw,
    embedding,
    one_row_experts,
    one_row_matmul,
    prefill_attention,
    prepare_decode,
    qkv_to_cache,
    rms_norm,
    silu_mul,
    sparse_mlp,
    split_matmul,
    threshold,
    tile_stats,
)
from nanollm.kernels.token_rules import RowLogits, SamplerState

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}


class Driver:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_instead_of_launching(capability: int) -> None:
    triton.runtime.driver.set_active(Driver(capability))
    found = backend.Gpu("", divmod(capability, 10), SHARED_KIB[capability] * 1024, 132)
    for module in (
        backend,
        all_reduce,
        decode_attention,
        prefill_attention,
        one_row_experts,
        one_row_matmul,
        sparse_mlp,
        tile_stats,
    ):
        module.gpu = lambda device: found  # type: ignore[attr-defined]
    run = JITFunction.run

    def warm_up(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        ptx = kernel.asm["ptx"]
        wait, release = (ptx.find(f"griddepcontrol.{name}") for name in ("wait", "launch_dependents"))
        print(json.dumps([self.fn.__name__, kernel.metadata.shared, 0 <= wait < release]), flush=True)

    JITFunction.run = warm_up  # type: ignore[method-assign]


def launch_attention(head_dim: int, group: int, block_size: int, dtype: torch.dtype = torch.bfloat16) -> None:
    cache = torch.zeros(2, block_size, 8, head_dim, dtype=dtype)
    for num_rows in (1, 16, 64):
        q = torch.zeros(num_rows, 8 * group, head_dim, dtype=dtype)
        tables, ints = torch.zeros(num_rows, 4, dtype=torch.int32), torch.zeros(num_rows + 1, dtype=torch.int32)
        positions, norm = torch.zeros(num_rows, dtype=torch.long), cache[0, 0, 0]
        source = decode_attention.NewTokens(norm, norm, 1e-6, torch.zeros(64, head_dim), positions, positions)
        projection = torch.zeros(2, num_rows, 8 * (group + 2) * head_dim)
        decode_attention._decode_attention_triton(q, projection, cache, cache, tables, ints[1:], source=source)
    decode_attention._decode_attention_triton(q, q, cache, cache, tables, ints[1:])
    prefill_attention._prefill_attention_triton(q, q, cache, cache, tables, ints, ints[1:])


def launch_the_rest(dtype: torch.dtype = torch.bfloat16) -> None:
    x, weight, long = (
        torch.zeros(16, 6144, dtype=dtype),
        torch.zeros(6144, dtype=dtype),
        torch.zeros(16, dtype=torch.long),
    )
    rms_norm._rms_norm_triton(x, x, weight, 1e-6)
    silu_mul._silu_mul_triton(x)
    embedding._embedding_triton(long, x, 0, 16)
    sampler = SamplerState.empty(17, 6144, x.device)
    for has_rules in (False, True):
        rows = RowLogits(x, long, long, sampler, has_rules=has_rules)
        for counts in (False, True):
            stats = tile_stats._tile_stats_triton(rows, counts)
            for limits in (None, threshold._threshold_triton(rows, *stats)):
                draw._draw_triton(rows, *stats, limits)
    advance_rows._advance_rows_triton(long, long, long, sampler, long, 0)
    cache, norm = torch.zeros(2, 16, 8, 128, dtype=dtype), weight[:128]
    qkv_to_cache._qkv_to_cache_triton(x, norm, norm, 1e-6, torch.zeros(64, 128), long, long, cache, cache)
    table = torch.zeros(17, 4, dtype=torch.int32)
    state = prepare_decode.DecodeState(table, long)
    prepare_decode._prepare_decode_triton(table[:16], state, prepare_decode.DecodeInputs.empty(16, state), 16)
    matrix = torch.zeros(2048, 3072, dtype=dtype)
    one_row_matmul._one_row_triton(matrix[:1], matrix, weight[:3072], 1e-6, gated=True)
    for outs, num_warps in ((2, 1), (32, 8)):  # the smallest and the largest program that tuning tries
        cut = one_row_matmul.OneRow(outs, 1024, num_warps)
        one_row_matmul._one_row_triton(matrix[:1], matrix, weight[:3072], 1e-6, gated=True, cut=cut)
    for num_rows in (4, 16, 64):
        tiles = split_matmul.default_tiles(num_rows, 2048, 3072, 132)
        assert tiles is not None
        if tiles.fit(backend.gpu(x.device).shared_bytes):
            split_matmul._split_matmul_gpu(matrix[:num_rows], matrix, tiles)
            unsplit = dataclasses.replace(tiles, splits=1)
            split_matmul._split_matmul_gpu(matrix[:num_rows], matrix, unsplit, gated=True)
    counts = torch.zeros(16, dtype=torch.int32)
    for inner in (192, 768):  # cut otherwise: one row of few outputs, few rows where 128 divides them
        gate_up, down = torch.zeros(16, 2 * inner, 256, dtype=dtype), torch.zeros(16, 256, inner, dtype=dtype)
        given, logits = torch.zeros(400, 256, dtype=dtype), torch.zeros(400, 16, dtype=dtype)
        one_row_experts._one_row_experts_triton(
            given[:1], logits[:1], gate_up, down, 8, weight[:256], 1e-6, given[:1], normalize=True
        )
        for n in (2, 40, 100, 400):
            sparse_mlp._sparse_mlp_triton(given[:n], logits[:n], gate_up, down, counts, 8, normalize=True)
    cpu, word = torch.device("cpu"), torch.zeros(1, dtype=torch.int32)
    for num_ranks, two_shot in ((2, False), (8, False), (8, True)):
        peers = all_reduce.PeerMemory.of(1, [0] * num_ranks, word, 2**24, cpu)
        all_reduce.peer_all_reduce(x, x, weight, 1e-6, peers, two_shot=two_shot)
    all_reduce.peer_best_of_ranks(torch.zeros(16), long, peers)


if __name__ == "__main__":
    compile_instead_of_launching(int(sys.argv[1]))
    for shape in sys.argv[2:]:
        launch_attention(*map(int, shape.split(",")))
    launch_the_rest()
