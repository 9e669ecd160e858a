"""All-reduce of 2 KB to 32 MB, alone and with the residual add and RMSNorm: ours, NCCL's and torch's, in microseconds.

    torchrun --nproc_per_node=2 bench/all_reduce.py [--json FILE]    one GPU a rank
    python bench/all_reduce.py --streams 2                           ranks as streams of one process, on one GPU

Times are medians over replays of a CUDA graph with many calls, of the slowest rank. NVLink multicast is never used. The
streams show what the kernels themselves take, without a link; NCCL and torch can't run so.
"""

import argparse
import json
import math
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from command_line import parser_of, positive

from nanollm.cli import exit_code

os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist
from torch import Tensor

from nanollm.distributed.all_reduce import PeerCollectives
from nanollm.distributed.tp_group import TPGroup
from nanollm.kernels.all_reduce import BUFFERS, PeerMemory, empty_buffers, peer_all_reduce, peer_best_of_ranks
from nanollm.kernels.rms_norm import add_rms_norm

SIZES = [2**i for i in range(11, 26)]  # bytes
WIDTH = 4096
Call = Callable[[], Any]


def tensors(nbytes: int) -> tuple[Tensor, Tensor, Tensor]:
    """x and residual [T, D] of that many bytes, and a norm's weight."""
    size = min(WIDTH, nbytes // 2)
    x, residual = (torch.randn(nbytes // 2 // size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return x, residual, torch.ones(size, device="cuda", dtype=torch.bfloat16)


def our_calls(nbytes: int, peers: PeerMemory) -> dict[str, Call]:
    x, residual, weight = tensors(nbytes)
    rows = min(len(x), 512)
    values, ids = torch.randn(rows, device="cuda"), torch.arange(rows, device="cuda")

    def plain(two_shot: bool) -> Tensor:
        return peer_all_reduce(x, None, None, 0.0, peers, two_shot=two_shot)[0]

    return {
        "one-shot": lambda: plain(False),
        "two-shot": lambda: plain(True),
        "one-shot + norm": lambda: add_rms_norm(plain(False), residual, weight, 1e-6),
        "fused one-shot": lambda: peer_all_reduce(x, residual, weight, 1e-6, peers, two_shot=False),
        "fused two-shot": lambda: peer_all_reduce(x, residual, weight, 1e-6, peers, two_shot=True),
        f"choice of {rows}": lambda: peer_best_of_ranks(values, ids, peers),
    }


def their_calls(nbytes: int, group: dist.ProcessGroup) -> dict[str, Call]:
    import torch.distributed._symmetric_memory as symmetric

    x, residual, weight = tensors(nbytes)
    shared = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions need it no more, and say so
        symmetric.enable_symm_mem_for_group(group.group_name)
    symmetric.rendezvous(shared, group.group_name)
    shared.zero_()
    x.zero_()  # summed in place again and again
    name = group.group_name

    def nccl() -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    return {
        "NCCL": nccl,
        "torch one-shot": lambda: torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", name),
        "torch two-shot": lambda: torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", name),
        "NCCL + norm": lambda: add_rms_norm(nccl(), residual, weight, 1e-6),
        "norm alone": lambda: add_rms_norm(x, residual, weight, 1e-6),
    }


def capture(call: Call, num_calls: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(num_calls):
            call()
    return graph


def replay(graphs: list[torch.cuda.CUDAGraph], streams: list[torch.cuda.Stream], num_calls: int) -> float:
    """Microseconds a call, of the graphs that run at once; the last to end counts."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in graphs]
    for graph, stream, (start, end) in zip(graphs, streams, events, strict=True):
        with torch.cuda.stream(stream):
            start.record()
            graph.replay()
            end.record()
    torch.cuda.synchronize()
    return max(start.elapsed_time(end) for start, end in events) * 1000 / num_calls


def calls_in_graph(nbytes: int) -> int:
    return max(100 * 2**20 // max(nbytes, 2**20), 4)


def time_on_ranks(calls: dict[str, Call], nbytes: int, tp: TPGroup) -> dict[str, float]:
    """One rank's part; the slowest rank's median of each call."""
    stream, times = torch.cuda.Stream(), {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        num_calls = calls_in_graph(nbytes)
        graph = capture(call, num_calls, stream)
        found = []
        for _ in range(12):
            dist.barrier()
            found.append(replay([graph], [stream], num_calls))
        median = torch.tensor(statistics.median(found[2:]), device="cuda")
        times[name] = tp.all_gather(median).max().item()
    return times


def on_ranks(args: argparse.Namespace) -> Iterator[tuple[int, dict[str, float]]]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    tp = TPGroup.join(rank, size, device, "nccl", 300.0)
    assert isinstance(tp.peers, PeerCollectives), tp.peers
    for nbytes in args.sizes:
        calls = our_calls(nbytes, tp.peers._peers) | their_calls(nbytes, dist.group.WORLD)
        yield nbytes, time_on_ranks(calls, nbytes, tp)
    tp.leave()
    dist.destroy_process_group()


def on_streams(args: argparse.Namespace) -> Iterator[tuple[int, dict[str, float]]]:
    device, nbytes = torch.device("cuda", 0), BUFFERS * 32 * 2**20
    memory = torch.empty(args.streams, nbytes, dtype=torch.uint8, device=device)
    unsent = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    empty_buffers(memory)
    abort = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def ranks(buffers: list[int]) -> list[PeerMemory]:
        return [PeerMemory.of(r, buffers, abort, nbytes, device, 2 * args.streams) for r in range(args.streams)]

    real, idle = ranks([m.data_ptr() for m in memory]), ranks([unsent.data_ptr()] * args.streams)
    streams = [torch.cuda.Stream() for _ in real]
    for size in (size for size in args.sizes if size <= 2**23):  # in few enough pieces for idle memory
        times: dict[str, float] = {}
        for peers in idle:  # loads the kernels, where nothing is ever missing
            for call in our_calls(size, peers).values():
                unsent.zero_()
                call()
                torch.cuda.synchronize()
        by_rank = [our_calls(size, peers) for peers in real]
        x, residual, weight = tensors(size)
        add_rms_norm(x, residual, weight, 1e-6)
        for name in by_rank[0]:
            num_calls = calls_in_graph(size)
            graphs = [capture(calls[name], num_calls, s) for calls, s in zip(by_rank, streams, strict=True)]
            times[name] = statistics.median([replay(graphs, streams, num_calls) for _ in range(12)][2:])
        graphs = [capture(lambda x=x, r=residual, w=weight: add_rms_norm(x, r, w, 1e-6), 50, streams[0])]
        times["norm alone"] = statistics.median([replay(graphs, streams[:1], 50) for _ in range(12)][2:])
        yield size, times


def best_below(results: list[tuple[int, dict[str, float]]], better: str, others: list[str]) -> int:
    """The largest size up to which `better` is as quick as all others that were measured."""
    reached = 0
    for nbytes, times in results:
        if times[better] > min(times.get(other, math.inf) for other in others):
            break
        reached = nbytes
    return reached


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--streams", type=positive, help="ranks as this many streams of one process")
    parser.add_argument("--sizes", type=positive, nargs="+", default=SIZES, help="bytes (default: 2 KB … 32 MB)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it times GPUs, and PyTorch sees none")
    if args.streams is None and "RANK" not in os.environ:
        parser.error("start it with torchrun, or give --streams 2")
    torch.manual_seed(0)
    speaks, results = os.environ.get("RANK", "0") == "0", []
    for nbytes, times in on_streams(args) if args.streams else on_ranks(args):
        results.append((nbytes, times))
        if speaks:
            print(f"{nbytes:>9,}  " + "  ".join(f"{name} {us:.1f}" for name, us in times.items()), flush=True)
    if not speaks:
        return
    one_shot = best_below(results, "fused one-shot", ["fused two-shot", "NCCL + norm"])
    ours = best_below(results, "fused two-shot", ["NCCL + norm"])
    print(f"one-shot is best up to {one_shot:,} bytes; two-shot is no slower than NCCL + norm up to {ours:,}")
    if args.json:
        report = {
            "gpu": torch.cuda.get_device_name(),
            "ranks": args.streams or int(os.environ["WORLD_SIZE"]),
            "way": "streams" if args.streams else "GPUs",
            "torch": torch.__version__,
            "microseconds": dict(results),
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(exit_code(main))
