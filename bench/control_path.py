"""What it costs to tell ranks what to do: the way of a plan from one process to another, and an idle engine's CPU time.

    python bench/control_path.py --rows 1 32 256 512 --json control_path.json

A plan, of a decode step, is on its way from before it is packed until it is unpacked in the other process, which looks
for it all the time, as ranks do between steps that follow each other; the next one goes when that one is there. Each
process has a core: the fastest tenth is what it takes where others want those too. Idle is the processor time, as /proc
says it, of each process of an engine that has answered a request: rank 0's, the others', and what watches over them.
"""

import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from command_line import MODEL_HELP, at_least, parser_of, positive, positive_float
from workload import default_model_here, load_format

from nanollm.cli import exit_code
from nanollm.runtime.channel import Kind, Link
from nanollm.runtime.step_plan import StepPlan


def decode_plan(step: int, num_rows: int) -> StepPlan:
    """Every row computes the token it sampled last; one in 16 begins a block."""
    rows = np.arange(num_rows, dtype=np.int32)
    begun = rows[::16]
    return replace(
        StepPlan.empty(step),
        row_ids_B=rows,
        num_new_B=np.ones_like(rows),
        num_computed_B=rows + 512,
        on_device_B=np.ones_like(rows),
        append_rows=begun,
        append_starts=begun,
        append_counts=np.ones_like(begun),
        append_blocks=begun,
        logit_rows_L=rows,
        sampled_rows_S=rows,
    )


def follow(connection: socket.socket, num_plans: int, core: int) -> None:
    """The other process: receive the plans, then say when each was there, in nanoseconds of the monotonic clock."""
    os.sched_setaffinity(0, {core})
    link = Link(connection)
    link.send(Kind.READY)
    seen = np.zeros(num_plans, np.int64)
    for step in range(num_plans):
        message = link.recv(60.0, spin=60.0)
        assert message is not None
        StepPlan.unpack(np.frombuffer(message[1], np.int32), step)
        seen[step] = time.monotonic_ns()
        link.send(Kind.READY)
    link.send(Kind.CALL, seen)


def plan_microseconds(num_rows: int, num_plans: int) -> list[float]:
    """How long each plan of so many rows was on its way, the fastest first."""
    ours, theirs = socket.socketpair()
    cores = os.sched_getaffinity(0)
    first, *_, second = [*sorted(cores), *cores][:2]  # two that look all the time must not share one
    process = multiprocessing.get_context("spawn").Process(target=follow, args=(theirs, num_plans, second), daemon=True)
    process.start()
    os.sched_setaffinity(0, {first})
    theirs.close()
    link = Link(ours)
    link.recv()
    posted = np.zeros(num_plans, np.int64)
    for step in range(num_plans):
        plan = decode_plan(step, num_rows)
        posted[step] = time.monotonic_ns()
        link.send(Kind.PLAN, plan.pack())
        link.recv(60.0, spin=60.0)
    message = link.recv()
    assert message is not None
    process.join()
    link.close()
    os.sched_setaffinity(0, cores)
    return sorted(((np.frombuffer(message[1], np.int64) - posted) / 1e3).tolist())


async def idle_shares(model: str, tp: int, seconds: float) -> dict[str, float]:
    """The share of a core that each process of an idle engine takes, by process id."""
    from nanollm import AsyncLLMEngine, SamplingParams

    async with AsyncLLMEngine(
        model, load_format=load_format(model), skip_tokenizer_init=True, tensor_parallel_size=tp, max_model_len=64
    ) as engine:
        params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
        async for _ in engine.generate({"prompt_token_ids": [1, 2, 3]}, params, "first"):
            pass
        await asyncio.sleep(0.5)  # ranks go to sleep, threads that wait for work too
        before, start = cpu_seconds(), time.monotonic()
        await asyncio.sleep(seconds)
        after, passed = cpu_seconds(), time.monotonic() - start
    return {str(pid): (after[pid] - spent) / passed for pid, spent in before.items() if pid in after}


def cpu_seconds() -> dict[int, float]:
    """Processor time of each process that descends from this one."""
    found: dict[int, float] = {}
    parents = [os.getpid()]
    while parents:
        tasks = Path(f"/proc/{parents.pop()}/task").glob("*/children")
        for child in (int(pid) for task in tasks for pid in task.read_text().split()):
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            found[child] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            parents.append(child)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=positive, nargs="+", default=[1, 32, 256, 512])
    parser.add_argument("--plans", type=at_least(10), default=2000, help="of each size (default: %(default)s)")
    parser.add_argument("--model", help=MODEL_HELP)
    parser.add_argument("--tp", type=positive, default=2, help="ranks of the idle engine (default: %(default)s)")
    parser.add_argument("--seconds", type=positive_float, default=5.0, help="to watch it for (default: %(default)s)")
    args = parser.parse_args()
    latencies = {}
    print(f"{'rows':>5} {'bytes':>7} {'median µs':>10} {'fastest tenth':>14}")
    for num_rows in args.rows:
        times = plan_microseconds(num_rows, args.plans)
        latencies[num_rows] = {"median": statistics.median(times), "fastest_tenth": times[len(times) // 10]}
        size = decode_plan(0, num_rows).pack().nbytes
        print(
            f"{num_rows:5} {size:7} {latencies[num_rows]['median']:10.1f} {latencies[num_rows]['fastest_tenth']:14.1f}"
        )
    model = args.model or default_model_here()
    shares = asyncio.run(idle_shares(model, args.tp, args.seconds))
    print(f"an idle engine of {args.tp} ranks: {', '.join(f'{share:.1%}' for share in shares.values())} of a core")
    if args.json:
        args.json.write_text(json.dumps({"microseconds": latencies, "idle": shares}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(exit_code(main))
