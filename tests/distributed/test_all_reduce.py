"""Ranks agree on whether they use the peers' memory, whichever of them can't; torch's exchange of it, on a CPU."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from nanollm.distributed import all_reduce
from nanollm.distributed.all_reduce import Limits, PeerCollectives, connect_peers
from nanollm.distributed.tp_group import TPGroup
from nanollm.kernels.all_reduce import PeerMemory
from tests.distributed.on_ranks import on_ranks

CPU = torch.device("cpu")


def check_agreement(tp: TPGroup) -> None:
    mapped = []

    def allocate(device: torch.device) -> torch.Tensor:
        if broken == "allocate" and tp.rank == 1:
            raise torch.OutOfMemoryError
        return torch.zeros(2**20, dtype=torch.uint8)

    def map_memory(memory: torch.Tensor, rank: int, size: int, group: dist.ProcessGroup, share: int) -> PeerCollectives:
        mapped.append(rank)
        if broken == "map" and rank == 1:
            raise RuntimeError("no memory\nand a backtrace")
        word = torch.zeros(1, dtype=torch.int32)
        return PeerCollectives(PeerMemory.of(rank, [0] * size, word, memory.nbytes, CPU), word, None, Limits.of(size))

    patch = pytest.MonkeyPatch()
    patch.setattr(all_reduce, "_allocate", allocate)
    patch.setattr(all_reduce, "_map_memory", map_memory)
    patch.setattr(all_reduce, "_obstacle", lambda wanted: "" if wanted else "not wanted")
    patch.setattr(all_reduce, "_uuid", lambda device: f"GPU {tp.rank}")
    for broken in ("nothing", "wanted", "reach", "allocate", "map"):
        patch.setattr(
            all_reduce, "_unreachable", lambda *given, fails=broken == "reach" and tp.rank == 2: "far" * fails
        )
        wanted = broken != "wanted" or tp.rank == 0
        found = connect_peers(tp.rank, tp.size, CPU, tp._group, wanted, tp.all_gather)
        if broken == "nothing":
            assert isinstance(found, PeerCollectives)
        elif broken == "wanted":
            assert found == ("another rank can't reach its peers" if tp.rank == 0 else "not wanted")
        elif broken == "reach":
            assert found == ("far" if tp.rank == 2 else "another rank can't reach its peers")
        elif broken == "allocate":
            assert found == ("OutOfMemoryError: " if tp.rank == 1 else "another rank has no memory to share")
        else:
            assert found == (
                "RuntimeError: no memory" if tp.rank == 1 else "another rank could not map its peers' memory"
            )
    assert len(mapped) == 2  # only where nothing stood against it


def test_one_rank_that_can_not_makes_all_fall_back() -> None:
    on_ranks(3, check_agreement)


def test_exchanges_meet_however_many_a_process_had_before() -> None:
    """Through C++, which calls our store as torch's rendezvous does, for each rank with numbers of its own."""
    shared, numbers = dist.HashStore(), {0: (0, 1, 2), 1: (7, 8, 9)}
    stores = [all_reduce._OwnNumbers(dist.PrefixStore("group", shared)) for _ in numbers]
    got: dict[int, list[bytes]] = {}

    def exchange(rank: int) -> None:
        store = dist.PrefixStore("CUDASymmetricMemory", stores[rank])
        first, second, third = numbers[rank]
        store.set(f"{first}/{rank}", b"\x00\xff%d" % rank)
        if store.add(f"{second}/num_members", 1) == 2:
            store.set(f"{second}/last_member", b"")
        store.wait([f"{second}/last_member"], timedelta(seconds=20))
        store.set(f"{third}/{rank}", b"%d" % rank)
        store.wait([f"{third}/{1 - rank}"])
        got[rank] = [store.get(f"{first}/{1 - rank}"), *store.multi_get([f"{third}/{1 - rank}"])]

    threads = [threading.Thread(target=exchange, args=(rank,), daemon=True) for rank in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == {0: [b"\x00\xff1", b"1"], 1: [b"\x00\xff0", b"0"]}


@pytest.mark.parametrize("num_parts", [1, 2, 8])
def test_parts_on_some_ranks_do_not_change_the_way(num_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = []
    monkeypatch.setattr(all_reduce, "peer_all_reduce", lambda *given, two_shot: ways.append(two_shot))
    word = torch.zeros(1, dtype=torch.int32)
    found = PeerCollectives(PeerMemory.of(0, [0] * 2, word, 2**20, CPU), word, None, Limits(4096, 2**20))
    for num_rows in (32, 33):
        residual_TD = torch.zeros(num_rows, 64, dtype=torch.bfloat16)
        x_ZTD = torch.zeros(num_parts, num_rows, 64)
        found.all_reduce(residual_TD if num_parts == 1 else x_ZTD, residual_TD, torch.ones(64), 1e-6)
    assert ways == [False, True]


@pytest.mark.parametrize(("num_ranks", "like"), [(3, 4), (5, 8), (7, 8), (16, 8)])
def test_limits_of_any_number_of_ranks(num_ranks: int, like: int) -> None:
    assert Limits.of(num_ranks) == Limits.of(like) != Limits.of(2)
