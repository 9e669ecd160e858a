"""Every GPU kernel against its floor, its plain definition and, for attention, FlashAttention 3 where it is installed.

    python bench/kernels.py [--only decode one_row ...] [--tune] [--out bench/out]

Prints a table and writes kernels.json and kernels.png. Times are medians of CUDA-graph replays over inputs that take
turns and together exceed the L2 cache. Floor: bytes that must move over --bandwidth, or operations over --tflops,
whichever is longer; both rates are measured here too, so that you can pass your GPU's.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from command_line import pyplot
from torch import Tensor

from nanollm.cli import exit_code
from nanollm.kernels.decode_attention import Launch, _decode_attention_triton, decode_attention
from nanollm.kernels.draw import _draw_triton, draw
from nanollm.kernels.embedding import embedding, embedding_reference
from nanollm.kernels.one_row_experts import one_row_experts
from nanollm.kernels.one_row_matmul import OneRow, _one_row_triton
from nanollm.kernels.prefill_attention import _prefill_attention_triton, prefill_attention
from nanollm.kernels.qkv_to_cache import qkv_to_cache
from nanollm.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from nanollm.kernels.silu_mul import silu_mul, silu_mul_reference
from nanollm.kernels.sparse_mlp import sparse_mlp
from nanollm.kernels.threshold import _threshold_triton, threshold
from nanollm.kernels.tile_stats import _tile_stats_triton, tile_stats
from nanollm.kernels.token_rules import RowLogits, SamplerState
from nanollm.layers.sampler import Filters
from nanollm.sampling_params import (
    FREQUENCY,
    HAS_MASK,
    MIN_P,
    REPETITION,
    RULES,
    SEED_LOW,
    SINGLES_OUT,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)

ROTATE_BYTES = 256 * 2**20  # inputs that take turns, together: four times an H200's L2 cache
Call = Callable[[int], Any]  # one launch on the i-th inputs


@dataclass
class Case:
    """One kernel on one shape. calls: by label, what to time; the first is ours."""

    name: str
    num_bytes: float
    num_operations: float
    copies: int
    calls: dict[str, Call]
    microseconds: dict[str, float] = field(default_factory=dict)

    def floor(self, bandwidth: float, tflops: float) -> float:
        """Microseconds."""
        return max(self.num_bytes / bandwidth / 1e6, self.num_operations / tflops / 1e6)


def time_call(call: Call, copies: int) -> float:
    """Median microseconds of one launch."""
    for i in range(copies):
        call(i)
    torch.cuda.synchronize()
    launches = max(copies, 20 // copies * copies)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            call(i % copies)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    times: list[float] = []
    graph.replay()
    while len(times) < 5 or (sum(times) < 20_000 and len(times) < 50):
        events[0].record()
        graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]) * 1000)
    return statistics.median(times) / launches


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def copies_of(num_bytes: float) -> int:
    return min(max(2, math.ceil(ROTATE_BYTES / num_bytes)), 64)


@dataclass
class Attention:
    """Inputs of an attention case: rows of (query length, context length) over a shuffled cache."""

    rows: list[tuple[int, int]]
    group: int
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    def __post_init__(self) -> None:
        contexts = [context for _, context in self.rows]
        self.num_bytes = sum(contexts) * 2 * self.num_kv_heads * self.head_dim * 2
        self.copies = copies_of(self.num_bytes)
        counts = [-(-context // self.block_size) for context in contexts]
        shape = (2, sum(counts), self.block_size, self.num_kv_heads, self.head_dim)
        self.caches = [randn(*shape) for _ in range(self.copies)]
        table = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
        order = torch.randperm(sum(counts), dtype=torch.int32)
        for row, blocks in enumerate(order.split(counts)):
            table[row, : len(blocks)] = blocks
        self.table = table.cuda()
        queries = torch.tensor([0] + [query for query, _ in self.rows], dtype=torch.int32)
        self.starts = queries.cumsum(0, dtype=torch.int32).cuda()
        self.contexts = torch.tensor(contexts, dtype=torch.int32).cuda()
        self.q = randn(int(queries.sum()), self.num_kv_heads * self.group, self.head_dim)
        self.out = torch.empty_like(self.q)
        visible = sum(query * context - query * (query - 1) // 2 for query, context in self.rows)
        self.num_operations = 4 * self.head_dim * self.num_kv_heads * self.group * visible

    def decode(self, launch: Launch | None = None) -> Call:
        if launch is None:
            return lambda i: decode_attention(self.q, *self.caches[i], self.table, self.contexts, out=self.out)
        return lambda i: _decode_attention_triton(self.out, self.q, *self.caches[i], self.table, self.contexts, launch)

    def prefill(self, **options: Any) -> Call:
        arguments = (self.table, self.starts, self.contexts)
        if not options:
            return lambda i: prefill_attention(self.q, *self.caches[i], *arguments)
        return lambda i: _prefill_attention_triton(self.out, self.q, *self.caches[i], *arguments, **options)

    def flash(self) -> Call | None:
        """FlashAttention 3 on the same cache, or None."""
        try:
            from flash_attn_interface import flash_attn_with_kvcache
        except ImportError:
            return None
        longest = max(query for query, _ in self.rows)
        decode = longest == 1
        q = self.q[:, None] if decode else self.q
        varlen = {} if decode else {"cu_seqlens_q": self.starts, "max_seqlen_q": longest}
        return lambda i: flash_attn_with_kvcache(
            q, *self.caches[i], cache_seqlens=self.contexts, page_table=self.table, causal=True, **varlen
        )

    def case(self, name: str, calls: dict[str, Call]) -> Case:
        if (flash := self.flash()) is not None:
            calls["flash"] = flash
        return Case(name, self.num_bytes, self.num_operations, self.copies, calls)


def uneven(num_rows: int, low: int, high: int) -> list[tuple[int, int]]:
    generator = torch.Generator().manual_seed(0)
    return [(1, n) for n in torch.randint(low, high, (num_rows,), generator=generator).tolist()]


DECODES: dict[str, tuple[list[tuple[int, int]], int]] = {
    "decode 256 x ~800 group 2": (uneven(256, 600, 1000), 2),
    "decode 128 x 1024 group 4": ([(1, 1024)] * 128, 4),
    "decode 32 x 4096 group 4": ([(1, 4096)] * 32, 4),
    "decode 8 x 1024 group 4": ([(1, 1024)] * 8, 4),
    "decode 1 x 512 group 2": ([(1, 512)], 2),
    "decode 256 x 100-2048 group 4": (uneven(256, 100, 2048), 4),
}
PREFILLS: dict[str, tuple[list[tuple[int, int]], int]] = {
    "prefill 1 x 8192 group 4": ([(8192, 8192)], 4),
    "prefill 8 x 2048 group 4": ([(2048, 2048)] * 8, 4),
    "prefill 1 x 512 group 2": ([(512, 512)], 2),
    "prefill 2048 after 14336 group 4": ([(2048, 16384)], 4),
}


def decode_cases() -> Iterator[Case]:
    for name, (rows, group) in DECODES.items():
        inputs = Attention(rows, group)
        yield inputs.case(name, {"nanollm": inputs.decode()})


def prefill_cases() -> Iterator[Case]:
    for name, (rows, group) in PREFILLS.items():
        inputs = Attention(rows, group)
        yield inputs.case(name, {"nanollm": inputs.prefill()})


def norm_cases() -> Iterator[Case]:
    for tokens, size in [(1, 4096), (256, 4096), (8192, 4096), (8192, 1024)]:
        num_bytes = 2 * tokens * size * 2
        copies = copies_of(num_bytes)
        xs, residual, weight = [randn(tokens, size) for _ in range(copies)], randn(tokens, size), randn(size)
        plain: dict[str, Call] = {
            "nanollm": lambda i, xs=xs, w=weight: rms_norm(xs[i], w, 1e-6),
            "torch": lambda i, xs=xs, w=weight: rms_norm_reference(xs[i], w, 1e-6),
        }
        yield Case(f"rms_norm {tokens} x {size}", num_bytes, 0, copies, plain)
        adding: dict[str, Call] = {
            "nanollm": lambda i, xs=xs, r=residual, w=weight: add_rms_norm(xs[i], r, w, 1e-6),
            "torch": lambda i, xs=xs, r=residual, w=weight: add_rms_norm_reference(xs[i], r, w, 1e-6),
        }
        yield Case(f"add_rms_norm {tokens} x {size}", 2 * num_bytes, 0, copies, adding)


def qkv_cases() -> Iterator[Case]:
    norm, rope = randn(128), torch.randn(1024, 128, device="cuda")
    for tokens, heads in [(1, 16), (256, 32), (8192, 32)]:
        num_bytes = 2 * tokens * (heads + 16) * 128 * 2
        copies = copies_of(num_bytes)
        inputs = [randn(tokens, (heads + 16) * 128) for _ in range(copies)]
        cache = randn(2, tokens // 16 + 1, 16, 8, 128)
        slots = torch.randperm(tokens, device="cuda")
        positions = torch.randint(0, 1024, (tokens,), device="cuda")
        arguments = (norm, norm, 1e-6, rope, positions, slots, *cache)
        calls: dict[str, Call] = {"nanollm": lambda i, x=inputs, a=arguments: qkv_to_cache(x[i], *a)}
        yield Case(f"qkv_to_cache {tokens} x {heads} heads", num_bytes, 0, copies, calls)


def elementwise_cases() -> Iterator[Case]:
    for tokens, size in [(1, 3072), (256, 12288), (8192, 12288)]:
        num_bytes = 3 * tokens * size * 2
        copies = copies_of(num_bytes)
        inputs = [randn(tokens, 2 * size) for _ in range(copies)]
        yield Case(
            f"silu_mul {tokens} x {size}", num_bytes, 0, copies,
            {"nanollm": lambda i, x=inputs: silu_mul(x[i]), "torch": lambda i, x=inputs: silu_mul_reference(x[i])},
        )  # fmt: skip
    weight = randn(151936, 1024)
    for tokens in (1, 256, 8192):
        ids = torch.randint(0, 151936, (8, tokens), device="cuda")
        yield Case(
            f"embedding {tokens} x 1024", 2 * tokens * 1024 * 2, 0, 8,
            {
                "nanollm": lambda i, ids=ids: embedding(ids[i], weight, 0, 151936),
                "torch": lambda i, ids=ids: embedding_reference(ids[i], weight, 0, 151936),
            },
        )  # fmt: skip


def expert_cases() -> Iterator[Case]:
    """The experts of a layer of Qwen3-30B-A3B; one copy of them exceeds the cache."""
    size, inner, num_experts, num_chosen = 2048, 768, 128, 8
    gate_up, down = randn(num_experts, 2 * inner, size) / 45, randn(num_experts, size, inner) / 28
    count = torch.zeros(num_experts, dtype=torch.int32, device="cuda")
    for tokens in (1, 8, 32, 128, 256, 1024, 8192):
        x, logits = randn(tokens, size), randn(64, tokens, num_experts)
        chosen = len(logits[0].topk(num_chosen).indices.unique())
        num_bytes = chosen * 3 * size * inner * 2 + 2 * tokens * size * 2
        yield Case(
            f"experts of {tokens}", num_bytes, tokens * num_chosen * 3 * size * inner * 2, 64,
            {
                "nanollm": lambda i, given=(x, logits): (
                    one_row_experts(given[0], given[1][i], gate_up, down, num_chosen, normalize=True)
                    if len(given[0]) == 1
                    else sparse_mlp(given[0], given[1][i], gate_up, down, count, num_chosen, normalize=True)
                )
            },
        )  # fmt: skip


@dataclass(frozen=True)
class Linear:
    """A matmul by a weight [size_out, size_in], and what is folded into it; gated: the weight is gate's and up's."""

    size_out: int
    size_in: int
    norm: bool = False
    gated: bool = False
    residual: bool = False

    @property
    def num_bytes(self) -> int:
        return 2 * self.size_out * self.size_in


# Of Qwen3-0.6B and Qwen3-8B
ONE_ROW = {
    "0.6B qkv": Linear(4096, 1024, norm=True),
    "0.6B o": Linear(1024, 2048, residual=True),
    "0.6B gate_up": Linear(6144, 1024, norm=True, gated=True),
    "0.6B down": Linear(1024, 3072, residual=True),
    "8B qkv": Linear(6144, 4096, norm=True),
    "8B o": Linear(4096, 4096, residual=True),
    "8B gate_up": Linear(24576, 4096, norm=True, gated=True),
    "8B down": Linear(4096, 12288, residual=True),
}


@dataclass
class OneRowInputs:
    """Inputs of a linear layer of one row."""

    layer: Linear

    def __post_init__(self) -> None:
        layer = self.layer
        self.copies = copies_of(layer.num_bytes)
        self.weights = [randn(layer.size_out, layer.size_in) for _ in range(self.copies)]
        self.x = randn(1, layer.size_in)
        self.norm_weight = randn(layer.size_in) if layer.norm else None
        self.residual = randn(1, layer.size_out) if layer.residual else None

    def ours(self, cut: OneRow | None = None) -> Call:
        """As layers launch it, or cut so."""
        added = (self.norm_weight, 1e-6, self.residual)
        return lambda i: _one_row_triton(self.x, self.weights[i], *added, gated=self.layer.gated, cut=cut)

    def separate(self) -> Call:
        """cuBLAS, with our kernels before and after it."""

        def call(i: int) -> Tensor:
            x = self.x if self.norm_weight is None else rms_norm(self.x, self.norm_weight, 1e-6)
            y = torch.nn.functional.linear(x, self.weights[i])
            return silu_mul(y) if self.layer.gated else y

        return call

    def case(self, name: str, calls: dict[str, Call]) -> Case:
        return Case(f"matmul 1 x {name}", self.layer.num_bytes, 0, self.copies, calls)


def one_row_cases() -> Iterator[Case]:
    for name, layer in ONE_ROW.items():
        inputs = OneRowInputs(layer)
        yield inputs.case(name, {"nanollm": inputs.ours(), "cublas": inputs.separate()})


# What rows ask for, in turn: columns of nanollm.sampling_params.
SAMPLINGS: dict[str, list[dict[int, float]]] = {
    "greedy": [{TEMPERATURE: 0.0}],
    "temperature": [{}],
    "min_p": [{MIN_P: 0.05}],
    "top_k 20, top_p .95, min_p": [{TOP_K: 20, TOP_P: 0.95, MIN_P: 0.05}],
    "top_k 1000": [{TOP_K: 1000}],
    "top_p .9": [{TOP_P: 0.9}],
    "top_p .5": [{TOP_P: 0.5}],
    "penalties": [{RULES: SINGLES_OUT, REPETITION: 1.1, FREQUENCY: 0.1}],
    "penalties, top_p .9": [{RULES: SINGLES_OUT, REPETITION: 1.1, FREQUENCY: 0.1, TOP_P: 0.9}],
    "masks, top_p .9": [{RULES: HAS_MASK, TOP_P: 0.9}],
    "a mask in 32, top_p .9": [{RULES: HAS_MASK, TOP_P: 0.9}, *[{TOP_P: 0.9}] * 31],
    "mixed": [{TEMPERATURE: 0.0}, {}, {TOP_P: 0.9}, {TOP_K: 20, TOP_P: 0.95}],
}


@dataclass
class Sampling:
    """Logits drawn as N(0, 2²), and rows' parameters."""

    num_rows: int
    name: str
    size: int = 151936

    def __post_init__(self) -> None:
        kinds = SAMPLINGS[self.name]
        ruled = sum(int(kinds[row % len(kinds)].get(RULES, 0)) & SINGLES_OUT for row in range(self.num_rows))
        # Logits are read; of rows with rules a word a token too, and what comes out is written in float32.
        self.num_bytes = self.size * (2 * self.num_rows + 8 * ruled)
        self.logits = [randn(self.num_rows, self.size).mul_(2) for _ in range(copies_of(self.num_bytes))]
        self.rows = torch.arange(self.num_rows, device="cuda")
        self.state = SamplerState.empty(self.num_rows + 1, self.size, torch.device("cuda"))
        self.state.params_RP[:, SEED_LOW] = torch.arange(self.num_rows + 1)
        self.state.masks_RW.fill_(-1)
        if "penalties" in self.name:
            self.state.words_RV[:, ::97] = 1  # tokens that were in the output, once
        limits = [[row.get(column, off) for column, off in ((TOP_K, 0), (TOP_P, 1), (MIN_P, 0))] for row in kinds]
        self.filters = max(Filters.of(row.get(TEMPERATURE, 1.0), *of) for row, of in zip(kinds, limits, strict=True))
        for row in range(self.num_rows):
            columns = {TEMPERATURE: 1.0, TOP_P: 1.0, REPETITION: 1.0} | kinds[row % len(kinds)]
            for column, value in columns.items():
                dtype = torch.int32 if column in (TOP_K, RULES) else torch.float32
                self.state.params_RP[row, column] = torch.tensor(value, dtype=dtype).view(torch.int32).cuda()

    def ours(
        self,
        stats: dict[str, int] | None = None,
        filters: dict[str, int] | None = None,
        drawing: dict[str, int] | None = None,
    ) -> Call:
        """Filters and the draw; with options of their launches."""

        def call(i: int) -> Tensor:
            rows = RowLogits(self.logits[i], self.rows, self.rows, self.state)
            found, limits = _tile_stats_triton(rows, self.filters is Filters.ALL, **(stats or {})), None
            if self.filters is not Filters.NONE:
                limits = _threshold_triton(rows, *found, **(filters or {}))
            return _draw_triton(rows, *found, limits, **(drawing or {}))[1]

        return call

    def parts(self) -> dict[str, Call]:
        """Each kernel on what the one before it leaves."""
        rows = RowLogits(self.logits[0], self.rows, self.rows, self.state)
        counts = self.filters is Filters.ALL
        stats, limits = tile_stats(rows, counts), None
        if self.filters is not Filters.NONE:
            limits = threshold(rows, *stats)

        def on(i: int) -> RowLogits:
            return replace(rows, logits_SV=self.logits[i])

        calls = {"tile_stats": lambda i: tile_stats(on(i), counts), "draw": lambda i: draw(on(i), *stats, limits)}
        if limits is not None:
            calls["threshold"] = lambda i: threshold(on(i), *stats)
        return calls

    def case(self, calls: dict[str, Call]) -> Case:
        return Case(f"sample {self.num_rows} rows, {self.name}", self.num_bytes, 0, len(self.logits), calls)


