"""Measures how to cut the matmuls of models, and keeps what is best as a table for this GPU.

    python bench/tune.py --model qwen3-0.6b qwen3-8b --tp 1 2 [--rows 1]

Candidates run in a CUDA graph over weights that take turns and exceed the L2 cache. One row: all layers, with the norm,
gate and residual that are folded in, against the rule for shapes that nobody measured. More rows: with what follows,
against the library. The table is nanollm/kernels/tuned/<GPU>.json, which engines read; what was not measured this time
stays as it was.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from command_line import positive
from floor import device_rates
from kernels import Linear, OneRowInputs, copies_of, randn, time_call
from torch import Tensor
from tqdm import tqdm

from nanollm.cli import exit_code
from nanollm.config import NAMED_SHAPES
from nanollm.distributed.partition import HeadPartition, mlp_split
from nanollm.kernels.backend import gpu, table_path
from nanollm.kernels.one_row_matmul import OneRow, default_one_row_cut
from nanollm.kernels.precompile import compiling_in_parallel, launching_nothing
from nanollm.kernels.rms_norm import add_rms_norm, rms_norm
from nanollm.kernels.silu_mul import silu_mul
from nanollm.kernels.split_matmul import LIBRARY_HALVES, ROW_BUCKETS, Tiles, split_matmul, tiles_for

MARGIN = 0.99  # of the time without a table: what gains less is noise, or not worth a kernel of its own
# Each thread of these has 32 or 64 values of a chunk; of a gated weight, with twice the outs, twice as many.
ONE_ROW_CUTS = [
    (1, 1024, 1), (1, 2048, 2), (1, 4096, 4),
    (2, 512, 1), (2, 1024, 2), (2, 2048, 4),
    (4, 512, 2), (4, 1024, 4), (4, 2048, 8), (4, 1024, 2), (4, 2048, 4),
    (8, 512, 2), (8, 1024, 4),
    (16, 1024, 8),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(NAMED_SHAPES), choices=NAMED_SHAPES, metavar="NAME")
    parser.add_argument("--tp", type=positive, nargs="+", default=[1, 2], help="degrees (default: 1 2)")
    buckets = [1, *ROW_BUCKETS]
    parser.add_argument("--rows", type=int, nargs="+", default=buckets, choices=buckets, help="default: all")
    parser.add_argument("--out", type=Path, help="folder of the table (default: the package's)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it times matmuls on a GPU, and PyTorch sees none")
    device = torch.device("cuda", torch.cuda.current_device())
    path = table_path(gpu(device).name)
    path = (args.out or path.parent) / path.name
    table: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    layers = different(layer for name, tp in product(args.model, args.tp) for layer in linears(name, tp))
    if 1 in args.rows:
        compile_one_row(layers, device)
    bandwidth = device_rates(device, torch.bfloat16).bytes_per_second
    jobs = list(product(layers, args.rows))
    num_won = 0
    for layer, num_rows in tqdm(jobs, dynamic_ncols=True):
        times = measure_one_row(layer, device) if num_rows == 1 else measure(layer, num_rows)
        untuned = next(iter(times))
        best = min(times, key=times.__getitem__)
        shape = f"{layer.size_out}x{layer.size_in}{' gated' * layer.gated}"
        tqdm.write(
            f"{shape}, {num_rows} rows: floor {layer.num_bytes / bandwidth * 1e6:.1f}, {times[untuned]:.1f} by "
            f"{untuned or 'the library'}, best {times[best]:.1f} us by {best or 'the library'}"
        )
        won = times[best] < MARGIN * times[untuned]
        kept = best if won else untuned
        table.setdefault(shape, {})[str(num_rows)] = None if kept is None else list(vars(kept).values())
        num_won += won
    path.parent.mkdir(parents=True, exist_ok=True)
    for shape, found in table.items():
        table[shape] = dict(sorted(found.items(), key=lambda item: int(item[0])))
    lines = (f"{json.dumps(shape)}: {json.dumps(found)}" for shape, found in sorted(table.items()))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(jobs)} measured, {num_won} better than the rule or the library, wrote {path}")


def linears(name: str, tp: int) -> Iterator[Linear]:
    """Rank 0's matmuls of a layer, in order. With more ranks, norm and residual come with the all-reduce."""
    config, alone = NAMED_SHAPES[name], tp == 1
    size, head_dim = config["hidden_size"], config["head_dim"]
    heads = HeadPartition(config["num_attention_heads"], config["num_key_value_heads"], tp, 0)
    yield Linear((len(heads.heads) + 2 * len(heads.kv_heads)) * head_dim, size, norm=alone)
    yield Linear(size, len(heads.heads) * head_dim, residual=alone)
    if "num_experts" in config:  # which have kernels of their own, after a router too small to be worth it
        return
    inner = len(mlp_split(config["intermediate_size"], tp)[0])
    yield Linear(2 * inner, size, norm=alone, gated=True)
    yield Linear(size, inner, residual=alone)


