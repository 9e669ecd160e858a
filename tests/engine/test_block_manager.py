"""Blocks: who gets which, in which order they are reused, and that a shared one always holds what its sharer needs."""

import random
from array import array
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanollm.engine.block_manager import BlockManager
from nanollm.engine.sequence import Sequence
from nanollm.sampling_params import SamplingParams
from tests.engine.line_count import count_lines
from tests.engine.simulation import COLLIDING_HASHES, kv_of, machine_settings


def make_sequence(tokens: list[int] | range, **kwargs: Any) -> Sequence:
    settings = {"seed": 0, "max_model_len": 2**20} | kwargs
    return Sequence(0, array("i", tokens), SamplingParams(max_tokens=None), **settings)  # type: ignore[arg-type]


def admit(manager: BlockManager, tokens: list[int] | range, **kwargs: Any) -> Sequence:
    """A new sequence with blocks for all its tokens, nothing computed yet."""
    seq = make_sequence(tokens, **kwargs)
    assert manager.admit(seq, keep_free=0)
    return seq


def run(manager: BlockManager, tokens: list[int] | range, **kwargs: Any) -> Sequence:
    """A new sequence whose tokens are all computed."""
    seq = admit(manager, tokens, **kwargs)
    seq.num_computed_tokens = seq.num_tokens
    manager.commit(seq)
    return seq


def num_hits(manager: BlockManager, tokens: list[int] | range, **kwargs: Any) -> int:
    """How many tokens a new sequence would find cached."""
    seq = admit(manager, tokens, **kwargs)
    hits = seq.num_computed_tokens
    manager.free(seq)
    return hits


# The order of the free list


def test_new_blocks_are_handed_out_in_order() -> None:
    manager = BlockManager(6, block_size=4)
    assert admit(manager, range(9)).block_ids == [0, 1, 2]
    assert admit(manager, range(20, 24)).block_ids == [3]
    assert manager._free.ids() == [4, 5]


def test_blocks_that_cache_nothing_are_reused_first_and_cached_ones_last() -> None:
    manager = BlockManager(6, block_size=4)
    seq = run(manager, range(10))  # blocks 0 and 1 are full, 2 is not
    manager.free(seq)
    assert manager._free.ids() == [2, 3, 4, 5, 1, 0]


def test_a_prefix_outlives_its_suffix() -> None:
    manager = BlockManager(4, block_size=4)
    manager.free(run(manager, range(16)))
    assert manager._free.ids() == [3, 2, 1, 0]
    manager.free(admit(manager, range(50, 58)))  # takes blocks 3 and 2
    assert num_hits(manager, range(17 - 1)) == 8


def test_cached_blocks_are_reused_least_recently_used_first() -> None:
    manager = BlockManager(6, block_size=4)
    a, b, c = (run(manager, range(start, start + 4)) for start in (0, 10, 20))
    for seq in (b, a, c):
        manager.free(seq)
    assert manager._free.ids() == [3, 4, 5, 1, 0, 2]
    assert num_hits(manager, range(10, 15)) == 4  # uses block 1 again, and a new one that stays uncached
    assert manager._free.ids() == [3, 4, 5, 0, 2, 1]


def test_a_shared_block_is_free_when_its_last_user_left() -> None:
    manager = BlockManager(8, block_size=4)
    a = run(manager, range(9))
    b = admit(manager, range(11))
    assert b.block_ids == [0, 1, 3] and b.num_computed_tokens == 8
    manager.free(a)
    assert manager._free.ids() == [2, 4, 5, 6, 7]
    manager.free(b)
    assert manager._free.ids() == [3, 2, 4, 5, 6, 7, 1, 0]


def test_without_prefix_caching_the_last_freed_blocks_are_reused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "_hash", None)  # and nothing is hashed
    manager = BlockManager(5, block_size=4, enable_prefix_caching=False)
    manager.free(run(manager, range(12)))
    assert manager._free.ids() == [0, 1, 2, 3, 4]
    assert num_hits(manager, range(12)) == 0 and manager.prefix_queries == 0


# What is found


