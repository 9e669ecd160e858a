"""Collectives on gloo processes, against arithmetic."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nanollm.distributed import tp_group
from nanollm.distributed.tp_group import TPGroup, world_is_taken
from tests.distributed.on_ranks import on_ranks


def test_one_rank_needs_no_process_group() -> None:
    tp, x = TPGroup(), torch.randn(3, 4)
    assert tp.all_reduce(x) is x and tp.broadcast(x) is x
    assert torch.equal(tp.all_gather(x), x[None])
    tp.leave()
    assert not world_is_taken()


def test_ranks_that_never_met_can_meet_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tp_group, "_MEETING_SECONDS", 0.5)
    with pytest.raises(RuntimeError, match="Wait timeout"):
        TPGroup.join(0, 2, torch.device("cpu"), "gloo", 0.1, str(tmp_path / "store"))
    assert dist.distributed_c10d._world.group_count == 0  # groups are named by it, alike on all ranks
    assert not world_is_taken()


def share(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def check_collectives(tp: TPGroup) -> None:
    ranks = range(tp.size)
    for shape in ((1,), (7, 5), (129, 64), (3, 0)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            everyones = torch.stack([share(rank, shape, dtype) for rank in ranks])
            mine = everyones[tp.rank]
            total = tp.all_reduce(mine.clone())
            bound = 2.0 * tp.size * torch.finfo(dtype).eps
            assert total.dtype == dtype
            torch.testing.assert_close(total.double(), everyones.double().sum(0), atol=4 * bound, rtol=bound)
            copies = tp.all_gather(total)
            assert all(torch.equal(copies[0], copy) for copy in copies), "all_reduce must be bitwise equal everywhere"
            assert torch.equal(tp.all_gather(mine), everyones)
            assert torch.equal(tp.all_gather(mine[::2]), everyones[:, ::2])
            assert torch.equal(tp.broadcast(mine.clone()), everyones[0])
    ids = torch.tensor([2**31 - 1 - tp.rank, -(2**62)])
    assert tp.all_gather(ids)[:, 0].tolist() == [2**31 - 1 - rank for rank in ranks]


def check_fused(tp: TPGroup) -> None:
    """Without the peers' memory: the same sums and choices from plain collectives."""
    assert tp.describe() == f"tensor parallel {tp.size} over gloo (ranks on the CPU)"
    everyones = torch.stack([share(rank, (5, 8), torch.float32) for rank in range(tp.size)])
    residual, weight = share(10, (5, 8), torch.float32), share(11, (8,), torch.float32)
    for added in (None, residual):
        total = everyones.double().sum(0) + (0 if added is None else added.double())
        normed, summed = tp.all_reduce_norm(everyones[tp.rank].clone(), added, weight, 1e-6)
        torch.testing.assert_close(summed.double(), total, atol=1e-6, rtol=1e-6)
        expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight
        torch.testing.assert_close(normed.double(), expected, atol=1e-5, rtol=1e-5)
    values = torch.tensor([[1.0, 3.0], [2.0, 3.0], [-1.0, 0.0]])[tp.rank]  # ids that float32 doesn't hold
    chosen = tp.best_of_ranks(values, torch.tensor([2**31 - 1 - tp.rank, 2**30 + 1 + tp.rank]))
    assert chosen.tolist() == [2**31 - 2, 2**30 + 1]


def check_waiting(tp: TPGroup) -> None:
    """A slow rank is waited for, and meanwhile check is called; what it raises comes out."""

    def check() -> None:
        calls.append(time.monotonic())
        if len(calls) == 3:
            raise InterruptedError

    calls: list[float] = []
    if tp.rank == 0:
        tp.check = check
        with pytest.raises(InterruptedError):
            tp.all_reduce(torch.ones(1))
        tp.check = lambda: None
        assert calls[2] - calls[0] < 0.5
    else:
        time.sleep(1.0)
        assert tp.all_reduce(torch.ones(1)).item() == tp.size
    tp.all_reduce(torch.ones(1))


def check_timeout_and_leaving(tp: TPGroup) -> None:
    """An engine's group in a program that has one already: the program's is left as it was found."""
    inner = TPGroup.join(tp.rank, tp.size, torch.device("cpu"), "gloo", 1.0)
    assert inner.all_reduce(torch.ones(1)).item() == tp.size
    if tp.rank == 1:
        time.sleep(2.0)
    elif tp.rank == 0:
        with pytest.raises(TimeoutError, match="another rank took more than step_timeout = 1 s"):
            inner.all_reduce(torch.ones(1))
    inner.leave()
    inner.leave()
    assert dist.is_initialized()
    assert tp.all_reduce(torch.ones(1)).item() == tp.size
    tp.leave()
    assert not dist.is_initialized()


def check_all(world: TPGroup) -> None:
    pair = dist.new_group([0, 1])
    if world.rank < 2:
        check_collectives(TPGroup(world.rank, 2, pair))
    check_collectives(world)
    check_fused(world)
    check_waiting(world)
    check_timeout_and_leaving(world)


def test_collectives_of_two_and_three_ranks_waiting_and_leaving() -> None:
    on_ranks(3, check_all)
