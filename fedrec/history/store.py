"""The on-disk core of `LMDBHistory`: NumPy arrays in and out, without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedrec._checks import check_int
from fedrec.exceptions import ConfigurationError, HistoryError, HistoryFormatError, expected
from fedrec.history.codecs import Codec, Float32Codec
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
from fedrec.history.rounds import RoundArrays
from fedrec.history.snapshot import Snapshot

__all__ = ["RoundStore"]

_MAX_ROUNDS = 2**32


class RoundStore:
    """Rounds in a directory: durable, verified, appended by one process, read by many.

    A round becomes visible with its round record, which is committed together with the last of
    its values and holds the hash of the round record before it. Every read is checked against
    the checksums that were written.

    Args:
        path: Directory of the history; it is made when a recording begins.
        map_size: Most bytes the history may ever take. `None` reserves 1 TiB: of address space,
            not of disk or memory.

    Attributes:
        transaction_bytes: A round of more bytes is written in several transactions, since LMDB
            keeps a transaction in memory.
    """

    transaction_bytes = 256 * 2**20

    def __init__(self, path: str | os.PathLike[str], *, map_size: int | None = None) -> None:
        self._environment: Environment | None = None
        self._lock: WriterLock | None = None
        self._recording: Recording | None = None
        self._tail: tuple[int, str] | None = None  # next round, hash of the round record before
        if not isinstance(path, (str, os.PathLike)):
            raise ConfigurationError(expected("path", "the path of a directory", path))
        self.path = Path(path)
        self._directory = self.path.absolute()  # the working directory may change
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
            HistoryFormatError: If no recording has begun here, or by a newer fedrec.
        """
        return self._load().manifest

    def begin(self, manifest: Manifest) -> None:
        """Start a recording; on disk it appears as a whole or not at all.

        Raises:
            HistoryFormatError: If there is one already.
            HistoryLockedError: If another process is just starting one.
        """
        recording = Recording(str(self.path), manifest)
        self._check_empty()
        self.close()  # what this store had open before, if that was deleted
        self._lock_for_writing()
        self._check_empty()  # another process may have been faster
        Environment.create(self._directory, key(0, MANIFEST), recording.record, self.map_size)

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
        checksums: dict[int, str] = {}
        for number, group in enumerate(groups, start=1):
            with environment.write(num_bytes) as txn:
                if sweep:
                    environment.truncate(txn, "updates", key(t, 0))
                    environment.truncate(txn, "models", key(t, 0))
                    sweep = False
                for database, index, vector, codec in group:
                    payload = codec.encode(vector)
                    data, checksum = recording.pack(
                        t, index, payload, codec=codec.id, dtype=FLOAT32, size=vector.size
                    )
                    environment.append(txn, database, key(t, index), data)
                    checksums[index] = f"{checksum:016x}"
                if number == len(groups):
                    entry = _entry(record, recording, previous, checksums)
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

    def num_bytes(self) -> int:
        """Return the size of the file in bytes."""
        return 0 if self.is_empty else (self._directory / DATA).stat().st_size

    def verify(self) -> range:
        """Read everything and follow the chain of round records.

        Returns:
            The rounds that were verified: all that are stored.

        Raises:
            HistoryCorruptedError: At the first thing that is not as it was written.
        """
        recording = self._load()
        previous = digest(recording.record)
        rounds = self.rounds()
        for t in rounds:
            with self._snapshot() as snapshot:
                entry, following = snapshot.entry(t)
                if entry["previous"] != previous:
                    raise recording.corrupted(t, ROUND, "it does not follow the one before it")
                snapshot.read(entry, None)
            previous = following
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
            environment = self._open()
            with environment.read() as txn:
                found = environment.cursor(txn, "meta").get(key(0, MANIFEST), b"")
                self._recording = Recording.load(str(self.path), bytes(found))
        return self._recording

    @contextmanager
    def _snapshot(self) -> Iterator[Snapshot]:
        recording = self._load()
        environment = self._open()
        with environment.read() as txn:
            yield Snapshot(recording, environment, txn)


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
    record: RoundArrays, recording: Recording, previous: str, checksums: dict[int, str]
) -> dict[str, Any]:
    """Return the round record."""
    index = recording.indices
    return {
        "round": record.round,
        "previous": previous,
        "execution": digest(canonical(recording.manifest.execution)),
        "cohort": [index[c] for c in record.cohort or record.client_ids],
        "present": [index[c] for c in record.client_ids],
        "num_samples": record.num_samples.tolist(),
        "refused": [[index[c], reason] for c, reason in record.refused.items()],
        "updates": [checksums[index[c]] for c in record.client_ids],
        "global_weights": checksums[GLOBAL_WEIGHTS],
        "aggregate": checksums[AGGREGATE],
        "buffers": checksums.get(BUFFERS),
    }
