"""How a round becomes records."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedrec.history.codecs import Codec, Float32Codec
from fedrec.history.codecs.rows import map_rows
from fedrec.history.lmdb.records import (
    AGGREGATE,
    BUFFERS,
    FLOAT32,
    GLOBAL_WEIGHTS,
    Recording,
)
from fedrec.history.rounds import RoundArrays, largest_magnitudes

__all__ = ["Stored", "Value", "as_stored", "encode", "round_entry", "split", "values_of"]

# Bytes of updates that a core's second-level cache holds.
_SMALL = 2**20


class Stored(NamedTuple):
    """A vector as it goes to disk; `bound` is 0 where it is no client update."""

    data: bytes
    checksum: str
    max_error: float
    bound: float


class Value(NamedTuple):
    """One vector of a round, where it goes, and its largest magnitude if that is known."""

    database: str
    client_index: int
    vector: NDArray[np.float32]
    codec: Codec
    largest: float | None = None


def values_of(record: RoundArrays, recording: Recording) -> list[Value]:
    """List a round's vectors in the order of their keys."""
    stored = recording.sampled if recording.retention.stores(record.round) else frozenset()
    sent = [c for c in record.client_ids if c not in record.dropped]
    largest: list[float] | list[None] = [None] * len(sent)
    if record.updates.nbytes < _SMALL:  # else they are better found when a row is in the cache
        largest = largest_magnitudes(record.updates).tolist()
    values = [
        Value("updates", recording.indices[c], update, recording.codec, most)
        for c, update, most in zip(sent, record.updates, largest, strict=True)
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


def encode(recording: Recording, t: int, value: Value) -> Stored:
    """Return the record of a vector of round `t`."""
    codec, size, bound = value.codec, value.vector.size, value.largest
    if bound is None:
        bound = float(largest_magnitudes(value.vector[None])[0])
    payload, max_error = codec.encode_known(np.ascontiguousarray(value.vector), bound)
    if max_error:
        bound = math.nextafter(bound + max_error, math.inf)
    data, checksum = recording.pack(
        t, value.client_index, payload, codec=codec.id, dtype=FLOAT32, size=size
    )
    return Stored(data, f"{checksum:016x}", max_error, bound)


def as_stored(codec: Codec, updates: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return updates as they come back from a store with this codec.

    Shape:
        - `updates`: $(m, d)$.
    """
    if codec.lossless:
        return updates
    decoded = np.empty_like(updates)

    def there_and_back(k: int) -> None:
        payload = codec.encode(np.ascontiguousarray(updates[k])).payload
        codec.decode(memoryview(payload), decoded[k])

    map_rows(there_and_back, range(len(updates)), updates.nbytes)
    return decoded


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
    record: RoundArrays, recording: Recording, previous: str, stored: dict[int, Stored]
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
