"""Calls of the kernels that reach into peers' memory, and what must come out, for ranks in processes or streams.

Every rank makes the inputs of all ranks, from seeds, and so knows what has to come out.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanollm.kernels.all_reduce import (
    PeerMemory,
    all_reduce_reference,
    best_of_ranks_reference,
    empty_buffers,
    peer_all_reduce,
    peer_best_of_ranks,
)

SENTINEL_32 = torch.tensor(0x80008000 - 2**32, dtype=torch.int32).view(torch.float32).item()
SPECIAL = [-0.0, 0.0, float("inf"), float("-inf"), float("nan"), SENTINEL_32, 1e-30]
EPS = 1e-6


@dataclass(frozen=True)
class Call:
    """One call that all ranks make. kind: "one_shot", "two_shot" or "choice", which has no columns."""

    kind: str
    num_rows: int
    size: int
    dtype: torch.dtype
    add: bool = False
    norm: bool = False
    special: bool = False
    seed: int = 0

    @staticmethod
    def draw(seed: int, sizes: Sequence[int], dtypes: Sequence[torch.dtype], max_rows: int) -> "Call":
        draw = random.Random(seed)
        kind = draw.choice(["one_shot"] * 4 + ["two_shot"] * 2 + ["choice"])
        num_rows = draw.choice([1, 2, 3, draw.randint(1, max_rows), max_rows])
        size, dtype = draw.choice(sizes), draw.choice(dtypes)
        return Call(kind, num_rows, size, dtype, draw.random() < 0.7, draw.random() < 0.7, draw.random() < 0.2, seed)


@dataclass
class Inputs:
    """Of all ranks: x [R, T, D], or values [R, S] and ids [R, S]."""

    x: Tensor
    ids: Tensor
    residual: Tensor | None
    weight: Tensor | None

    @staticmethod
    def of(call: Call, num_ranks: int, device: str) -> "Inputs":
        generator = torch.Generator(device).manual_seed(call.seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device).to(call.dtype)

        if call.kind == "choice":
            values = torch.randint(-3, 3, (num_ranks, call.num_rows), generator=generator, device=device).float()
            ids = torch.randint(0, 2**31 - 1, values.shape, generator=generator, device=device)
            values[values == 2] = -SENTINEL_32
            return Inputs(-values, ids, None, None)  # many equal ones, -0.0 too
        x = randn(num_ranks, call.num_rows, call.size)
        if call.special:
            where = torch.randperm(x.numel(), generator=generator, device=device)[:40]  # none twice: all ranks agree
            x.view(-1)[where] = torch.tensor(SPECIAL * 6, device=device)[: len(where)].to(x.dtype)
            x[:, 0, :3], x[:, 0, 3:6] = -0.0, SENTINEL_32
        residual = randn(call.num_rows, call.size) if call.add else None
        return Inputs(x, x, residual, randn(call.size) if call.norm else None)

    def run(self, call: Call, peers: PeerMemory) -> list[Tensor]:
        """This rank's part in the call."""
        if call.kind == "choice":
            return [peer_best_of_ranks(self.x[peers.rank], self.ids[peers.rank], peers)]
        x = self.x[peers.rank].clone()  # aligned like all others, so that they need one compiled kernel
        if call.add and (call.seed + peers.rank) % 3 == 0:
            x = torch.stack((x, x)).float() / 2  # parts that add up to x, on some ranks: they choose for themselves
        return list(peer_all_reduce(x, self.residual, self.weight, EPS, peers, two_shot=call.kind == "two_shot"))

    def check(self, call: Call, outputs: list[Tensor]) -> None:
        """Against sums in float64, rounded where the call rounds."""
        if call.kind == "choice":
            values = self.x.where(self.x != SENTINEL_32, 0)
            assert torch.equal(outputs[0], best_of_ranks_reference(values, self.ids)), call
            return
        # Two-shot rounds the ranks' sum too. In float64 a tie could be broken by what float32 does not hold.
        parts = all_reduce_reference(self.x)[0][None] if call.kind == "two_shot" else self.x
        parts = parts.double()
        residual = None if self.residual is None else self.residual.double()
        weight = None if self.weight is None else self.weight.double()
        total = parts.sum(0) if residual is None else parts.sum(0) + residual
        eps = torch.finfo(call.dtype).eps
        torch.testing.assert_close(outputs[1].double(), total, rtol=2 * eps, atol=1e-6 * len(self.x), equal_nan=True)
        if weight is not None:
            scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS)
            torch.testing.assert_close(
                outputs[0].double(), total * scale * weight, rtol=2 * eps, atol=1e-5, equal_nan=True
            )


def edge_calls(sizes: Sequence[int], dtypes: Sequence[torch.dtype], max_rows: int) -> list[Call]:
    """Each kind, fused and not, with a large call before a small one and the other way round."""
    kinds = ["one_shot", "one_shot", "choice", "two_shot", "two_shot", "choice", "one_shot", "two_shot"]
    calls: list[Call] = []
    for i, (kind, num_rows) in enumerate(zip(kinds, [max_rows, 1] * 3 + [max_rows - 1, 2], strict=True)):
        for add, norm in [(True, True), (False, True), (False, False)]:
            size, dtype = sizes[len(calls) % len(sizes)], dtypes[len(calls) % len(dtypes)]
            calls.append(Call(kind, num_rows, size, dtype, add, norm, i % 3 == 1, seed=len(calls)))
    return calls


def run_calls(rank: int, memory: list[Tensor], abort: Tensor, num_programs: int, calls: list[Call]) -> list[Tensor]:
    """One rank that is a process. memory: every rank's, all of it visible here. Returns all outputs, checked."""
    peers = PeerMemory.of(rank, [m.data_ptr() for m in memory], abort, memory[0].nbytes, memory[0].device)
    peers.num_programs = num_programs
    delay, outputs = random.Random(rank), []
    for call in calls:
        if delay.random() < 0.1:
            torch.randn(delay.randint(1, 500), 500).sum()
        inputs = Inputs.of(call, len(memory), str(memory[0].device))
        found = inputs.run(call, peers)
        inputs.check(call, found)
        outputs += found
    return outputs


def shared_memory(num_ranks: int, nbytes: int) -> list[Tensor]:
    """Buffers on the CPU that processes can share, emptied."""
    memory = [torch.empty(nbytes, dtype=torch.uint8).share_memory_() for _ in range(num_ranks)]
    for m in memory:
        empty_buffers(m)
    return memory


def is_empty(memory: Tensor) -> bool:
    """Whether all three buffers hold nothing but the sentinel: whatever was sent has been taken."""
    return bool((memory.view(torch.int16) == -0x8000).all())
