"""The on-disk core of `LMDBHistory`: NumPy arrays in and out, without torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedrec._checks import check_choice, check_int
from fedrec.exceptions import (
    ConfigurationError,
    HistoryError,
    HistoryFormatError,
    expected,
)
from fedrec.history.codecs import CODECS
from fedrec.history.codecs.compiled import compiled
from fedrec.history.lmdb.damage import Damage, DamagedRecordError
from fedrec.history.lmdb.encryption import CIPHER, Keys, check_source, master_key
from fedrec.history.lmdb.environment import DATA, Environment
from fedrec.history.lmdb.loading import load
from fedrec.history.lmdb.lock import WriterLock
from fedrec.history.lmdb.mounts import warn_about
from fedrec.history.lmdb.pool import Buffers
from fedrec.history.lmdb.reading import Snapshot
from fedrec.history.lmdb.records import MANIFEST, Recording, digest, key
from fedrec.history.lmdb.space import require_room_for_all
from fedrec.history.lmdb.writing import append
from fedrec.history.manifest import Manifest
from fedrec.history.retention import Retention
from fedrec.history.rounds import RoundArrays, RoundIndex
from fedrec.history.tools.check import check

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
        keep: Which updates are stored, as arguments of `Retention`. `None`: as for `codec`.
        map_size: Most bytes the history may ever take. `None` reserves 1 TiB: of address space,
            not of disk or memory.
        master_key: Where the master key of an encrypted history comes from. `None`: from the
            environment variable FEDREC_HISTORY_KEY, and a new history is not encrypted.
        sync_every: Rounds after which what was written is made durable.

    Attributes:
        buffers: Where memory for the updates that are read comes from.
        transaction_bytes: A round of more bytes is written in several transactions, since LMDB
            keeps a transaction in memory.
    """

    transaction_bytes = 256 * 2**20

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        codec: str | None = None,
        keep: Mapping[str, Any] | None = None,
        map_size: int | None = None,
        master_key: str | None = None,
        sync_every: int = 1,
    ) -> None:
        self._environment: Environment | None = None
        self.buffers = Buffers()
        self._lock: WriterLock | None = None
        self._recording: Recording | None = None
        # Next round, and hash of the round record before.
        self._tail: tuple[int, str] | None = None
        self._unsynced = 0  # rounds written
        if not isinstance(path, (str, os.PathLike)):
            raise ConfigurationError(expected("path", "the path of a directory", path))
        self.path = Path(path)
        self._directory = self.path.absolute()  # the working directory may change
        self.codec = codec if codec is None else check_choice("codec", codec, CODECS)
        self.keep = None if keep is None else Retention.of(keep).spec()
        self.map_size = map_size
        if map_size is not None:
            map_size = check_int("map_size", map_size, minimum=2**16)
        self.master_key = None if master_key is None else check_source(master_key)
        self.sync_every = check_int("sync_every", sync_every, minimum=1)

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
            manifest: The manifest; what this store was given as `codec` and `keep` is replaced.

        Raises:
            HistoryFormatError: If there is one already.
            HistoryFullError: If the disk cannot hold all of its rounds.
            HistoryLockedError: If another process is just starting one.
        """
        if self.codec is not None:
            manifest = dataclasses.replace(manifest, codec=self.codec)
        if self.keep is not None:
            manifest = dataclasses.replace(manifest, keep=self.keep)
        master = None
        if self.master_key is not None:
            manifest = dataclasses.replace(manifest, encryption=CIPHER)
            master = master_key(self.master_key, self._directory)
        recording = Recording(str(self.path), manifest)
        self._check_empty()
        require_room_for_all(self._directory, recording.manifest, self.map_size)
        self.close()  # what this store had open before, if that was deleted
        self._lock_for_writing()
        self._check_empty()  # another process may have been faster
        if master is not None:
            Keys.create(str(self.path), recording.client_ids, master).write(self._directory)
        Environment.create(self._directory, {key(0, MANIFEST): recording.record}, self.map_size)
        if not recording.codec.lossless:
            compiled()  # what is missing is compiled now, not while a round is written

    def write_round(self, record: RoundArrays) -> None:
        """Append a round; when this returns, the round survives a power cut (see `sync_every`).

        Raises:
            HistoryError: If it is not the next round, or not one of this recording.
            ForgottenError: If one of its clients was forgotten.
            ShapeError: If a shape or dtype is wrong.
            HistoryFullError: If there is no room; all earlier rounds are intact.
            HistoryLockedError: If another process, or another store, is writing.
        """
        recording = self._load()
        self._lock_for_writing()
        environment = self._open()
        if self.sync_every == 1 and not environment.syncs:
            raise HistoryError(
                f"History `{self.path}` is open in this process with `sync_every` > 1, so that no "
                "round would be durable at once. HINT: close the other store first."
            )
        tail = self._tail
        t, previous = tail or self._find_tail()
        record.check(recording.manifest, t)
        recording.require_known(record.client_ids)
        if t == _MAX_ROUNDS:
            raise HistoryError(f"A history cannot hold more than {_MAX_ROUNDS} rounds.")
        self._tail = None  # until all is done
        written = append(
            record, recording, environment, previous, self.transaction_bytes, sweep=tail is None
        )
        self._tail = (t + 1, written)
        if not environment.syncs:
            self._unsynced += 1
            if self._unsynced >= self.sync_every or t + 1 == recording.manifest.max_rounds:
                self._sync()

    def _find_tail(self) -> tuple[int, str]:
        with self._snapshot() as snapshot:
            t = len(snapshot.rounds())
            return t, snapshot.entry(t - 1)[1] if t else digest(snapshot.recording.record)

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

    def index(self, t: int) -> RoundIndex:
        """Return what is known of a round without reading its vectors.

        Raises:
            RoundNotFoundError: If the round is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        with self._snapshot() as snapshot:
            return snapshot.index(t)

    @property
    def is_locked(self) -> bool:
        """Whether the recording is encrypted and no master key was found."""
        return self._load().is_locked

    def forgotten(self) -> tuple[str, ...]:
        """Return the clients that were forgotten, or are being forgotten."""
        return () if self.is_empty else tuple(self._load().forgotten)

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
        recording = self._load()
        if recording.pending:
            yield len(self.rounds()), [Damage(part="the whole", reason=recording.unfinished())]
        yield from check(recording, self._open())

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
        unsynced, self._unsynced = self._unsynced, 0
        try:
            if unsynced and environment is not None and environment.pid == os.getpid():
                environment.sync()
        finally:
            if environment is not None:
                environment.release()
            if lock is not None:
                lock.release()

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        unshared = dict.fromkeys(("_environment", "_lock", "_recording", "_tail"))
        return {**self.__dict__, **unshared, "_unsynced": 0, "path": self._directory}

    def _check_empty(self) -> None:
        if not self.is_empty:
            raise HistoryFormatError(
                f"History `{self.path}` already holds a recording of {len(self.rounds())} rounds. "
                "HINT: resume it, or record to another path."
            )

    def _lock_for_writing(self) -> None:
        if self._lock is None or self._lock.pid != os.getpid():
            warn_about(self._directory)
            self._lock = WriterLock(self._directory)
            self._tail = None

    def _open(self) -> Environment:
        if self._environment is None or self._environment.pid != os.getpid():
            self._environment = Environment.acquire(
                self._directory, self.map_size, sync=self.sync_every == 1
            )
            self._unsynced = 0
        return self._environment

    def _sync(self) -> None:
        self._open().sync()
        self._unsynced = 0

    def _load(self) -> Recording:
        if self._recording is None:
            recording = load(str(self.path), self._open(), self.master_key)
            if self.codec not in (None, recording.codec.name):
                raise HistoryFormatError(
                    f"History `{self.path}` stores updates as `{recording.codec.name}`, but was "
                    f"opened with codec=`{self.codec}`. HINT: leave `codec` out to go on as "
                    "recorded, or record to another path."
                )
            if self.keep not in (None, recording.retention.spec()):
                raise HistoryFormatError(
                    f"History `{self.path}` keeps updates of {recording.retention}, but was opened "
                    f"with keep={self.keep}. HINT: leave `keep` out to go on as recorded, or "
                    "record to another path."
                )
            self._recording = recording
        return self._recording

    @contextmanager
    def _snapshot(self) -> Iterator[Snapshot]:
        recording = self._load()
        environment = self._open()
        with environment.read() as txn:
            yield Snapshot(recording, environment, txn, self.buffers)
