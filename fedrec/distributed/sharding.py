"""Which shard a client belongs to, and which rank a shard. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

from fedrec.exceptions import ConfigurationError, expected

__all__ = ["Sharding"]


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Clients in shards of equal size, and shards in ranks.

    Shards are blocks of clients that follow each other in the manifest. They do not depend on the
    number of ranks: whatever is a function of the shards is the same with any number.

    Args:
        client_ids: All clients of the recording, in the order of its manifest.
        num_shards: $V$, at least the number of ranks, at most the number of clients.
        rank: This process.
        size: Number of processes.

    Raises:
        ConfigurationError: If `num_shards` is out of range.

    Examples:
        >>> sharding = Sharding(client_ids=("a", "b", "c", "d"), num_shards=2, rank=1, size=2)
        >>> [sharding.shard_of(c) for c in "abcd"], list(sharding.own)
        ([0, 0, 1, 1], [1])
        >>> sharding.owned(["d", "a"])
        ['d']
    """

    client_ids: tuple[str, ...]
    num_shards: int
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not self.size <= self.num_shards <= len(self.client_ids):
            requirement = (
                f"from {self.size}, the number of ranks, to {len(self.client_ids)}, that of clients"
            )
            raise ConfigurationError(expected("num_shards", requirement, self.num_shards))

    @cached_property
    def _shards(self) -> dict[str, int]:
        count = len(self.client_ids)
        return {c: i * self.num_shards // count for i, c in enumerate(self.client_ids)}

    def shard_of(self, client_id: str) -> int:
        """Return the shard of a client, from 0 on."""
        return self._shards[client_id]

    def owner(self, shard: int) -> int:
        """Return the rank that a shard belongs to."""
        return shard * self.size // self.num_shards

    @cached_property
    def own(self) -> range:
        """The shards of this rank, which follow each other."""
        own = [v for v in range(self.num_shards) if self.owner(v) == self.rank]
        return range(own[0], own[-1] + 1)

    def is_own(self, client_id: str) -> bool:
        """Return whether a client belongs to this rank."""
        return self._shards[client_id] in self.own

    def owned(self, client_ids: Iterable[str]) -> list[str]:
        """Return the clients that belong to this rank."""
        return [c for c in client_ids if self.is_own(c)]

    def in_order(self, client_ids: Iterable[str]) -> list[str]:
        """Return the clients by shard, and in the given order within each."""
        return sorted(client_ids, key=self.shard_of)

    def by_shard(self, client_ids: Iterable[str]) -> dict[int, list[str]]:
        """Return the clients of each shard that has any, in the order of the shards."""
        groups = groupby(self.in_order(client_ids), key=self.shard_of)
        return {shard: list(group) for shard, group in groups}

    def blocks(self, width: int) -> list[slice]:
        """Return a block of columns for each shard: they follow each other, and are all of them."""
        ends = [v * width // self.num_shards for v in range(self.num_shards + 1)]
        return [slice(*pair) for pair in pairwise(ends)]

    def blocks_by_rank(self, width: int) -> list[list[slice]]:
        """Return the blocks of columns of each rank: those of its shards."""
        blocks = self.blocks(width)
        ranks = groupby(range(self.num_shards), key=self.owner)
        return [[blocks[v] for v in shards] for _, shards in ranks]

    def counts(self, client_ids: Sequence[str]) -> list[int]:
        """Return how many of the clients belong to each rank."""
        return self.owned_counts(self._shards[c] for c in client_ids)

    def owned_counts(self, shards: Iterable[int]) -> list[int]:
        """Return how many shards belong to each rank; one that is named twice counts twice."""
        counts = [0] * self.size
        for shard in shards:
            counts[self.owner(shard)] += 1
        return counts