@pytest.mark.parametrize(
    ("length", "hits"), [(1, 0), (15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (64, 48), (65, 64)]
)
def test_a_cached_prompt_is_found_in_whole_blocks_short_of_its_last_token(length: int, hits: int) -> None:
    manager = BlockManager(20, block_size=16)
    manager.free(run(manager, range(length)))
    seq = admit(manager, range(length))
    assert seq.num_computed_tokens == hits < length
    assert len(seq.block_ids) == -(-length // 16)
    assert (manager.prefix_hits, manager.prefix_queries) == (hits, 2 * length)


def test_a_prefix_is_found_while_its_owner_still_runs_but_only_as_far_as_it_was_computed() -> None:
    manager = BlockManager(20, block_size=4)
    owner = admit(manager, range(16))
    owner.num_computed_tokens = 11
    manager.commit(owner)
    assert num_hits(manager, range(16)) == 8


def test_equal_blocks_after_different_prefixes_are_different() -> None:
    manager = BlockManager(20, block_size=4)
    run(manager, [1, 1, 1, 1, 5, 5, 5, 5, 0])
    assert num_hits(manager, [2, 2, 2, 2, 5, 5, 5, 5, 0]) == 0
    assert num_hits(manager, [5, 5, 5, 5, 0]) == 0


def test_prompts_share_within_one_salt_only() -> None:
    manager = BlockManager(20, block_size=4)
    run(manager, range(9), cache_salt="a")
    salts = ("a", "b", "", "\ud800")  # the last is half a character, which JSON can carry and UTF-8 can't
    assert [num_hits(manager, range(9), cache_salt=salt) for salt in salts] == [8, 0, 0, 0]
    run(manager, range(9), cache_salt="\ud800")
    assert num_hits(manager, range(9), cache_salt="\ud800") == 8


def test_prefixes_whose_hashes_are_all_equal_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "_hash", lambda self, data: b"same")
    manager = BlockManager(20, block_size=4)
    first, second = [1, 1, 1, 1, 0], [2, 2, 2, 2, 0]
    run(manager, first)
    assert [num_hits(manager, tokens) for tokens in (first, second)] == [4, 0]
    run(manager, second)
    assert [num_hits(manager, tokens) for tokens in (first, second)] == [0, 4]
    assert num_hits(manager, second, cache_salt="other") == 0
    run(manager, [2] * 9)  # a second block that is like its parent
    assert num_hits(manager, [2] * 9) == num_hits(manager, [2] * 5) == 0


def test_a_collision_does_not_lead_into_the_blocks_of_another_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "_hash", lambda self, data: COLLIDING_HASHES["equal at the same depth"](data))
    ones, twos, threes = [1] * 4, [2] * 4, [3] * 4
    manager = BlockManager(20, block_size=4)
    run(manager, [*ones, *threes, *threes, 0])
    run(manager, [*twos, 0])  # takes the place of the first block
    assert num_hits(manager, [*twos, *threes, *threes, 0]) == 4
    run(manager, [*twos, *threes, 0])  # and of the second, which has the same tokens
    assert num_hits(manager, [*twos, *threes, *threes, 0]) == 8
    assert num_hits(manager, [*ones, *threes, *threes, 0]) == 0


def test_a_block_that_was_reused_is_not_found_under_its_old_prefix() -> None:
    manager = BlockManager(3, block_size=4)
    manager.free(run(manager, range(12)))
    manager.free(run(manager, range(20, 28)))  # takes the older blocks: the suffix
    assert manager._free.ids() == [0, 1, 2]
    assert num_hits(manager, range(12)) == 4
    manager.free(run(manager, range(20, 32)))  # takes them all
    assert num_hits(manager, range(12)) == 0


def test_who_wants_all_logits_shares_nothing_but_is_shared() -> None:
    manager = BlockManager(20, block_size=4)
    manager.free(run(manager, range(9)))
    assert num_hits(manager, range(9), all_logits=True) == 0
    manager.reset_prefix_cache()
    manager.free(run(manager, range(9), all_logits=True))
    assert num_hits(manager, range(9)) == 8


def test_of_equal_blocks_the_newest_is_found_and_the_older_is_reused_first() -> None:
    manager = BlockManager(6, block_size=4)
    a = admit(manager, range(9))
    b = run(manager, range(9))  # before a has computed anything
    a.num_computed_tokens = 9
    manager.commit(a)
    assert (a.block_ids, b.block_ids) == ([0, 1, 2], [3, 4, 5])
    manager.free(b)
    assert manager._free.ids() == [3, 4, 5]
    c = admit(manager, range(8))
    assert c.block_ids == [0, 3]
    manager.free(c)
    manager.free(a)
    assert manager._free.ids() == [2, 3, 4, 5, 1, 0]
    d = run(manager, range(8))  # its last token must be computed, so its last block is its own
    assert d.block_ids == [0, 2] and manager._free.ids() == [1, 3, 4, 5]