def different(layers: Iterable[Linear]) -> list[Linear]:
    """One for each shape, gated or not, which is all that the table knows."""
    by_shape = {(layer.size_out, layer.size_in, layer.gated): layer for layer in layers}
    return [by_shape[shape] for shape in sorted(by_shape)]


def one_row_cuts(layer: Linear, num_sms: int) -> list[OneRow]:
    """The rule's, then what may be better: a program for each multiprocessor, and no chunk mostly past the end."""
    rule = default_one_row_cut(layer.size_out, layer.size_in, layer.gated, num_sms)
    cuts = (OneRow(outs * (1 + layer.gated), chunk, num_warps) for outs, chunk, num_warps in ONE_ROW_CUTS)
    return [rule] + [
        cut
        for cut in cuts
        if cut != rule and cut.suit(layer.size_out, gated=layer.gated)
        if layer.size_out // cut.outs >= num_sms and cut.chunk < 2 * layer.size_in
    ]


def compile_one_row(layers: list[Linear], device: torch.device) -> None:
    with compiling_in_parallel(device, 1), launching_nothing():
        for layer in layers:
            inputs = OneRowInputs(layer)
            for cut in one_row_cuts(layer, gpu(device).num_sms):
                inputs.ours(cut)(0)


def measure_one_row(layer: Linear, device: torch.device) -> dict[OneRow, float]:
    """Microseconds of each cut, the rule's first."""
    inputs = OneRowInputs(layer)
    return {cut: time_call(inputs.ours(cut), inputs.copies) for cut in one_row_cuts(layer, gpu(device).num_sms)}


def candidates(layer: Linear, num_rows: int) -> Iterator[Tiles]:
    """What may be good: enough programs to fill the GPU, and not many more parts than that takes."""
    found = gpu(torch.device("cuda", torch.cuda.current_device()))
    size_out, size_in, gated = layer.size_out, layer.size_in, layer.gated
    if num_rows >= 64 and LIBRARY_HALVES.suit(size_out, size_in, gated=gated):
        yield LIBRARY_HALVES
    if num_rows <= 64:
        rows, cuts = [max(num_rows, 16)], [(64, 128, 5, 4), (64, 256, 3, 4), (128, 128, 4, 8)]
    else:
        rows, cuts = [64, 128], [(64, 128, 4, 4), (128, 64, 4, 8), (64, 64, 5, 4)]
    for most, cut, splits in product(rows, cuts, (1, 2, 4, 8)):
        tiles = Tiles(most, *cut, splits)
        programs = -(-num_rows // most) * (size_out // tiles.outs) * splits
        if splits > 1 and programs > 4 * found.num_sms:
            continue
        if tiles.suit(size_out, size_in, gated=gated) and tiles.fit(found.shared_bytes):
            yield tiles


def measure(layer: Linear, num_rows: int) -> dict[Tiles | None, float]:
    """Microseconds of the library's matmul (None) and of each candidate's, each with what follows it in a layer: the
    norm or, after gate and up, SiLU, down (cut as the table has it so far) and the norm. One matmul after the other
    would say little: most of what a kernel costs or saves is before and after it."""
    size_out, size_in, copies = layer.size_out, layer.size_in, copies_of(layer.num_bytes)
    weights, xs = [randn(size_out, size_in) for _ in range(copies)], [randn(num_rows, size_in) for _ in range(copies)]
    width = size_in if layer.gated else size_out
    residual, norm = randn(num_rows, width), randn(width)
    downs = [randn(size_in, size_out // 2) for _ in range(copies)] if layer.gated else []
    down_tiles = tiles_for(num_rows, downs[0]) if layer.gated else None

    def library(i: int) -> Any:
        if layer.gated:
            return rest(silu_mul(F.linear(xs[i], weights[i])), i)
        return rms_norm(residual.addmm_(xs[i], weights[i].t(), beta=0.5), norm, 1e-6)

    def rest(y: Tensor, i: int) -> Any:
        if layer.gated:
            y = split_matmul(y, downs[i], down_tiles) if down_tiles else F.linear(y, downs[i])
        return add_rms_norm(y, residual, norm, 1e-6)

    def time_ours(tiles: Tiles) -> float:
        return time_call(lambda i: rest(split_matmul(xs[i], weights[i], tiles, gated=layer.gated), i), copies)

    return {
        tiles: time_call(library, copies) if tiles is None else time_ours(tiles)
        for tiles in (None, *candidates(layer, num_rows))
    }


if __name__ == "__main__":
    sys.exit(exit_code(main))
