"""Measures how to cut the matmuls of models, and keeps what beats the library as a table for this GPU.

    python bench/tune.py --model qwen3-0.6b qwen3-8b --tp 1 2

Each candidate of nanollm.kernels.split_matmul runs with a norm that follows it and adds the parts up, as one GPU's
row-parallel layers have it, in a CUDA graph over weights that take turns and exceed the L2 cache. The table is
nanollm/kernels/tuned/<GPU>.json, which engines read; shapes that were not measured this time keep what they had.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from floor import device_rates
from kernels import copies_of, randn, time_call
from tqdm import tqdm

from nanollm.config import NAMED_SHAPES
from nanollm.distributed.partition import HeadPartition, mlp_split
from nanollm.kernels import split_matmul as kernel
from nanollm.kernels.backend import gpu
from nanollm.kernels.rms_norm import add_rms_norm, rms_norm
from nanollm.kernels.split_matmul import ROW_BUCKETS, Tiles, split_matmul

MARGIN = 0.99  # of the library's time: what gains less isn't worth a kernel of its own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(NAMED_SHAPES), choices=NAMED_SHAPES, metavar="NAME")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2], help="degrees (default: 1 2)")
    parser.add_argument("--out", type=Path, help="folder of the table (default: the package's)")
    args = parser.parse_args()
    folder = args.out or Path(kernel.__file__).with_name("tuned")
    path = folder / f"{torch.cuda.get_device_name().replace(' ', '_')}.json"
    table: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    shapes = sorted({shape for name in args.model for tp in args.tp for shape in split_shapes(name, tp)})
    bandwidth = device_rates(torch.device("cuda"), torch.bfloat16).bytes_per_second
    num_measured = num_won = 0
    for (size_out, size_in), num_rows in tqdm(list(itertools.product(shapes, ROW_BUCKETS)), dynamic_ncols=True):
        library, times = measure(size_out, size_in, num_rows)
        best = min(times, key=times.__getitem__)
        floor = 2 * size_out * size_in / bandwidth * 1e6
        tqdm.write(
            f"{size_out}x{size_in}, {num_rows} rows: floor {floor:.1f}, library {library:.1f}, "
            f"{times[best]:.1f} us by {best}"
        )
        won = times[best] < MARGIN * library
        table.setdefault(f"{size_out}x{size_in}", {})[str(num_rows)] = list(vars(best).values()) if won else None
        num_measured, num_won = num_measured + 1, num_won + won
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"{json.dumps(shape)}: {json.dumps(found)}" for shape, found in sorted(table.items()))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{num_measured} measured, {num_won} better than the library, wrote {path}")


def split_shapes(name: str, tp: int) -> Iterator[tuple[int, int]]:
    """(outputs, inputs) of rank 0's matmuls whose reader adds up: QKV, the attention's output, and down."""
    config = NAMED_SHAPES[name]
    size, head_dim = config["hidden_size"], config["head_dim"]
    heads = HeadPartition(config["num_attention_heads"], config["num_key_value_heads"], tp, 0)
    yield (len(heads.heads) + 2 * len(heads.kv_heads)) * head_dim, size
    yield size, len(heads.heads) * head_dim
    yield size, len(mlp_split(config["intermediate_size"], tp)[0])


def candidates(size_out: int, size_in: int, num_rows: int) -> Iterator[Tiles]:
    """What may be good: enough programs to fill the GPU, and not many more parts than that takes."""
    found = gpu(torch.device("cuda", torch.cuda.current_device()))
    if num_rows <= 64:
        rows, cuts = [max(num_rows, 16)], [(64, 128, 5, 4), (64, 256, 3, 4), (128, 128, 4, 8)]
    else:
        rows, cuts = [64, 128], [(64, 128, 4, 4), (128, 64, 4, 8), (64, 64, 5, 4)]
    for most, cut, splits in itertools.product(rows, cuts, (1, 2, 4, 8)):
        tiles = Tiles(most, *cut, splits)
        programs = -(-num_rows // most) * (size_out // tiles.outs) * splits
        if splits > 1 and programs > 4 * found.num_sms:
            continue
        if tiles.suit(size_out, size_in) and tiles.fit(found.shared_bytes):
            yield tiles


def measure(size_out: int, size_in: int, num_rows: int) -> tuple[float, dict[Tiles, float]]:
    """Microseconds of the library's matmul with the norm that follows, and of each candidate's."""
    copies = copies_of(size_out * size_in * 2)
    weights, xs = [randn(size_out, size_in) for _ in range(copies)], [randn(num_rows, size_in) for _ in range(copies)]
    residual, norm = randn(num_rows, size_out), randn(size_out)

    def library(i: int) -> Any:
        return rms_norm(residual.addmm_(xs[i], weights[i].t(), beta=0.5), norm, 1e-6)

    def time_ours(tiles: Tiles) -> float:
        return time_call(lambda i: add_rms_norm(split_matmul(xs[i], weights[i], tiles), residual, norm, 1e-6), copies)

    return time_call(library, copies), {tiles: time_ours(tiles) for tiles in candidates(size_out, size_in, num_rows)}


if __name__ == "__main__":
    main()