def test_a_suffix_stays_found_when_its_prompt_of_whole_blocks_is_asked_again_and_again() -> None:
    # The last block of such a prompt is always computed anew. Were the old one kept in the cache, it would be evicted
    # before the blocks that follow the new one, which then nobody could find any more.
    manager = BlockManager(7, block_size=4)
    manager.free(run(manager, range(8)))
    again = run(manager, range(8))
    again.token_ids.extend(range(8, 12))  # generated
    manager.grow(again)
    again.num_computed_tokens = 12
    manager.commit(again)
    manager.free(again)
    manager.free(run(manager, range(50, 66)))  # takes 4 of 7 blocks
    assert num_hits(manager, range(13)) == 12


def test_a_sequence_finds_its_own_blocks_when_it_comes_back() -> None:
    manager = BlockManager(8, block_size=4)
    seq = run(manager, range(10))
    manager.free(seq)
    assert (seq.block_ids, seq.content_ids, seq.num_computed_tokens, seq.num_sent_blocks) == ([], [], 0, 0)
    assert manager.admit(seq, keep_free=0)
    assert seq.block_ids[:2] == [0, 1] and seq.num_computed_tokens == 8


# Admission


def test_admission_counts_the_hits_that_it_takes_out_of_the_free_list() -> None:
    manager = BlockManager(3, block_size=4)
    manager.free(run(manager, range(8)))
    # 3 free blocks, 2 of them are hits; 2 more are needed.
    seq = make_sequence(range(16))
    before = manager._free.ids()
    assert not manager.admit(seq, keep_free=0)
    assert (manager._free.ids(), seq.block_ids, seq.num_computed_tokens) == (before, [], 0)
    manager.sanity_checks([])
    seq = make_sequence(range(12))
    assert not manager.admit(seq, keep_free=1)
    assert manager.admit(seq, keep_free=0) and manager.num_free == 0
    assert not manager.grow(seq)
    manager.sanity_checks([seq])


def test_hits_in_use_cost_nothing() -> None:
    manager = BlockManager(3, block_size=4)
    a = run(manager, range(8))
    b = admit(manager, range(9))
    assert b.block_ids == [0, 1, 2]
    manager.sanity_checks([a, b])


def test_a_reset_while_sequences_run_forgets_everything_and_they_add_nothing() -> None:
    manager = BlockManager(8, block_size=4)
    running, old = run(manager, range(8)), run(manager, range(20, 25))
    manager.free(old)
    manager.reset_prefix_cache()
    running.token_ids.extend(range(8, 13))
    while len(running.block_ids) < 4:
        assert manager.grow(running)
    running.num_computed_tokens = 13
    manager.commit(running)
    assert (num_hits(manager, range(13)), num_hits(manager, range(20, 25))) == (0, 0)
    manager.sanity_checks([running])
    manager.free(running)
    assert manager.admit(running, keep_free=0) and running.num_computed_tokens == 0  # later it takes part again
    running.num_computed_tokens = 13
    manager.commit(running)
    assert num_hits(manager, range(13)) == 12


# Costs


