"""Paged KV blocks: who owns which, which hold a known prefix, and which is evicted next."""

import secrets
from array import array

import xxhash

from nanollm.engine.sequence import Sequence


class Block:
    """One KV block. In the free list iff ref_count == 0; cached iff the prefix cache can find it by its hash.

    content_id names what the block holds: (parent content, tokens). It is never reused, so comparing it compares
    the whole prefix, even if two hashes collide.
    """

    __slots__ = ("block_id", "content_id", "hash", "next", "parent", "prev", "ref_count", "tokens")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.hash: bytes | None = None
        self.parent: int | str = 0  # content_id of the block before; of a first block, the cache salt
        self.tokens: array[int] | None = None
        self.content_id = 0
        self.prev = self.next = self


class FreeList:
    """Free blocks in the order they will be reused, doubly linked: every operation is O(1)."""

    def __init__(self) -> None:
        self._end = Block(-1)  # sentinel: _end.next is reused first, _end.prev last
        self.size = 0

    def _link(self, block: Block, before: Block) -> None:
        block.prev, block.next = before.prev, before
        before.prev.next = before.prev = block
        self.size += 1

    def push_first(self, block: Block) -> None:
        self._link(block, self._end.next)

    def push_last(self, block: Block) -> None:
        self._link(block, self._end)

    def remove(self, block: Block) -> None:
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = block
        self.size -= 1

    def pop_first(self) -> Block:
        block = self._end.next
        self.remove(block)
        return block

    def ids(self) -> list[int]:
        """Block ids, next to be reused first (for tests and checks: O(n))."""
        ids, block = [], self._end.next
        while block is not self._end:
            ids.append(block.block_id)
            block = block.next
        return ids


