"""Ranks agree on whether they use the peers' memory, whichever of them can't; torch's exchange of it, on a CPU."""

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

    def map_memory(rank: int, size: int, device: torch.device, group: dist.ProcessGroup, share: int) -> PeerCollectives:
        mapped.append(rank)
        if broken == "map" and rank == 1:
            raise RuntimeError("no memory\nand a backtrace")
        word = torch.zeros(1, dtype=torch.int32)
        return PeerCollectives(PeerMemory.of(rank, [0] * size, word, 2**20, device), word, None, Limits.of(size))

    patch = pytest.MonkeyPatch()
    patch.setattr(all_reduce, "_map_memory", map_memory)
    patch.setattr(all_reduce, "_obstacle", lambda wanted: "" if wanted else "not wanted")
    patch.setattr(all_reduce, "_uuid", lambda device: f"GPU {tp.rank}")
    for broken in ("nothing", "wanted", "reach", "map"):
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
        else:
            assert found == ("no memory" if tp.rank == 1 else "another rank could not map its peers' memory")
    assert len(mapped) == 2  # only where nothing stood against it


def test_one_rank_that_can_not_makes_all_fall_back() -> None:
    on_ranks(3, check_agreement)


def test_exchanges_meet_however_many_a_process_had_before() -> None:
    """Through a C++ store, which calls ours as torch's rendezvous does."""
    shared = dist.HashStore()
    stores = [all_reduce._OwnNumbers(shared) for _ in range(2)]
    first, second = (dist.PrefixStore("group", store) for store in stores)
    first.set("CUDASymmetricMemory/0/0", b"\x00\xff a")
    first.set("CUDASymmetricMemory/1/0", b"b")
    for number, expected in ((7, b"\x00\xff a"), (8, b"b")):
        second.set(f"CUDASymmetricMemory/{number}/1", b"c")
        second.wait([f"CUDASymmetricMemory/{number}/0"])
        assert second.get(f"CUDASymmetricMemory/{number}/0") == expected
    assert first.get("CUDASymmetricMemory/1/1") == b"c"


@pytest.mark.parametrize(("num_ranks", "like"), [(3, 4), (5, 8), (7, 8), (16, 8)])
def test_limits_of_any_number_of_ranks(num_ranks: int, like: int) -> None:
    assert Limits.of(num_ranks) == Limits.of(like) != Limits.of(2)
