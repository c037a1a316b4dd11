"""Writing a round."""

from __future__ import annotations

from contextlib import closing
from functools import partial

from fedrec.history.codecs.rows import stream_rows
from fedrec.history.lmdb.encoding import Stored, encode, round_entry, split, values_of
from fedrec.history.lmdb.environment import Environment
from fedrec.history.lmdb.records import ROUND, StoredManifest, canonical, digest, key
from fedrec.history.lmdb.space import require_room
from fedrec.history.rounds import RoundArrays

__all__ = ["append"]


def append(
    record: RoundArrays,
    recording: StoredManifest,
    environment: Environment,
    previous: str,
    transaction_bytes: int,
    *,
    sweep: bool,
) -> str:
    """Write a round in one transaction or several, of which the last one has the round record.

    Args:
        record: The round behind the last one that is stored, which was checked.
        recording: What it belongs to.
        environment: Where it goes.
        previous: Hash of the round record before.
        transaction_bytes: Most bytes of vectors in one transaction.
        sweep: Remove what an interrupted round may have left.

    Returns:
        Hash of the round record.

    Raises:
        HistoryFullError: If there is no room.
        HistoryError: If it cannot be written.
    """
    t = record.round
    groups = list(split(values_of(record, recording), transaction_bytes))
    num_bytes = sum(value.vector.nbytes for group in groups for value in group)
    require_room(environment, recording.manifest, t, num_bytes)
    stored: dict[int, Stored] = {}
    for number, group in enumerate(groups, start=1):
        with (
            environment.write(num_bytes) as txn,
            closing(stream_rows(partial(encode, recording, t), group, num_bytes)) as encoded,
        ):
            if sweep and number == 1:
                environment.delete(txn, "updates", key(t, 0))
                environment.delete(txn, "models", key(t, 0))
            if number == len(groups) and recording.retention.last is not None:
                first_kept = max(0, t + 1 - recording.retention.last)
                environment.delete(txn, "updates", key(0, 0), key(first_kept, 0))
            for value, one in zip(group, encoded, strict=True):
                index = value.client_index
                stored[index] = one._replace(data=b"")
                environment.append(txn, value.database, key(t, index), one.data)
            if number == len(groups):
                entry = canonical(round_entry(record, recording, previous, stored))
                data, _ = recording.pack(t, ROUND, entry)
                environment.append(txn, "rounds", key(t, ROUND), data)
    return digest(data)
