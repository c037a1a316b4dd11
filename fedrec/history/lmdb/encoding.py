"""How a round becomes records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedrec.exceptions import HistoryError
from fedrec.history.codecs import Codec, Encoded, Float32Codec
from fedrec.history.codecs.rows import map_rows
from fedrec.history.lmdb.records import (
    AGGREGATE,
    BUFFERS,
    FLOAT32,
    GLOBAL_WEIGHTS,
    StoredManifest,
)
from fedrec.history.rounds import RoundArrays, largest_magnitudes, not_finite

__all__ = ["Row", "Stored", "Value", "encode", "encode_rows", "round_entry", "split", "values_of"]

# Bytes of updates that a core's second-level cache holds.
_SMALL = 2**20


class Stored(NamedTuple):
    """A vector as it goes to disk; `bound` is 0 where it is no client update."""

    data: bytes
    checksum: str
    max_error: float
    bound: float


class Row(NamedTuple):
    """A client update that was encoded, and its largest magnitude."""

    encoded: Encoded
    largest: float


class Value(NamedTuple):
    """One vector of a round, where it goes, and what is known of it.

    That is its largest magnitude, which is 0 where it is no client update, or more.
    """

    database: str
    client_index: int
    vector: NDArray[np.float32]
    codec: Codec
    known: float | Row | None = None


def values_of(record: RoundArrays, recording: StoredManifest) -> list[Value]:
    """List a round's vectors in the order of their keys.

    Raises:
        HistoryError: If an update has a number that is not finite, as far as that shows already:
            `encode` finds the others.
    """
    stored = recording.sampled if recording.retention.stores(record.round) else frozenset()
    known: Sequence[float | Row | None] | None = record.encoded
    if known is None:
        known = [None] * len(record.row_ids)
        # Of a large round they are better found when a row is in the cache to be encoded.
        if record.updates.nbytes < _SMALL or not stored.issuperset(record.row_ids):
            known = record.magnitudes()
    values = [
        Value("updates", recording.indices[c], update, recording.codec, one)
        for c, update, one in zip(record.row_ids, record.updates, known, strict=True)
        if c in stored
    ]
    values.sort(key=lambda value: value.client_index)
    exact = Float32Codec()
    values.append(Value("models", GLOBAL_WEIGHTS, record.global_weights, exact, 0.0))
    values.append(Value("models", AGGREGATE, record.aggregate, exact, 0.0))
    if record.buffers is not None and record.buffers.size:
        # Float64 numbers are stored as they are, too, as so many words of four bytes.
        words = np.ascontiguousarray(record.buffers).view(np.float32)
        values.append(Value("models", BUFFERS, words, exact, 0.0))
    return values


def encode(recording: StoredManifest, t: int, value: Value) -> Stored:
    """Return the record of a vector of round `t`.

    Raises:
        HistoryError: If it is an update with a number that is not finite.
    """
    row = value.known
    if not isinstance(row, Row):
        largest = _largest(value.vector) if row is None else row
        if not math.isfinite(largest):
            raise not_finite(t, f"the update of `{recording.client_ids[value.client_index]}`")
        row = _encode_row(value.codec, value.vector, largest)
    payload, max_error = row.encoded
    bound = math.nextafter(row.largest + max_error, math.inf) if max_error else row.largest
    data, checksum = recording.pack(
        t, value.client_index, payload, codec=value.codec.id, dtype=FLOAT32, size=value.vector.size
    )
    return Stored(data, f"{checksum:016x}", max_error, bound)


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
        row = _encode_row(codec, updates[k], largest)
        codec.decode(memoryview(row.encoded.payload), decoded[k])
        return row

    return map_rows(there_and_back, range(len(updates)), updates.nbytes), decoded


def _largest(vector: NDArray[np.float32]) -> float:
    return float(largest_magnitudes(vector[None])[0])


def _encode_row(codec: Codec, vector: NDArray[np.float32], largest: float) -> Row:
    return Row(codec.encode_known(np.ascontiguousarray(vector), largest), largest)


def split(values: list[Value], num_bytes: int) -> Iterator[list[Value]]:
    """Split values into groups of at most so many bytes, and of one value at least."""
    group: list[Value] = []
    room = num_bytes
    for value in values:
        if group and value.vector.nbytes > room:
            yield group
            group, room = [], num_bytes
        group.append(value)
        room -= value.vector.nbytes
    yield group


def round_entry(
    record: RoundArrays, recording: StoredManifest, previous: str, stored: dict[int, Stored]
) -> dict[str, Any]:
    """Return the round record."""
    index = recording.indices
    updates = [stored.get(index[c]) for c in record.client_ids]  # `None`: not to be kept
    buffers = stored.get(BUFFERS)
    departure = record.departure
    if departure is not None and departure["client"] is not None:
        departure = {**departure, "client": index[departure["client"]]}
    return {
        "round": record.round,
        "previous": previous,
        "execution": recording.execution,
        "cohort": [index[c] for c in record.cohort or record.client_ids],
        "present": [index[c] for c in record.client_ids],
        "num_samples": record.num_samples.tolist(),
        "refused": [[index[c], reason] for c, reason in record.refused.items()],
        "updates": [None if u is None else u.checksum for u in updates],
        "bounds": [None if u is None else u.bound for u in updates],
        "max_error": (
            None
            if recording.codec.lossless
            else [None if u is None else u.max_error for u in updates]
        ),
        "global_weights": stored[GLOBAL_WEIGHTS].checksum,
        "aggregate": stored[AGGREGATE].checksum,
        "buffers": None if buffers is None else buffers.checksum,
        "departure": departure,
    }
