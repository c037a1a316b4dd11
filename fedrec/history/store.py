"""The on-disk core of `LMDBHistory`: NumPy arrays in and out, without torch."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedrec._checks import check_choice, check_int
from fedrec.exceptions import ConfigurationError, HistoryError, HistoryFormatError, expected
from fedrec.history.check import check
from fedrec.history.codecs import CODECS, Codec, Float32Codec
from fedrec.history.codecs.rows import map_rows
from fedrec.history.damage import Damage, DamagedRecordError
from fedrec.history.environment import DATA, Environment
from fedrec.history.lock import WriterLock
from fedrec.history.manifest import Manifest
from fedrec.history.recording import (
    AGGREGATE,
    BUFFERS,
    FLOAT32,
    GLOBAL_WEIGHTS,
    MANIFEST,
    ROUND,
    Recording,
    canonical,
    digest,
    key,
)
from fedrec.history.rounds import RoundArrays, largest_magnitudes
from fedrec.history.snapshot import Snapshot, load

__all__ = ["RoundStore"]

_MAX_ROUNDS = 2**32


class RoundStore:
    """Rounds in a directory: durable, verified, appended by one process, read by many.

    A round becomes visible with its round record, which is committed together with the last of
    its values and holds the hash of the round record before it. Every read is checked against
    the checksums that were written.

    Args:
        path: Directory of the history; it is made when a recording begins.
        codec: How updates are stored. `None`: as they are in a recording that exists, as the
            manifest says in a new one.
        map_size: Most bytes the history may ever take. `None` reserves 1 TiB: of address space,
            not of disk or memory.

    Attributes:
        transaction_bytes: A round of more bytes is written in several transactions, since LMDB
            keeps a transaction in memory.
    """

    transaction_bytes = 256 * 2**20
    # Encoded at once; then they go to LMDB, so that no round is in memory twice.
    _batch_bytes = 16 * 2**20

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        codec: str | None = None,
        map_size: int | None = None,
    ) -> None:
        self._environment: Environment | None = None
        self._lock: WriterLock | None = None
        self._recording: Recording | None = None
        self._tail: tuple[int, str] | None = None  # next round, hash of the round record before
        if not isinstance(path, (str, os.PathLike)):
            raise ConfigurationError(expected("path", "the path of a directory", path))
        self.path = Path(path)
        self._directory = self.path.absolute()  # the working directory may change
        self.codec = codec if codec is None else check_choice("codec", codec, CODECS)
        self.map_size = map_size
        if map_size is not None:
            check_int("map_size", map_size, minimum=2**16)

    @property
    def is_empty(self) -> bool:
        """Whether no recording has begun here."""
        return not (self._directory / DATA).exists()

    @property
    def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            HistoryFormatError: If no recording has begun here, or by a newer fedrec, or with
                another codec than this store was asked to use.
        """
        return self._load().manifest

    def begin(self, manifest: Manifest) -> None:
        """Start a recording; on disk it appears as a whole or not at all.

        Args:
            manifest: The manifest; if this store was given a codec, its `codec` is replaced.

        Raises:
            HistoryFormatError: If there is one already.
            HistoryLockedError: If another process is just starting one.
        """
        if self.codec is not None:
            manifest = dataclasses.replace(manifest, codec=self.codec)
        recording = Recording(str(self.path), manifest)
        self._check_empty()
        self.close()  # what this store had open before, if that was deleted
        self._lock_for_writing()
        self._check_empty()  # another process may have been faster
        Environment.create(self._directory, {key(0, MANIFEST): recording.record}, self.map_size)

    def write_round(self, record: RoundArrays) -> None:
        """Append a round; when this returns, the round survives a power cut.

        Raises:
            HistoryError: If it is not the next round, or not one of this recording.
            ShapeError: If a shape or dtype is wrong.
            HistoryFullError: If there is no room; all earlier rounds are intact.
            HistoryLockedError: If another process, or another store, is writing.
        """
        recording = self._load()
        self._lock_for_writing()
        environment = self._open()
        sweep = self._tail is None  # what an interrupted round left, if any
        if self._tail is None:
            with self._snapshot() as snapshot:
                t = len(snapshot.rounds())
                previous = snapshot.entry(t - 1)[1] if t else digest(recording.record)
        else:
            t, previous = self._tail
        record.check(recording.manifest, t)
        if t == _MAX_ROUNDS:
            raise HistoryError(f"A history cannot hold more than {_MAX_ROUNDS} rounds.")
        groups = list(_split(_values(record, recording), self.transaction_bytes))
        num_bytes = sum(value.vector.nbytes for group in groups for value in group)
        environment.check_disk(num_bytes)

        self._tail = None  # until all is done
        stored: dict[int, _Record] = {}
        for number, group in enumerate(groups, start=1):
            with environment.write(num_bytes) as txn:
                if sweep:
                    environment.truncate(txn, "updates", key(t, 0))
                    environment.truncate(txn, "models", key(t, 0))
                    sweep = False
                for batch in _split(group, self._batch_bytes):
                    made = map_rows(partial(_encode, recording, t), batch, num_bytes)
                    for value, one in zip(batch, made, strict=True):
                        index = value.client_index
                        environment.append(txn, value.database, key(t, index), one.data)
                        stored[index] = one._replace(data=b"")
                if number == len(groups):
                    entry = _entry(record, recording, previous, stored)
                    data, _ = recording.pack(t, ROUND, canonical(entry))
                    environment.append(txn, "rounds", key(t, ROUND), data)
                    tail = (t + 1, digest(data))
        self._tail = tail

    def read_round(self, t: int, client_ids: Sequence[str] | None = None) -> RoundArrays:
        """Read a round, or these clients' part of it, into memory of its own.

        Raises:
            RoundNotFoundError: If the round, or a client of it, is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        with self._snapshot() as snapshot:
            return snapshot.read(snapshot.entry(t)[0], client_ids)

    def rounds(self) -> range:
        """Return the rounds that are stored, `range(0, k)`."""
        if self.is_empty:
            return range(0)
        with self._snapshot() as snapshot:
            return snapshot.rounds()

    def present(self, t: int) -> tuple[str, ...]:
        """Return the clients whose updates are stored for a round.

        Raises:
            RoundNotFoundError: If the round is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        return tuple(self.magnitude_bounds(t))

    def magnitude_bounds(self, t: int) -> dict[str, float]:
        """Return a number for each client present that no magnitude in its stored update exceeds.

        Raises:
            RoundNotFoundError: If the round is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        with self._snapshot() as snapshot:
            entry, _ = snapshot.entry(t)
            ids = snapshot.recording.client_ids
            return {ids[i]: b for i, b in zip(entry["present"], entry["bounds"], strict=True)}

    def as_stored(self, manifest: Manifest, updates: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return updates as they come back from a store with this manifest.

        Shape:
            - `updates`: $(m, d)$.
        """
        codec = CODECS[manifest.codec]
        if codec.lossless:
            return updates
        decoded = np.empty_like(updates)
        for update, out in zip(updates, decoded, strict=True):
            codec.decode(memoryview(codec.encode(np.ascontiguousarray(update)).payload), out)
        return decoded

    def num_bytes(self) -> int:
        """Return the size of the file in bytes."""
        return 0 if self.is_empty else (self._directory / DATA).stat().st_size

    def damage(self) -> Iterator[tuple[int, list[Damage]]]:
        """Read everything and follow the chain of round records.

        Yields:
            How many rounds are left to do, and what is damaged in the one that is done.

        Raises:
            HistoryCorruptedError: If the file as a whole cannot be read.
        """
        return check(self._load(), self._open())

    def verify(self) -> range:
        """Read everything and follow the chain of round records.

        Returns:
            The rounds that were verified: all that are stored.

        Raises:
            HistoryCorruptedError: At the first thing that is not as it was written.
        """
        rounds = self.rounds()
        for _, found in self.damage():
            if found:
                raise DamagedRecordError(str(self.path), found[0])
        return rounds

    def close(self) -> None:
        """Let go of the files and of the right to write. The store can be used again."""
        environment, self._environment = self._environment, None
        lock, self._lock = self._lock, None
        self._recording = self._tail = None
        if environment is not None:
            environment.release()
        if lock is not None:
            lock.release()

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        unshared = dict.fromkeys(("_environment", "_lock", "_recording", "_tail"))
        return {**self.__dict__, **unshared, "path": self._directory}

    def _check_empty(self) -> None:
        if not self.is_empty:
            raise HistoryFormatError(
                f"History `{self.path}` already holds a recording of {len(self.rounds())} rounds. "
                "HINT: resume it, or record to another path."
            )

    def _lock_for_writing(self) -> None:
        if self._lock is None or self._lock.pid != os.getpid():
            self._lock = WriterLock(self._directory)
            self._tail = None

    def _open(self) -> Environment:
        if self._environment is None or self._environment.pid != os.getpid():
            self._environment = Environment.acquire(self._directory, self.map_size)
        return self._environment

    def _load(self) -> Recording:
        if self._recording is None:
            recording = load(str(self.path), self._open())
            if self.codec not in (None, recording.codec.name):
                raise HistoryFormatError(
                    f"History `{self.path}` stores updates as `{recording.codec.name}`, but was "
                    f"opened with codec=`{self.codec}`. HINT: leave `codec` out to go on as "
                    "recorded, or record to another path."
                )
            self._recording = recording
        return self._recording

    @contextmanager
    def _snapshot(self) -> Iterator[Snapshot]:
        recording = self._load()
        environment = self._open()
        with environment.read() as txn:
            yield Snapshot(recording, environment, txn)