def sampling_cases() -> Iterator[Case]:
    """All of sampling against one read of the logits (and what rules read and write), and its kernels."""
    some = [(rows, name) for rows in (1, 32) for name in ("temperature", "top_p .9", "penalties, top_p .9")]
    some += [(32, "a mask in 32, top_p .9"), (32, "masks, top_p .9"), *((256, name) for name in SAMPLINGS)]
    for num_rows, name in some:
        inputs = Sampling(num_rows, name)
        calls = {"nanollm": inputs.ours()} | inputs.parts()
        if name == "greedy":
            calls["torch"] = lambda i, x=inputs.logits: x[i].argmax(-1)
        yield inputs.case(calls)


def decode_variants() -> Iterator[Case]:
    for name, (rows, group) in DECODES.items():
        inputs = Attention(rows, group)
        pairs = len(rows) * inputs.num_kv_heads
        splits = [(1, 2048), (2, 2048)] if pairs > 128 else [(2, 128), (4, 128), (8, 128)]
        variants = itertools.product(splits, [(64, 3, 4), (64, 4, 4), (128, 3, 8)])
        calls = {
            f"s{num_splits} m{min_split} t{tile} p{stages} w{warps}": inputs.decode(
                Launch(num_splits, min_split, tile, stages, warps)
            )
            for (num_splits, min_split), (tile, stages, warps) in variants
        }
        calls["default"] = inputs.decode()
        yield inputs.case(name, calls)