def test_each_block_of_a_sequence_is_hashed_once_in_its_life(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    hash_block = BlockManager._hash
    monkeypatch.setattr(BlockManager, "_hash", lambda self, data: hashed.append(data) or hash_block(self, data))
    manager = BlockManager(4, block_size=4)
    seq = make_sequence(range(16))
    assert not any(manager.admit(seq, keep_free=1) for _ in range(5))  # waits, and is looked up again and again
    assert len(hashed) == 1  # the first block is not there, so the others need not be asked for
    assert manager.admit(seq, keep_free=0)
    for seq.num_computed_tokens in range(17):
        manager.commit(seq)
        manager.commit(seq)
    assert len(hashed) == 4
    manager.free(seq)
    assert manager.admit(seq, keep_free=0) and seq.num_computed_tokens == 12
    seq.num_computed_tokens = 16
    manager.commit(seq)
    assert len(hashed) == 4


def operation_costs(num_blocks: int, num_others: int) -> list[int]:
    """Lines executed by each operation on a cache of `num_blocks` blocks that `num_others` sequences left full."""
    manager = BlockManager(num_blocks, block_size=4)
    others = [run(manager, [i, i, i, i, 0]) for i in range(num_others)]
    for other in others:
        manager.free(other)
    seq, again = make_sequence([7, 7, 7, 7, 0, 0, 0, 0, 0]), make_sequence([7, 7, 7, 7, 0, 0])
    costs = [count_lines(lambda: manager.admit(seq, keep_free=0))]
    seq.num_computed_tokens = 9
    costs.append(count_lines(lambda: manager.commit(seq)))
    costs.append(count_lines(lambda: manager.commit(seq)))
    costs.append(count_lines(lambda: manager.admit(again, keep_free=num_blocks)))
    costs.append(count_lines(lambda: manager.grow(seq)))
    costs.append(count_lines(lambda: manager.free(seq)))
    return costs


def test_no_operation_costs_more_in_a_larger_cache() -> None:
    assert operation_costs(num_blocks=30, num_others=8) == operation_costs(num_blocks=20_000, num_others=9_000)


# Everything, in any order


class _Owner:
    """A sequence in the model: how many of its blocks were committed, and in which epoch it was admitted."""

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self.num_committed = 0
        self.epoch = -1


class BlockManagerMachine(RuleBasedStateMachine):
    """The model: the free list as a list, the cache as a dict of prefixes, and what each slot of each block holds."""

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.sampled_from([1, 2, 4]),
        caching=st.sampled_from([True, True, True, False]),
        collisions=st.sampled_from([None, None, None, *COLLIDING_HASHES]),
    )
    def start(self, num_blocks: int, block_size: int, caching: bool, collisions: str | None) -> None:
        self.manager = BlockManager(num_blocks, block_size, caching)
        if collisions is not None:
            self.manager._hash = COLLIDING_HASHES[collisions]  # type: ignore[method-assign]
        self.block_size = block_size
        self.caching = caching
        self.hashes_differ = collisions is None
        self.owners: list[_Owner] = []
        self.parked: list[_Owner] = []  # preempted
        self.free = list(range(num_blocks))
        self.block_of: dict[Any, int] = {}  # cached prefix -> block
        self.key_of: dict[int, Any] = {}  # and back
        self.slots: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.epoch = 0

    def key(self, seq: Sequence, num_blocks: int) -> Any:
        """What has one place in the cache: a prefix, or if hashes are made equal, all that share a hash."""
        if not self.hashes_differ:
            return seq.block_hashes[num_blocks - 1]
        return seq.cache_salt, tuple(seq.token_ids[: num_blocks * self.block_size])

    def uncache(self, block: int) -> None:
        if block in self.key_of:
            del self.block_of[self.key_of.pop(block)]

    def admit(self, owner: _Owner, keep_free: int) -> bool:
        seq = owner.seq
        hits = [block.block_id for block in self.manager._match_prefix(seq)]
        assert len(hits) * self.block_size < seq.num_tokens
        assert not hits or (self.caching and not seq.all_logits)
        if self.hashes_differ:
            assert hits == [self.block_of[self.key(seq, i + 1)] for i in range(len(hits))]
        num_new = -(-seq.num_tokens // self.block_size) - len(hits)
        expected = num_new + sum(hit in self.free for hit in hits) + keep_free <= len(self.free)
        assert self.manager.admit(seq, keep_free) == expected
        if not expected:
            assert not seq.block_ids
            return False
        self.free = [block for block in self.free if block not in hits]
        new, self.free = self.free[:num_new], self.free[num_new:]
        for block in new:
            self.uncache(block)
        assert seq.block_ids == hits + new
        assert seq.num_computed_tokens == len(hits) * self.block_size
        owner.num_committed, owner.epoch = len(hits), self.epoch
        self.owners.append(owner)
        return True

    def some(self, i: int) -> _Owner:
        return self.owners[i % len(self.owners)]

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        salt=st.sampled_from(["", "", "", "salt"]),
        all_logits=st.sampled_from([False, False, False, True]),
        keep_free=st.integers(0, 2),
    )
    def admit_new(self, tokens: list[int], salt: str, all_logits: bool, keep_free: int) -> None:
        self.admit(_Owner(make_sequence(tokens, cache_salt=salt, all_logits=all_logits)), keep_free)

    @precondition(lambda self: self.parked)
    @rule(keep_free=st.integers(0, 2))
    def admit_preempted(self, keep_free: int) -> None:
        if self.admit(self.parked[-1], keep_free):
            self.parked.pop()

    @precondition(lambda self: self.owners)
    @rule(i=st.integers(0, 9), token=st.integers(0, 1))
    def append_token(self, i: int, token: int) -> None:
        self.some(i).seq.token_ids.append(token)

    @precondition(lambda self: self.owners)
    @rule(i=st.integers(0, 9))
    def grow(self, i: int) -> None:
        seq = self.some(i).seq
        if len(seq.block_ids) * self.block_size >= seq.num_tokens:
            return
        assert self.manager.grow(seq) == bool(self.free)
        if self.free:
            block = self.free.pop(0)
            self.uncache(block)
            assert seq.block_ids[-1] == block

    @precondition(lambda self: self.owners)
    @rule(i=st.integers(0, 9), num_new=st.integers(1, 14))
    def compute(self, i: int, num_new: int) -> None:
        owner = self.some(i)
        seq = owner.seq
        end = min(seq.num_computed_tokens + num_new, seq.num_tokens, len(seq.block_ids) * self.block_size)
        for position in range(seq.num_computed_tokens, end):
            context = self.read(seq, position)
            self.slots[seq.block_ids[position // self.block_size]][position % self.block_size] = kv_of(
                context, seq.token_ids[position]
            )
        seq.num_computed_tokens = end
        self.manager.commit(seq)
        num_full = end // self.block_size
        if self.caching and owner.epoch == self.epoch:
            for index in range(owner.num_committed, num_full):
                self.commit_block(self.key(seq, index + 1), seq.block_ids[index])
            owner.num_committed = max(owner.num_committed, num_full)

    def commit_block(self, key: Any, block: int) -> None:
        older = self.block_of.get(key)
        if older is not None:
            self.uncache(older)
            if older in self.free:
                self.free.remove(older)
                self.free.insert(0, older)
        self.block_of[key], self.key_of[block] = block, key

    @precondition(lambda self: self.owners)
    @rule(i=st.integers(0, 9), preempt=st.booleans())
    def free_blocks(self, i: int, preempt: bool) -> None:
        owner = self.some(i)
        self.owners.remove(owner)
        blocks = owner.seq.block_ids[::-1]
        self.manager.free(owner.seq)
        assert owner.seq.block_ids == []
        for block in blocks:
            if all(block not in other.seq.block_ids for other in self.owners):
                self.free.insert(len(self.free) if block in self.key_of else 0, block)
        if preempt:
            self.parked.append(owner)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.manager.reset_prefix_cache()
        self.block_of.clear()
        self.key_of.clear()
        self.epoch += 1

    @rule(seed=st.integers(0, 2**32 - 1))
    def many_operations(self, seed: int) -> None:
        """Gets a cache full and shared more often than hypothesis does one operation at a time."""
        numbers = random.Random(seed)
        for _ in range(30):
            i, operation = numbers.randrange(10), numbers.random()
            if operation < 0.3 or not self.owners:
                shared = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1][: numbers.randint(1, 10)]
                tokens = [*shared, numbers.randrange(2)]
                self.admit_new(tokens, numbers.choice(["", "", "salt"]), numbers.random() < 0.1, numbers.randrange(2))
            elif operation < 0.4 and self.parked:
                self.admit_preempted(keep_free=0)
            elif operation < 0.6:
                self.append_token(i, numbers.randrange(2))
                self.grow(i)
            elif operation < 0.8:
                self.compute(i, numbers.randint(1, 14))
            elif operation < 0.99:
                self.free_blocks(i, preempt=numbers.random() < 0.4)
            else:
                self.reset_prefix_cache()
            self.free_list_is_in_order()
            self.every_block_table_leads_to_the_kv_of_its_own_tokens()

    def read(self, seq: Sequence, end: int) -> list[Any]:
        """What the sequence's block table leads to, up to position `end`."""
        return [self.slots[seq.block_ids[p // self.block_size]][p % self.block_size] for p in range(end)]

    @invariant()
    def free_list_is_in_order(self) -> None:
        if hasattr(self, "manager"):
            self.manager.sanity_checks([owner.seq for owner in self.owners])
            assert self.manager._free.ids() == self.free
            assert {block.block_id for block in self.manager._cached.values()} == self.key_of.keys()

    @invariant()
    def every_block_table_leads_to_the_kv_of_its_own_tokens(self) -> None:
        for owner in getattr(self, "owners", ()):
            kv: list[int] = []
            for token in owner.seq.token_ids[: owner.seq.num_computed_tokens]:
                kv.append(kv_of(kv, token))
            assert self.read(owner.seq, len(kv)) == kv

    def teardown(self) -> None:
        while getattr(self, "owners", None):
            self.free_blocks(0, preempt=False)
        if hasattr(self, "manager"):
            self.free_list_is_in_order()
            assert sorted(self.free) == list(range(len(self.slots))) and self.manager.num_free == len(self.slots)


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = machine_settings(max_examples=250, steps=30)
