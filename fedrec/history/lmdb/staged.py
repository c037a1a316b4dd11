"""Rounds on their way to disk."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from functools import partial
from itertools import chain

from fedrec.history.codecs.rows import stream_rows
from fedrec.history.lmdb.encoding import Stored, Value, encode, round_entry, split, values_of
from fedrec.history.lmdb.environment import Environment
from fedrec.history.lmdb.records import ROUND, StoredManifest, canonical, digest, key
from fedrec.history.lmdb.space import require_room
from fedrec.history.rounds import RoundArrays

__all__ = ["StagedRound", "append"]

#: Database, key, and what is kept under it.
_Record = tuple[str, bytes, bytes]


class StagedRound:
    """The records of a round, in one transaction or several.

    They are made while they are taken, a few vectors ahead, unless `encode` was called.

    Args:
        record: The round, which was checked.
        recording: What it belongs to.
        previous: Hash of the round record before.
        transaction_bytes: Most bytes of vectors in one transaction.

    Attributes:
        round: Round $t$.
        previous: Hash of the round record before.
        num_bytes: Size of its vectors.
        transactions: The records of each transaction, of which the last one is the round record.
        digest: Hash of the round record, once that was taken.
    """

    def __init__(
        self, record: RoundArrays, recording: StoredManifest, previous: str, transaction_bytes: int
    ) -> None:
        self.round = record.round
        self.previous = previous
        self.digest = ""
        self._stored: dict[int, Stored] = {}
        groups = list(split(values_of(record, recording), transaction_bytes))
        self.num_bytes = sum(value.vector.nbytes for group in groups for value in group)
        self._lazy = [self._encoded(recording, group) for group in groups]
        self._lazy.append(self._sealed(record, recording))
        # The round record goes with the last of the values.
        *first, last, end = self._lazy
        self.transactions: Sequence[Iterable[_Record]] = [*first, chain(last, end)]

    def encode(self) -> StagedRound:
        """Make all records, for one transaction; the tensors may change from then on."""
        self.transactions = [list(chain.from_iterable(self.transactions))]
        return self

    def close(self) -> None:
        """End what makes records."""
        for records in self._lazy:
            records.close()

    def _encoded(
        self, recording: StoredManifest, group: list[Value]
    ) -> Generator[_Record, None, None]:
        as_record = partial(encode, recording, self.round)
        with closing(stream_rows(as_record, group, self.num_bytes)) as made:
            for value, one in zip(group, made, strict=True):
                index = value.client_index
                self._stored[index] = one._replace(data=b"")
                yield value.database, key(self.round, index), one.data

    def _sealed(
        self, record: RoundArrays, recording: StoredManifest
    ) -> Generator[_Record, None, None]:
        entry = round_entry(record, recording, self.previous, self._stored)
        data, _ = recording.pack(self.round, ROUND, canonical(entry))
        self.digest = digest(data)
        yield "rounds", key(self.round, ROUND), data


def append(
    rounds: Sequence[StagedRound],
    recording: StoredManifest,
    environment: Environment,
    before_commit: Callable[[], None] | None,
    *,
    sweep: bool,
) -> None:
    """Write rounds in one transaction, or one round in those that it has.

    Args:
        rounds: Rounds in their order, the first one behind the last one that is stored.
        recording: What they belong to.
        environment: Where they go.
        before_commit: Called when all that is left is to commit them.
        sweep: Remove what an interrupted round may have left.

    Raises:
        HistoryFullError: If there is no room.
        HistoryError: If they cannot be written.
    """
    first, last = rounds[0], rounds[-1]
    num_bytes = sum(staged.num_bytes for staged in rounds)
    require_room(environment, recording.manifest, first.round, num_bytes)
    transactions = first.transactions
    if len(rounds) > 1:
        all_of_them = chain.from_iterable(staged.transactions for staged in rounds)
        transactions = [chain.from_iterable(all_of_them)]
    num_kept = recording.retention.last
    first_kept = key(0 if num_kept is None else max(0, last.round + 1 - num_kept), 0)
    for number, records in enumerate(transactions, start=1):
        with environment.write(num_bytes) as txn:
            if sweep:
                environment.delete(txn, "updates", key(first.round, 0))
                environment.delete(txn, "models", key(first.round, 0))
                sweep = False
            if number == len(transactions):
                environment.delete(txn, "updates", key(0, 0), first_kept)
            for database, place, data in records:
                if database != "updates" or place >= first_kept:
                    environment.append(txn, database, place, data)
            if number == len(transactions) and before_commit is not None:
                before_commit()