def prefill_variants() -> Iterator[Case]:
    for name, (rows, group) in PREFILLS.items():
        for block_size in (16, 64, 128):
            inputs = Attention(rows, group, block_size=block_size)
            calls = {"default": inputs.prefill()}
            if block_size == 128:
                tiles = [(64, 64, 4, 3), (128, 128, 8, 3)]
                calls |= {" ".join(map(str, tile)): inputs.prefill(tiles=tile, by_copy_engine=True) for tile in tiles}
            yield inputs.case(f"{name} block {block_size}", calls)


def sampling_variants() -> Iterator[Case]:
    inputs = Sampling(256, "temperature")
    launches = [(16, 2), (16, 4), (32, 2), (32, 8), (64, 8)]
    calls = {f"t{t} w{w}": inputs.ours(stats={"tiles": t, "num_warps": w}) for t, w in launches}
    calls |= {f"draw w{w}": inputs.ours(drawing={"num_warps": w}) for w in (4, 16)}
    yield inputs.case(calls | {"default": inputs.ours()})
    for name in ("top_k 20, top_p .95, min_p", "top_p .9", "top_k 1000"):
        filtered = Sampling(256, name)
        launches = [(64, 4), (64, 8), (64, 16)] if filtered.filters is Filters.ALL else []
        calls = {f"t{t} w{w}": filtered.ours(stats={"tiles": t, "num_warps": w}) for t, w in launches}
        calls |= {f"threshold w{w}": filtered.ours(filters={"num_warps": w}) for w in (8, 16, 32)}
        calls |= {f"draw w{w}": filtered.ours(drawing={"num_warps": w}) for w in (4, 16)}
        yield filtered.case(calls | {"default": filtered.ours()})


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "decode": decode_cases,
    "prefill": prefill_cases,
    "norm": norm_cases,
    "qkv": qkv_cases,
    "elementwise": elementwise_cases,
    "one_row": one_row_cases,
    "experts": expert_cases,
    "sampling": sampling_cases,
}
VARIANTS: dict[str, Callable[[], Iterator[Case]]] = {
    "decode": decode_variants,
    "prefill": prefill_variants,
    "sampling": sampling_variants,
}


