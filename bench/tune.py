"""Measures how to cut the matmuls of models, and keeps what beats the library as a table for this GPU.

    python bench/tune.py --model qwen3-0.6b qwen3-8b --tp 1 2

Each candidate of nanollm.kernels.split_matmul runs with what follows it in a layer, in a CUDA graph over weights that
take turns and exceed the L2 cache. The table is nanollm/kernels/tuned/<GPU>.json, which an engine reads when it starts;
shapes that were not measured here keep what they had.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kernels import copies_of, randn, time_call
from torch import Tensor
from tqdm import tqdm

from nanollm.config import NAMED_SHAPES
from nanollm.distributed.partition import HeadPartition, mlp_split
from nanollm.kernels import split_matmul as kernel
from nanollm.kernels.backend import gpu
from nanollm.kernels.rms_norm import add_rms_norm, rms_norm
from nanollm.kernels.silu_mul import silu_mul
from nanollm.kernels.split_matmul import ROW_BUCKETS, Tiles, split_matmul

MARGIN = 0.99  # of the library's time: what gains less isn't worth a kernel of its own
Case = tuple[str, int, int]  # kind, size out, size in


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(NAMED_SHAPES), choices=NAMED_SHAPES, metavar="NAME")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2], help="degrees (default: 1 2)")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROW_BUCKETS), choices=ROW_BUCKETS)
    parser.add_argument("--out", type=Path, help="folder of the table (default: the package's)")
    args = parser.parse_args()
    folder = args.out or Path(kernel.__file__).with_name("tuned")
    path = folder / f"{torch.cuda.get_device_name().replace(' ', '_')}.json"
    table: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    cases = sorted({case for name in args.model for tp in args.tp for case in cases_of(name, tp)})
    gains: list[float] = []
    for (kind, size_out, size_in), num_rows in tqdm(list(itertools.product(cases, args.rows)), dynamic_ncols=True):
        library, times = measure(kind, size_out, size_in, num_rows)
        best = min(times, key=times.__getitem__, default=None)
        won = best is not None and times[best] < MARGIN * library
        key = f"{kind} {size_out}x{size_in}"
        table.setdefault(key, {})[str(num_rows)] = list(vars(best).values()) if best is not None and won else None
        shown = "" if best is None else f"{times[best]:7.1f} us {tuple(vars(best).values())}"
        tqdm.write(f"{key:22} {num_rows:4} rows: library {library:7.1f} us, {shown}")
        gains.append(library / times[best] if best is not None and won else 1.0)
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"{json.dumps(key)}: {json.dumps(found)}" for key, found in sorted(table.items()))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(gains)} measured, {sum(gain > 1 for gain in gains)} better than the library, wrote {path}")


def cases_of(name: str, tp: int) -> Iterator[Case]:
    """The matmuls of a layer on rank 0."""
    config = NAMED_SHAPES[name]
    size, head_dim = config["hidden_size"], config["head_dim"]
    heads = HeadPartition(config["num_attention_heads"], config["num_key_value_heads"], tp, 0)
    inner = len(mlp_split(config["intermediate_size"], tp)[0])
    num_q, num_kv = len(heads.heads) * head_dim, len(heads.kv_heads) * head_dim
    yield "column", num_q + 2 * num_kv, size
    yield "row", size, num_q
    yield "gated", 2 * inner, size
    yield "row", size, inner


def candidates(kind: str, size_out: int, size_in: int, num_rows: int) -> Iterator[Tiles]:
    """What may be good: enough programs to fill the GPU, and not many more parts than it takes."""
    found = gpu(torch.device("cuda", torch.cuda.current_device()))
    gated = kind == "gated"
    if num_rows <= 64:
        rows = [max(num_rows, 16)]
        cuts = [(64, 128, 5, 4), (64, 256, 3, 4), (128, 128, 4, 8), (64, 128, 3, 4)]
    else:
        rows = [64, 128]
        cuts = [(64, 128, 4, 4), (128, 64, 4, 8), (64, 64, 5, 4)]
    for most, (outs, chunk, stages, warps), splits in itertools.product(rows, cuts, (1, 2, 4, 8)):
        tiles = Tiles(most, outs, chunk, stages, warps, splits)
        programs = -(-num_rows // most) * (size_out // (2 if gated else 1) // outs) * splits
        if not tiles.suit(size_out // (2 if gated else 1), size_in) or (splits > 1 and kind != "row"):
            continue
        if programs * 2 < found.num_sms or (splits > 1 and programs > 4 * found.num_sms):
            continue
        if tiles.shared_bytes(2, gated=gated) < found.shared_bytes - 2048:
            yield tiles


def measure(kind: str, size_out: int, size_in: int, num_rows: int) -> tuple[float, dict[Tiles, float]]:
    """Microseconds of the library's matmul with what follows, and of each candidate's."""
    copies = copies_of(size_out * size_in * 2)
    weights, xs = [randn(size_out, size_in) for _ in range(copies)], [randn(num_rows, size_in) for _ in range(copies)]
    residual, norm = randn(num_rows, size_out), randn(size_out)
    library, ours = calls(kind, xs, weights, residual, norm)
    times = {}
    for tiles in candidates(kind, size_out, size_in, num_rows):
        times[tiles] = time_call(lambda i, tiles=tiles: ours(i, tiles), copies)  # type: ignore[misc]
    return time_call(library, copies), times


def calls(
    kind: str, xs: list[Tensor], weights: list[Tensor], residual: Tensor, norm: Tensor
) -> tuple[Callable[[int], Any], Callable[[int, Tiles], Any]]:
    """As a layer on one GPU does it: on i-th inputs by the library, and by ours."""
    if kind == "row":
        return (
            lambda i: rms_norm(residual.addmm_(xs[i], weights[i].t(), beta=0.5), norm, 1e-6),
            lambda i, tiles: add_rms_norm(split_matmul(xs[i], weights[i], tiles), residual, norm, 1e-6),
        )
    if kind == "gated":
        return (
            lambda i: silu_mul(F.linear(xs[i], weights[i])),
            lambda i, tiles: split_matmul(xs[i], weights[i], tiles, gated=True),
        )
    return lambda i: F.linear(xs[i], weights[i]), lambda i, tiles: split_matmul(xs[i], weights[i], tiles)


if __name__ == "__main__":
    main()