class _Record(NamedTuple):
    """A vector as it goes to disk."""

    data: bytes
    checksum: str
    max_error: float
    bound: float


class _Value(NamedTuple):
    """One vector of a round, and where it goes."""

    database: str
    client_index: int
    vector: NDArray[np.float32]
    codec: Codec


def _values(record: RoundArrays, recording: Recording) -> list[_Value]:
    """List a round's vectors in the order of their keys."""
    rows = zip(record.client_ids, record.updates, strict=True)
    values = [_Value("updates", recording.indices[c], u, recording.codec) for c, u in rows]
    values.sort(key=lambda value: value.client_index)
    exact = Float32Codec()
    values.append(_Value("models", GLOBAL_WEIGHTS, record.global_weights, exact))
    values.append(_Value("models", AGGREGATE, record.aggregate, exact))
    if record.buffers is not None and record.buffers.size:
        values.append(_Value("models", BUFFERS, record.buffers, exact))
    return values


def _encode(recording: Recording, t: int, value: _Value) -> _Record:
    """Return the record of a vector of round `t`."""
    codec, size = value.codec, value.vector.size
    payload, max_error = codec.encode(np.ascontiguousarray(value.vector))
    bound = float(largest_magnitudes(value.vector[None])[0])
    if max_error:
        bound = math.nextafter(bound + max_error, math.inf)
    data, checksum = recording.pack(
        t, value.client_index, payload, codec=codec.id, dtype=FLOAT32, size=size
    )
    return _Record(data, f"{checksum:016x}", max_error, bound)


