"""A recording as a recovery sees it: by the clients that remain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from fedrec.exceptions import ConfigurationError

if TYPE_CHECKING:
    from fedrec.distributed.ranks import Ranks
    from fedrec.distributed.sharding import Sharding
    from fedrec.history.base import HistoryStore
    from fedrec.history.manifest import Manifest
    from fedrec.history.rounds import RoundIndex
    from fedrec.types import CohortUpdates, RoundRecord

__all__ = ["HistoryView"]

T = TypeVar("T")


class HistoryView:
    """A recording, and the clients of it that take part in a recovery.

    Methods answer for the clients that remain, unless clients are named. A history need not store
    all of their updates (`keep`, see `LMDBHistory`): `cohort` says who took part in a round, `kept`
    whose update can be read.

    Args:
        history: The recording.
        remaining: Clients that take part; `None` for all of the recording.
        sharding: Whose updates this process reads, where several share a recovery, or clients are
            in shards; or `None`. Then a round has `ShardedUpdates`.
        ranks: The processes.

    Attributes:
        remaining: Clients that take part, as given.

    Examples:
        >>> import torch
        >>> from fedrec.history import Manifest, MemoryHistory
        >>> from fedrec.types import CohortUpdates, RoundRecord
        >>> history = MemoryHistory()
        >>> history.begin(Manifest(
        ...     model_fingerprint="f", num_parameters=2, clients={"a": 10, "b": 20}, seed=0,
        ...     aggregator={"class_path": "fedrec.aggregators.FedAvg", "init_args": {}},
        ...     server_lr=0.1, max_rounds=1,
        ... ))
        >>> history.write_round(RoundRecord(
        ...     round=0, global_weights=torch.zeros(2), aggregate=torch.tensor([3.0, 4.0]),
        ...     sent=CohortUpdates(
        ...         client_ids=("a", "b"), updates=torch.tensor([[1.0, 2.0], [4.0, 5.0]]),
        ...         num_samples=torch.tensor([10, 20]),
        ...     ),
        ... ))
        >>> view = HistoryView(history, ["b"])
        >>> view.cohort(0), view.excluded(0), view.read(0).updates
        (('b',), ('a',), tensor([[4., 5.]]))
    """

    def __init__(
        self,
        history: HistoryStore,
        remaining: Iterable[str] | None = None,
        *,
        sharding: Sharding | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._history = history
        self.remaining = tuple(history.manifest.clients if remaining is None else remaining)
        self._remain = frozenset(self.remaining)
        self._sharding, self._ranks = sharding, ranks
        self._is_part = False  # of one shard, without the other processes
        self._last: RoundIndex | None = None

    @property
    def manifest(self) -> Manifest:
        """The manifest of the recording."""
        return self._history.manifest

    @property
    def forgotten(self) -> tuple[str, ...]:
        """Clients that were forgotten: nothing they sent is stored any more."""
        return self._history.forgotten

    def rounds(self) -> range:
        """Return the rounds that are stored, `range(0, k)`."""
        return self._history.rounds()

    def whole(self) -> HistoryView:
        """Return the view in which all clients of the recording remain."""
        return HistoryView(self._history, sharding=self._sharding, ranks=self._ranks)

    def shards(self) -> dict[int | None, HistoryView]:
        """Return a view of each of this process's shards of clients, for these clients alone.

        A shard of which nobody remains is left out. Without shards there is one view, as `None`.
        """
        if self._sharding is None:
            return {None: self}
        found: dict[int | None, HistoryView] = {}
        for shard, ids in self._sharding.by_shard(self._sharding.owned(self.remaining)).items():
            found[shard] = view = HistoryView(self._history, ids)
            view._is_part = True
        return found

    def sharded(self, sent: CohortUpdates) -> CohortUpdates:
        """Return updates of which every process has all, with this process's rows, if in shards."""
        if self._sharding is None or self._ranks is None:
            return sent
        from fedrec.distributed.updates import ShardedUpdates

        return ShardedUpdates.of(sent, self._sharding, self._ranks)

    def gather(self, value: T) -> list[T]:
        """Return the value of every process that shares the recovery, in order, in all of them."""
        return [value] if self._ranks is None else self._ranks.gather(value)

    def _index(self, t: int) -> RoundIndex:
        """Return what is known of a round, which several methods ask for in a row."""
        last = self._last  # the thread that reads ahead asks for another round
        if last is None or last.round != t:
            self._last = last = self._history.index(t)
        return last

    def cohort(self, t: int) -> tuple[str, ...]:
        """Return the remaining clients whose updates were aggregated in a round, in row order.

        Raises:
            RoundNotFoundError: If the round is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        return tuple(c for c in self._index(t).present if c in self._remain)

    def kept(self, t: int) -> tuple[str, ...]:
        """Return the clients of `cohort(t)` whose updates can be read.

        Raises:
            RoundNotFoundError: If the round is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        return tuple(c for c in self._index(t).kept if c in self._remain)

    def present(self, t: int) -> tuple[str, ...]:
        """Return all clients whose updates were aggregated in a round, excluded ones too.

        Raises:
            RoundNotFoundError: If the round is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        return self._index(t).present

    def excluded(self, t: int) -> tuple[str, ...]:
        """Return the clients whose updates were aggregated in a round and who do not remain.

        Raises:
            RoundNotFoundError: If the round is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        return tuple(c for c in self._index(t).present if c not in self._remain)

    def bounds(self, t: int) -> dict[str, float]:
        """Return a number for each client of `kept(t)` that no magnitude in its update exceeds.

        Raises:
            RoundNotFoundError: If the round is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        bounds = self._index(t).bounds
        return {c: bound for c, bound in bounds.items() if c in self._remain}

    def read(self, t: int, client_ids: Sequence[str] | None = None) -> RoundRecord:
        """Read a round; the result owns its memory.

        Args:
            t: Round, 0-based.
            client_ids: Read only these clients' updates, in this order, whether or not they
                remain; by default those of `kept(t)`.

        Raises:
            RoundNotFoundError: If the round, or the update of one of the clients, is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        asked = tuple(self.kept(t) if client_ids is None else client_ids)
        if self._sharding is None or self._ranks is None:
            record = self._history.read_round(t, asked)
            return replace(record, sent=record.sent.in_process()) if self._is_part else record
        import torch

        from fedrec.distributed.updates import ShardedUpdates

        sharding, index = self._sharding, self._index(t)
        kept = frozenset(index.kept)
        missing = [c for c in asked if c not in kept]
        # What is not there is refused in all processes.
        record = self._history.read_round(t, missing or sharding.in_order(sharding.owned(asked)))
        sent = ShardedUpdates(
            part=record.sent.in_process().updates,
            sharding=sharding,
            ranks=self._ranks,
            client_ids=asked,
            num_samples=torch.tensor([index.num_samples[c] for c in asked], dtype=torch.int64),
            refused=record.refused,
        )
        return replace(record, sent=sent)

    def count(self, rounds: Iterable[int]) -> tuple[int, int]:
        """Count the updates of the remaining clients in some rounds.

        Returns:
            How many can be read, and how many were sent.

        Raises:
            RoundNotFoundError: If one of the rounds is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        kept = sent = 0
        for t in rounds:
            index = self._index(t)
            kept += len(self._remain.intersection(index.kept))
            sent += len(self._remain.intersection(index.present))
        return kept, sent

    def require_excluded(self, rounds: Iterable[int], method: str) -> None:
        """Check that the updates of the excluded clients can be read.

        Args:
            rounds: Rounds that count.
            method: Who needs them, for the message.

        Raises:
            ConfigurationError: If an update of an excluded client is not stored.
        """
        if self.forgotten:
            raise ConfigurationError(
                f"{method} needs what the excluded clients sent, but the history has forgotten "
                f"{list(self.forgotten[:5])}. HINT: forget clients after the recovery."
            )
        for t in rounds:
            lost = sorted(set(self._index(t).lost) - self._remain)
            if lost:
                raise ConfigurationError(
                    f"{method} needs what the excluded clients sent, but the history kept nothing "
                    f"of {lost[:5]} in round {t} (keep={dict(self.manifest.keep)}). HINT: record "
                    "with all updates kept."
                )
