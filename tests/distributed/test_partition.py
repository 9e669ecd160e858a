"""What each rank owns: pure arithmetic, no process."""

import pytest

from nanollm.distributed.partition import HeadPartition, even_split, mlp_split, vocab_shard_size


def partitions(num_heads: int, num_kv_heads: int, tp: int) -> list[HeadPartition]:
    return [HeadPartition(num_heads, num_kv_heads, tp, rank) for rank in range(tp)]


def test_three_ranks_share_eight_kv_heads_as_3_3_2() -> None:
    ranks = partitions(32, 8, 3)
    assert [rank.kv_heads for rank in ranks] == [range(3), range(3, 6), range(6, 8)]
    assert [rank.heads for rank in ranks] == [range(12), range(12, 24), range(24, 32)]


def test_eight_ranks_have_one_of_eight_kv_heads_each() -> None:
    assert [rank.kv_heads for rank in partitions(32, 8, 8)] == [range(i, i + 1) for i in range(8)]


def test_eight_ranks_replicate_four_kv_heads_twice_and_halve_their_groups() -> None:
    ranks = partitions(32, 4, 8)
    assert [rank.kv_heads.start for rank in ranks] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [rank.heads for rank in ranks] == [range(4 * i, 4 * i + 4) for i in range(8)]


@pytest.mark.parametrize(
    ("tp", "heads", "kv_heads"),
    [
        (2, ["0-6", "6-9"], ["0-2", "2-3"]),
        (3, ["0-3", "3-6", "6-9"], ["0-1", "1-2", "2-3"]),
        (4, ["0-2", "2-3", "3-6", "6-9"], ["0-1", "0-1", "1-2", "2-3"]),
        (5, ["0-2", "2-3", "3-5", "5-6", "6-9"], ["0-1", "0-1", "1-2", "1-2", "2-3"]),
        (7, ["0-1", "1-2", "2-3", "3-5", "5-6", "6-8", "8-9"], ["0-1"] * 3 + ["1-2"] * 2 + ["2-3"] * 2),
        (9, [f"{i}-{i + 1}" for i in range(9)], ["0-1"] * 3 + ["1-2"] * 3 + ["2-3"] * 3),
    ],
)
def test_nine_heads_and_three_kv_heads_as_smollm2_has_them(tp: int, heads: list[str], kv_heads: list[str]) -> None:
    ranks = partitions(9, 3, tp)
    assert [f"{rank.heads.start}-{rank.heads.stop}" for rank in ranks] == heads
    assert [f"{rank.kv_heads.start}-{rank.kv_heads.stop}" for rank in ranks] == kv_heads


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(1, 1), (4, 2), (8, 8), (9, 3), (14, 2), (16, 8), (32, 4), (64, 8)]
)
def test_every_degree_covers_query_heads_once_and_kv_heads_at_least_once(num_heads: int, num_kv_heads: int) -> None:
    group = num_heads // num_kv_heads
    for tp in range(1, num_heads + 1):
        ranks = partitions(num_heads, num_kv_heads, tp)
        assert [head for rank in ranks for head in rank.heads] == list(range(num_heads))
        kv_heads = [head for rank in ranks for head in rank.kv_heads]
        assert sorted(set(kv_heads)) == list(range(num_kv_heads))
        assert len(kv_heads) == max(tp, num_kv_heads)  # no copy but those that more ranks than KV heads need
        for rank in ranks:
            assert rank.heads and {head // group for head in rank.heads} == set(rank.kv_heads)
            # The kernels give each of a rank's KV heads the same number of its query heads.
            assert len(rank.heads) % len(rank.kv_heads) == 0
        sizes = [len(rank.kv_heads) for rank in ranks]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("tp", [0, 5, 1024])
def test_more_ranks_than_heads_is_an_error_that_names_the_degrees(tp: int) -> None:
    with pytest.raises(ValueError, match=f"size {tp} doesn't work for a model with 4 attention heads: give 1 to 4"):
        HeadPartition(4, 2, tp, 0)


def test_even_split_gives_whole_units_larger_parts_first() -> None:
    assert even_split(10, 3) == [range(4), range(4, 7), range(7, 10)]
    assert even_split(3 * 128, 2, 128) == [range(256), range(256, 384)]
    assert even_split(5, 5) == [range(i, i + 1) for i in range(5)]
    for n, parts, unit in ((10, 3, 4), (2, 3, 1), (256, 3, 128)):
        with pytest.raises(ValueError, match=f"{n} can't be split into {parts} parts of whole units of {unit}"):
            even_split(n, parts, unit)


@pytest.mark.parametrize(
    ("intermediate_size", "tp", "unit"),
    [(12288, 3, 128), (1536, 5, 128), (1536, 12, 128), (1536, 13, 64), (96, 2, 32), (96, 7, 8), (97, 8, 1), (3, 3, 1)],
)
def test_feed_forward_units_are_as_large_as_leave_no_rank_idle(intermediate_size: int, tp: int, unit: int) -> None:
    split = mlp_split(intermediate_size, tp)
    assert [i for part in split for i in part] == list(range(intermediate_size))
    assert all(part and part.start % unit == 0 for part in split)
    assert max(map(len, split)) - min(map(len, split)) in (0, unit)


@pytest.mark.parametrize(("intermediate_size", "tp"), [(768, 4), (768, 8), (1536, 8)])
def test_feed_forward_shares_are_equal_where_units_of_32_or_more_allow_it(intermediate_size: int, tp: int) -> None:
    assert {len(part) for part in mlp_split(intermediate_size, tp)} == {intermediate_size // tp}


def test_feed_forward_smaller_than_the_ranks_is_an_error_that_names_the_degrees() -> None:
    with pytest.raises(ValueError, match=r"intermediate_size 3 can't be split over 4 ranks: give .* 1 to 3"):
        mlp_split(3, 4)


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 300, 49152, 151936])
def test_vocabulary_shards_are_whole_tiles_and_cover_every_id(vocab_size: int) -> None:
    for tp in range(1, 10):
        shard = vocab_shard_size(vocab_size, tp)
        assert shard % 128 == 0
        assert vocab_size <= tp * shard < vocab_size + tp * 128  # less than a tile of padding a rank