def _split(values: list[_Value], num_bytes: int) -> Iterator[list[_Value]]:
    """Split values into groups of at most so many bytes, and of one value at least."""
    group: list[_Value] = []
    room = num_bytes
    for value in values:
        if group and value.vector.nbytes > room:
            yield group
            group, room = [], num_bytes
        group.append(value)
        room -= value.vector.nbytes
    yield group


def _entry(
    record: RoundArrays, recording: Recording, previous: str, stored: dict[int, _Record]
) -> dict[str, Any]:
    """Return the round record."""
    index = recording.indices
    updates = [stored[index[c]] for c in record.client_ids]
    buffers = stored.get(BUFFERS)
    return {
        "round": record.round,
        "previous": previous,
        "execution": digest(canonical(recording.manifest.execution)),
        "cohort": [index[c] for c in record.cohort or record.client_ids],
        "present": [index[c] for c in record.client_ids],
        "num_samples": record.num_samples.tolist(),
        "refused": [[index[c], reason] for c, reason in record.refused.items()],
        "updates": [update.checksum for update in updates],
        "bounds": [u.bound for u in updates],
        "max_error": None if recording.codec.lossless else [u.max_error for u in updates],
        "global_weights": stored[GLOBAL_WEIGHTS].checksum,
        "aggregate": stored[AGGREGATE].checksum,
        "buffers": None if buffers is None else buffers.checksum,
    }