class BlockManager:
    """Allocates, shares, frees and evicts `num_blocks` blocks of `block_size` tokens.

    A full block of known tokens is *committed*: hashed over (parent hash, tokens), the cache salt standing in for the
    parent of a first block. Later sequences with the same prefix share it. Blocks that nobody uses stay cached until
    they are needed; sequences free their blocks last to first, so that a prefix outlives its suffix.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        self._free = FreeList()
        for block in self.blocks:
            self._free.push_last(block)
        self._cached: dict[bytes, Block] = {}
        self._hash_seed = secrets.randbits(64)  # so that nobody can craft prompts that collide
        self._next_content_id = 1
        self._epoch = 0
        self.prefix_queries = 0  # prompt tokens looked up
        self.prefix_hits = 0  # prompt tokens found

    @property
    def num_free(self) -> int:
        return self._free.size

    def admit(self, seq: Sequence, keep_free: int) -> bool:
        """Give `seq` blocks for all its tokens, shared where its prefix is cached; False, changing nothing, if that
        would leave fewer than `keep_free` blocks. Sets num_computed_tokens to the tokens that need no computing.

        At least one token is always left to compute, since its logits are what the step is for. A sequence that wants
        something of every prompt token shares nothing.
        """
        hits = self._match_prefix(seq) if self.enable_prefix_caching else self._leaders_blocks(seq)
        num_new = -(-seq.num_tokens // self.block_size) - len(hits)
        # A hit that nobody uses comes out of the free list too.
        if num_new + sum(block.ref_count == 0 for block in hits) + keep_free > self.num_free:
            return False
        for block in hits:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1
        seq.block_ids = [block.block_id for block in hits]
        seq.content_ids = [block.content_id for block in hits]
        seq.prefix_epoch = self._epoch
        seq.num_computed_tokens = len(hits) * self.block_size
        for _ in range(num_new):
            self.grow(seq)
        if self.enable_prefix_caching and not seq.needs_whole_prompt:
            self.prefix_queries += seq.num_tokens
            self.prefix_hits += seq.num_computed_tokens
        return True

    def grow(self, seq: Sequence) -> bool:
        """Append one free block to the sequence's table; False if there is none."""
        if not self._free.size:
            return False
        block = self._free.pop_first()
        self._uncache(block)
        block.ref_count = 1
        seq.block_ids.append(block.block_id)
        return True

    def commit(self, seq: Sequence) -> None:
        """Make the sequence's full blocks of known, computed tokens findable. Cheap when there is no new one."""
        num_full = min(seq.num_computed_tokens, len(seq.token_ids)) // self.block_size
        if num_full <= len(seq.content_ids) or not self.enable_prefix_caching or seq.prefix_epoch != self._epoch:
            return
        self._hash_blocks(seq, num_full)
        for i in range(len(seq.content_ids), num_full):
            parent = seq.content_ids[i - 1] if i else seq.cache_salt
            tokens = self._block_tokens(seq, i)
            block, known = self.blocks[seq.block_ids[i]], self._cached.get(seq.block_hashes[i])
            if known is not None and known.parent == parent and known.tokens == tokens:
                block.content_id = known.content_id  # computed by two sequences: two blocks, one content
            else:
                block.content_id = self._next_content_id
                self._next_content_id += 1
            if known is not None:
                # The newest stays findable: it will be freed together with its suffix, so that none outlives it.
                self._uncache(known)
                if known.ref_count == 0:
                    self._free.remove(known)
                    self._free.push_first(known)
            block.hash, block.parent, block.tokens = seq.block_hashes[i], parent, tokens
            self._cached[block.hash] = block
            seq.content_ids.append(block.content_id)

    def free(self, seq: Sequence) -> None:
        """Give back the sequence's blocks, last first. Blocks without a cached prefix are the first to be reused."""
        for block_id in reversed(seq.block_ids):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                (self._free.push_first if block.hash is None else self._free.push_last)(block)
        seq.block_ids = []
        seq.content_ids = []
        seq.num_sent_blocks = 0
        seq.num_computed_tokens = 0

    def is_cached(self, block_hash: bytes | None) -> bool:
        """Whether a block of this hash can be found; False for None."""
        return block_hash in self._cached

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Running sequences keep their blocks but will commit no more of them."""
        self._epoch += 1
        for block in list(self._cached.values()):
            self._uncache(block)

    def sanity_checks(self, sequences: list[Sequence]) -> None:
        """Raise AssertionError unless the books balance, `sequences` being all that own blocks. For tests: O(n)."""
        owners = [0] * len(self.blocks)
        for seq in sequences:
            assert len(set(seq.block_ids)) == len(seq.block_ids), "a sequence owns a block once"
            for block_id in seq.block_ids:
                owners[block_id] += 1
        free_ids = self._free.ids()
        assert len(free_ids) == len(set(free_ids)) == self._free.size
        for block in self.blocks:
            assert block.ref_count == owners[block.block_id], f"block {block.block_id}: references"
            assert (block.hash is None) == (block.tokens is None)
            assert block.hash is None or self._cached.get(block.hash) is block
        assert set(free_ids) == {b.block_id for b in self.blocks if b.ref_count == 0}, "free iff ref_count == 0"
        is_cached = [self.blocks[block_id].hash is not None for block_id in free_ids]
        assert is_cached == sorted(is_cached), "blocks that cache nothing are reused first"
        assert all(block.hash == key for key, block in self._cached.items())

    def _match_prefix(self, seq: Sequence) -> list[Block]:
        """The longest cached prefix of the sequence's tokens, short of its last token; sets first_miss."""
        seq.first_miss = None
        if seq.needs_whole_prompt:
            return []
        num_full = (seq.num_tokens - 1) // self.block_size
        if seq.leader is not None and not seq.block_hashes:  # the same prompt has the same hashes
            seq.block_hashes = seq.leader.block_hashes[: seq.num_prompt_tokens // self.block_size]
        hits: list[Block] = []
        parent: int | str = seq.cache_salt
        for i in range(num_full):
            if i == len(seq.block_hashes):
                self._hash_blocks(seq, i + 1)
            block = self._cached.get(seq.block_hashes[i])
            # The hash only finds the candidate; parent and tokens decide.
            if block is None or block.parent != parent or block.tokens != self._block_tokens(seq, i):
                seq.first_miss = seq.block_hashes[i]
                break
            hits.append(block)
            parent = block.content_id
        return hits

    def _leaders_blocks(self, seq: Sequence) -> list[Block]:
        """What the cache would find of the prompt of a request with n > 1 if it were on: the first one's blocks."""
        if seq.leader is None:
            return []
        num_full = min(seq.num_prompt_tokens - 1, seq.leader.num_computed_tokens) // self.block_size
        return [self.blocks[block_id] for block_id in seq.leader.block_ids[:num_full]]

    def _block_tokens(self, seq: Sequence, i: int) -> "array[int]":
        return seq.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def _hash_blocks(self, seq: Sequence, num_blocks: int) -> None:
        """Extend seq.block_hashes to `num_blocks`; each block is hashed once in its sequence's life."""
        for i in range(len(seq.block_hashes), num_blocks):
            parent = seq.block_hashes[i - 1] if i else b"salt:" + seq.cache_salt.encode(errors="surrogatepass")
            seq.block_hashes.append(self._hash(parent + self._block_tokens(seq, i).tobytes()))

    def _hash(self, data: bytes) -> bytes:
        return xxhash.xxh3_128_digest(data, seed=self._hash_seed)

    def _uncache(self, block: Block) -> None:
        if block.hash is not None:
            del self._cached[block.hash]
            block.hash = block.tokens = None