def measure_gpu() -> tuple[float, float]:
    """TB/s of a large copy, reads and writes counted, and TFLOP/s of a large bf16 matmul."""
    source, target = (torch.empty(2**30, dtype=torch.int32, device="cuda") for _ in range(2))
    bandwidth = 2 * source.nbytes / time_call(lambda i: torch.neg(source, out=target), 1) / 1e6
    a, b = randn(8192, 8192), randn(8192, 8192)
    return bandwidth, 2 * 8192**3 / time_call(lambda i: a @ b, 1) / 1e6


def plot(cases: list[Case], floors: list[float], path: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, 1 + 0.3 * len(cases)))
    achieved = [floor / case.microseconds["nanollm"] for case, floor in zip(cases, floors, strict=True)]
    axes.barh([case.name for case in cases][::-1], achieved[::-1])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("floor / time")
    figure.savefig(path, bbox_inches="tight", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--tune", action="store_true", help="time variants of the launches instead, where there are any"
    )
    parser.add_argument("--bandwidth", type=float, default=4.15, help="TB/s (default: an H200's, measured)")
    parser.add_argument("--tflops", type=float, default=790, help="bf16 TFLOP/s (default: an H200's, measured)")
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it times GPU kernels, and PyTorch sees no GPU: bench/cpu.py and bench/host.py need none")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    bandwidth, tflops = measure_gpu()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth:.2f} TB/s, matmul {tflops:.0f} TFLOP/s")
    cases, floors = [], []
    source = VARIANTS if args.tune else CASES
    for case in (case for name in args.only if name in source for case in source[name]()):
        floor = case.floor(args.bandwidth, args.tflops)
        for label, call in case.calls.items():
            try:
                case.microseconds[label] = time_call(call, case.copies)
            except Exception as error:  # a variant that doesn't fit this GPU must not end the run
                torch.cuda.synchronize()
                print(f"{case.name}: {label}: {type(error).__name__} {str(error)[:80]}")
        ranked = sorted(case.microseconds.items(), key=lambda item: item[1]) if args.tune else case.microseconds.items()
        times = "  ".join(f"{label} {us:.1f}" for label, us in list(ranked)[: 7 if args.tune else None])
        best = min(case.microseconds.values()) if args.tune else case.microseconds.get("nanollm", math.nan)
        print(f"{case.name:36} floor {floor:7.1f} us  {floor / best:5.0%}  {times}", flush=True)
        cases.append(case)
        floors.append(floor)
        case.calls = {}
        torch.cuda.empty_cache()
    records = [asdict(case) | {"floor": floor} for case, floor in zip(cases, floors, strict=True)]
    name = "tune_kernels" if args.tune else "kernels"
    report = {"gpu": torch.cuda.get_device_name(), "copy_tb_s": bandwidth, "matmul_tflop_s": tflops, "cases": records}
    (args.out / f"{name}.json").write_text(json.dumps(report, indent=1))
    if not args.tune:
        plot(cases, floors, args.out / f"{name}.png")


if __name__ == "__main__":
    sys.exit(exit_code(main))
