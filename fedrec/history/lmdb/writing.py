"""Writing a round: its vectors become records, and the record of the round comes last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedrec.exceptions import HistoryError
from fedrec.history.codecs import Codec, Encoded, Float32Codec
from fedrec.history.codecs.rows import map_rows, stream_rows
from fedrec.history.lmdb.entries import Summary, make_entry
from fedrec.history.lmdb.environment import Environment
from fedrec.history.lmdb.reading import Snapshot
from fedrec.history.lmdb.records import (
    AGGREGATE,
    BUFFERS,
    FLOAT32,
    GLOBAL_WEIGHTS,
    ROUND,
    StoredManifest,
    canonical,
    digest,
    key,
)
from fedrec.history.lmdb.space import require_room
from fedrec.history.rounds import RoundArrays, largest_magnitudes, not_finite

__all__ = ["Row", "Vector", "append", "encode_rows", "pack_vector", "truncate", "vectors_of"]

# Bytes of updates that a core's second-level cache holds.
_SMALL = 2**20


class Row(NamedTuple):
    """A client update that was encoded, and its largest magnitude."""

    encoded: Encoded
    largest: float


class Vector(NamedTuple):
    """One vector of a round, and where it goes.

    `known` is its largest magnitude (0 where it is no client update), or the row that it was
    encoded to, if one of these is known.
    """

    database: str
    client_index: int
    numbers: NDArray[np.float32]
    codec: Codec
    known: float | Row | None = None


def append(
    arrays: RoundArrays,
    recording: StoredManifest,
    environment: Environment,
    previous: str,
    transaction_bytes: int,
    *,
    sweep: bool,
) -> str:
    """Write a round in one transaction or several; the last one has the record of the round.

    Args:
        arrays: The round behind the last one that is stored, which was checked.
        recording: The recording it belongs to.
        environment: Where it goes.
        previous: Hash of the record of the round before.
        transaction_bytes: Most bytes of vectors in one transaction.
        sweep: Remove what an interrupted round may have left.

    Returns:
        Hash of the record of the round.

    Raises:
        HistoryFullError: If there is no room.
        HistoryError: If it cannot be written.
    """
    t = arrays.round
    vectors = vectors_of(arrays, recording)
    num_bytes = sum(vector.numbers.nbytes for vector in vectors)
    require_room(environment, recording.manifest, t, num_bytes)
    groups = [vectors] if num_bytes <= transaction_bytes else _split(vectors, transaction_bytes)
    summaries: dict[int, Summary] = {}
    for number, group in enumerate(groups, start=1):
        with (
            environment.write(num_bytes) as txn,
            closing(stream_rows(partial(pack_vector, recording, t), group, num_bytes)) as packed,
        ):
            if sweep and number == 1:
                environment.delete(txn, "updates", key(t, 0))
                environment.delete(txn, "models", key(t, 0))
            if number == len(groups) and recording.retention.last is not None:
                first_kept = max(0, t + 1 - recording.retention.last)
                environment.delete(txn, "updates", key(0, 0), key(first_kept, 0))
            for vector, (record, summary) in zip(group, packed, strict=True):
                environment.append(txn, vector.database, key(t, vector.client_index), record)
                summaries[vector.client_index] = summary
            if number == len(groups):
                entry = make_entry(arrays, recording, previous, summaries)
                record, _ = recording.pack(t, ROUND, canonical(entry))
                environment.append(txn, "rounds", key(t, ROUND), record)
    return digest(record)


def truncate(recording: StoredManifest, environment: Environment, num_rounds: int) -> None:
    """Drop all rounds but the first ones, in one transaction.

    Args:
        recording: The recording.
        environment: Where it is.
        num_rounds: How many rounds stay.

    Raises:
        HistoryError: If it cannot be written.
    """
    records: list[tuple[int, bytes]] = []
    first, last = num_rounds, recording.retention.last
    with environment.read() as txn:
        snapshot = Snapshot(recording, environment, txn)
        stored = len(snapshot.rounds())
        if stored <= num_rounds:
            return
        if last is not None:
            # With fewer rounds, updates that have expired would count as stored again: the round
            # records have to say that they are not.
            first = max(0, num_rounds - last)
            previous = snapshot.entry(first - 1)[1] if first else snapshot.start
            for t in range(first, num_rounds):
                entry = dict(snapshot.entry(t)[0])
                if recording.retention.expired(t, stored):
                    for name in ("updates", "bounds", "max_error"):
                        if entry[name] is not None:
                            entry[name] = [None] * len(entry[name])
                entry["previous"] = previous
                record, _ = recording.pack(t, ROUND, canonical(entry))
                records.append((t, record))
                previous = digest(record)
    with environment.write(sum(len(record) for _, record in records)) as txn:
        environment.delete(txn, "updates", key(num_rounds, 0))
        environment.delete(txn, "models", key(num_rounds, 0))
        environment.delete(txn, "rounds", key(first, 0))
        for t, record in records:
            environment.append(txn, "rounds", key(t, ROUND), record)


def vectors_of(arrays: RoundArrays, recording: StoredManifest) -> list[Vector]:
    """List a round's vectors in the order of their keys.

    Raises:
        HistoryError: If an update has a number that is not finite, as far as that shows already:
            `pack_vector` finds the others.
    """
    kept = recording.sampled if recording.retention.stores(arrays.round) else frozenset()
    row_ids = arrays.row_ids
    known: Sequence[float | Row | None] | None = arrays.encoded
    if known is None:
        known = [None] * len(row_ids)
        # In a large round, magnitudes are cheaper when a row is in the cache to be encoded.
        if arrays.updates.nbytes < _SMALL or not kept.issuperset(row_ids):
            known = arrays.magnitudes()
    vectors = [
        Vector("updates", recording.indices[c], update, recording.codec, known_of_it)
        for c, update, known_of_it in zip(row_ids, arrays.updates, known, strict=True)
        if c in kept
    ]
    vectors.sort(key=lambda vector: vector.client_index)
    exact = Float32Codec()
    vectors.append(Vector("models", GLOBAL_WEIGHTS, arrays.global_weights, exact, 0.0))
    vectors.append(Vector("models", AGGREGATE, arrays.aggregate, exact, 0.0))
    if arrays.buffers is not None and arrays.buffers.size:
        # Float64 numbers are stored as they are, too, as so many words of four bytes.
        words = np.ascontiguousarray(arrays.buffers).view(np.float32)
        vectors.append(Vector("models", BUFFERS, words, exact, 0.0))
    return vectors


def _split(vectors: list[Vector], num_bytes: int) -> list[list[Vector]]:
    """Split vectors into groups of at most so many bytes, and of one vector at least."""
    groups: list[list[Vector]] = []
    room = 0
    for vector in vectors:
        if not groups or vector.numbers.nbytes > room:
            groups.append([])
            room = num_bytes
        groups[-1].append(vector)
        room -= vector.numbers.nbytes
    return groups


def pack_vector(recording: StoredManifest, t: int, vector: Vector) -> tuple[bytes, Summary]:
    """Return the record of a vector of round `t`, and what the round's entry says of it.

    Raises:
        HistoryError: If it is an update with a number that is not finite.
    """
    row = vector.known
    if not isinstance(row, Row):
        largest = _largest(vector.numbers) if row is None else row
        if not math.isfinite(largest):
            raise not_finite(t, f"the update of `{recording.client_ids[vector.client_index]}`")
        encoded = vector.codec.encode_known(np.ascontiguousarray(vector.numbers), largest)
        row = Row(encoded, largest)
    payload, max_error = row.encoded
    bound = math.nextafter(row.largest + max_error, math.inf) if max_error else row.largest
    codec, size = vector.codec.id, vector.numbers.size
    record, checksum = recording.pack(
        t, vector.client_index, payload, codec=codec, dtype=FLOAT32, size=size
    )
    return record, Summary(checksum, max_error, bound)


def encode_rows(
    codec: Codec, updates: NDArray[np.float32]
) -> tuple[list[Row], NDArray[np.float32]]:
    """Encode updates, and decode them again.

    Shape:
        - `updates`: $(m, d)$.

    Returns:
        Each row as it is to be stored, and all as they will be read, shape $(m, d)$.

    Raises:
        HistoryError: If an update has a number that is not finite.
    """
    decoded = np.empty_like(updates)

    def there_and_back(k: int) -> Row:
        largest = _largest(updates[k])
        if not math.isfinite(largest):
            raise HistoryError(f"Expected `updates` to be finite, but got {largest} in row {k}.")
        row = Row(codec.encode_known(np.ascontiguousarray(updates[k]), largest), largest)
        codec.decode(memoryview(row.encoded.payload), decoded[k])
        return row

    return map_rows(there_and_back, range(len(updates)), updates.nbytes), decoded


def _largest(vector: NDArray[np.float32]) -> float:
    return float(largest_magnitudes(vector[None])[0])
