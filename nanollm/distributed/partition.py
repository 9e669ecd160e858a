"""What each tensor-parallel rank owns: the one place that decides it."""

from dataclasses import dataclass

from nanollm.kernels.tile_stats import TILE


def even_split(n: int, parts: int, unit: int = 1) -> list[range]:
    """Cut range(n) into `parts` contiguous ranges of whole units, whose sizes differ by one unit at most, larger first.

    ValueError if n is not a multiple of the unit, or there are fewer units than parts.
    """
    if n % unit or n // unit < parts:
        raise ValueError(f"{n} can't be split into {parts} parts of whole units of {unit}")
    small, extra = divmod(n // unit, parts)
    ends = [unit * (small * (i + 1) + min(i + 1, extra)) for i in range(parts)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def mlp_split(intermediate_size: int, tp: int, name: str = "intermediate_size") -> list[range]:
    """Split the feed-forward dimension, in units as large as leave no rank idle: aligned shards multiply faster.

    Units of 64 or 32 are taken instead of 128 where every rank then gets the same.
    name: what config.json calls the dimension, for the ValueError where there are more ranks than it has features.
    """
    unit = next((unit for unit in (128, 64, 32) if intermediate_size % (unit * tp) == 0), 128)
    while intermediate_size % unit or intermediate_size // unit < tp:
        unit //= 2
        if not unit:
            raise ValueError(
                f"{name} {intermediate_size} can't be split over {tp} ranks: give tensor_parallel_size 1 to "
                f"{intermediate_size}"
            )
    return even_split(intermediate_size, tp, unit)


def vocab_shard_size(vocab_size: int, tp: int) -> int:
    """Rows of the vocabulary on each rank, the last ones padding: whole tiles, the same on every rank."""
    return -(-vocab_size // (tp * TILE)) * TILE


@dataclass(frozen=True)
class HeadPartition:
    """The query and KV heads of one rank. Query heads stay with the KV head they read.

    With tp <= num_kv_heads each rank has whole KV groups, in counts that differ by one at most. With more ranks, each
    KV head is replicated on tp / num_kv_heads ranks (again differing by one at most), which share its query heads.
    ValueError, naming the degrees that work, if there are more ranks than query heads.
    """

    num_heads: int
    num_kv_heads: int
    tp: int
    rank: int

    def __post_init__(self) -> None:
        if not 1 <= self.tp <= self.num_heads:
            raise ValueError(
                f"tensor_parallel_size {self.tp} doesn't work for a model with {self.num_heads} attention heads: "
                f"give 1 to {self.num_heads}"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head in the whole model."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_heads(self) -> range:
        """This rank's KV heads, by their number in the whole model."""
        if self.tp <= self.num_kv_heads:
            return even_split(self.num_kv_heads, self.tp)[self.rank]
        head, _ = self._replica()
        return range(head, head + 1)

    @property
    def heads(self) -> range:
        """This rank's query heads, by their number in the whole model."""
        group = self.group_size
        if self.tp <= self.num_kv_heads:
            return range(self.kv_heads.start * group, self.kv_heads.stop * group)
        head, share = self._replica()
        return range(head * group + share.start, head * group + share.stop)

    def _replica(self) -> tuple[int, range]:
        """The KV head this rank has a copy of, and its share of that head's query heads."""
        for head, ranks in enumerate(even_split(self.tp, self.num_kv_heads)):
            if self.rank in ranks:
                return head, even_split(self.group_size, len(ranks))[self.rank - ranks.start]
        raise ValueError(f"rank {self.rank} is not below the tensor-parallel size {self.tp}")
