"""The history on disk."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrec._checks import check_choice, check_int
from fedrec.exceptions import (
    ConfigurationError,
    HistoryCorruptedError,
    HistoryError,
    HistoryFormatError,
    expected,
)
from fedrec.history.base import SEALED, HistoryStore
from fedrec.history.codecs import CODECS
from fedrec.history.codecs.compiled import compiled
from fedrec.history.codecs.int8 import Int8Codec
from fedrec.history.lmdb.damage import Damage, DamagedRecordError
from fedrec.history.lmdb.encoded import EncodedUpdates
from fedrec.history.lmdb.encryption import CIPHER, Keys, TamperedError, check_source, master_key
from fedrec.history.lmdb.environment import DATA, Environment
from fedrec.history.lmdb.lock import WriterLock
from fedrec.history.lmdb.mounts import warn_about
from fedrec.history.lmdb.reading import Snapshot, load
from fedrec.history.lmdb.records import MANIFEST, StoredManifest, key
from fedrec.history.lmdb.shards import require_one_file
from fedrec.history.lmdb.space import require_room_for_all
from fedrec.history.lmdb.writing import append, truncate
from fedrec.history.manifest import Manifest
from fedrec.history.retention import Retention
from fedrec.history.rounds import RoundArrays, RoundIndex
from fedrec.history.tools.check import check

if TYPE_CHECKING:
    from torch import Tensor

    from fedrec.types import RoundRecord

__all__ = ["LMDBHistory"]

_MAX_ROUNDS = 2**32


class LMDBHistory(HistoryStore):
    """The history in a directory, in one LMDB file.

    When `write_round` returns, the round survives a killed process and a power cut: it becomes
    visible with its round record, which is committed together with the last of its vectors and
    holds the hash of the round record before it. Every record carries a checksum that is compared
    at each read: what is read is what was written, or an error names round and client. Global
    weights and aggregates are stored exactly; how client updates are stored is up to the `codec`,
    by default exactly, too.

    One process writes at a time, any number may read meanwhile; an open history can be used
    after a fork and can be pickled, as the path it stands for. The directory must be on a local
    disk. To copy a history, close it first.

    Args:
        path: Directory of the history; it is made when a recording begins.
        codec: How client updates are stored: `"float32"`, smaller without loss (`"lz4"`,
            `"zstd"`), with some (`"float16"`, `"int8"`, `"int8+zstd"`), with much (`"sign"`), or
            the name of a codec of your own (`register_codec`). By default as an existing
            recording has it, and float32 in a new one.
        keep: Which client updates are stored: the arguments of `Retention` as a mapping, such as
            `{"every": 10}` (one round in ten), `{"last": 100}` (the last 100 rounds) or
            `{"clients": 0.2}` (a fifth of the clients). By default as an existing recording has
            it, and all in a new one. Global weights and aggregates are stored of every round.
        map_size: Most bytes the history may ever take. `None` reserves 1 TiB: of address space,
            not of disk or memory.
        master_key: Encrypt a new history (AES-256-GCM, `fedrec[encryption]`), or open an encrypted
            one, with the key that is in a file (`"file:PATH"`) or in an environment variable
            (`"env:NAME"`): 64 hexadecimal digits, which `fedrec history new-key` makes. `None`: an
            encrypted history is opened with the key in FEDREC_HISTORY_KEY, and a new one is not
            encrypted.
        sync_every: 1: every round survives a power cut. k: only every k-th round waits for the
            disk (and the last one, and `close`). A killed process loses nothing either way. In a
            power cut, more than the last k rounds can be lost: of 20 cut while LMDB wrote without
            waiting, 11 left a file that cannot be read at all, and the other 9 lost rounds that
            were written; of 60 with `sync_every=1`, none lost anything. Writing is faster by
            about a fifth. For recordings that can be made again.

    Attributes:
        path: As given; so are `codec`, `keep`, `map_size`, `master_key` and `sync_every`.
        transaction_bytes: A round of more bytes is written in several transactions, since LMDB
            keeps a transaction in memory.

    Raises:
        ConfigurationError: If `path` is not a path, `codec` is not known, `map_size` is less than
            65,536, `master_key` says no place, or `sync_every` is less than 1.

    Examples:
        >>> import tempfile, torch
        >>> from fedrec.types import CohortUpdates, RoundRecord
        >>> manifest = Manifest(
        ...     model_fingerprint="f", num_parameters=2, clients={"a": 10, "b": 20}, seed=0,
        ...     aggregator={"class_path": "fedrec.aggregators.FedAvg", "init_args": {}},
        ...     server_lr=0.1, max_rounds=1,
        ... )
        >>> record = RoundRecord(
        ...     round=0, global_weights=torch.zeros(2), aggregate=torch.tensor([3.0, 4.0]),
        ...     sent=CohortUpdates(
        ...         client_ids=("a", "b"), updates=torch.tensor([[1.0, 2.0], [4.0, 5.0]]),
        ...         num_samples=torch.tensor([10, 20]),
        ...     ),
        ... )
        >>> with tempfile.TemporaryDirectory() as path, LMDBHistory(path) as history:
        ...     history.begin(manifest)
        ...     history.write_round(record)
        ...     history.rounds(), history.read_round(0, ["b"]).updates
        (range(0, 1), tensor([[4., 5.]]))
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
        self._lock: WriterLock | None = None
        self._recording: StoredManifest | None = None
        # Next round, and hash of the record of the round before.
        self._tail: tuple[int, str] | None = None
        self._unsynced = 0  # rounds written
        self._encoded = EncodedUpdates()
        if not isinstance(path, (str, os.PathLike)) or Path(path).is_file():
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
        """Whether nothing, not even a manifest, has been written yet.

        Raises:
            HistoryFormatError: If the directory holds a `ShardedHistory`.
        """
        if (self._directory / DATA).exists():
            return False
        require_one_file(self._directory)
        return True

    @property
    def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            HistoryFormatError: If nothing has been recorded yet, or by a newer fedrec, or with
                another codec or `keep` than was asked for.
        """
        return self._open()[0].manifest

    def begin(self, manifest: Manifest) -> None:
        """Start a recording; on disk it appears as a whole or not at all.

        Args:
            manifest: The manifest; what was asked for as `codec` and `keep` is replaced.

        Raises:
            HistoryFormatError: If the store already holds a recording.
            HistoryFullError: If the disk cannot hold all of its rounds (`forecast`).
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
        recording = StoredManifest(str(self.path), manifest)
        self._check_empty()
        require_room_for_all(self._directory, recording.manifest, self.map_size)
        self.close()  # the files that this store had open, if they were deleted
        self.lock()
        self._check_empty()  # another process may have been faster
        if master is not None:
            Keys.create(str(self.path), recording.client_ids, master).write(self._directory)
        Environment.create(self._directory, {key(0, MANIFEST): recording.record}, self.map_size)
        if not recording.codec.lossless:
            compiled()  # what is missing is compiled now, not while a round is written

    def write_round(self, record: RoundRecord) -> None:
        """Append a round; when this returns, the round survives a power cut (see `sync_every`).

        What `as_stored` made of its updates is used.

        Args:
            record: The round; its number is the number of rounds stored so far, its clients are
                in the manifest.

        Raises:
            ForgottenError: If one of its clients was forgotten.
            HistoryKeyError: If the history is encrypted and the master key is missing or another.
            HistoryError: If it is not the next round, names an unknown client or one twice, or
                has numbers that are not finite.
            ShapeError: If a shape or dtype differs from the manifest's.
            HistoryFullError: If there is no room; all earlier rounds are intact.
            HistoryLockedError: If another process, or another store, is writing.
        """
        from fedrec.history.conversion import to_arrays

        arrays = to_arrays(record, pinned=True)
        encoded = self._encoded.pop(record.updates)
        self.append(arrays if encoded is None else dataclasses.replace(arrays, encoded=encoded))

    def append(self, arrays: RoundArrays) -> None:
        """Append a round; when this returns, the round survives a power cut (see `sync_every`).

        Raises:
            ForgottenError: If one of its clients was forgotten.
            HistoryKeyError: If the history is encrypted and the master key is missing or another.
            HistoryError: If it is not the next round, names an unknown client or one twice, or
                has numbers that are not finite.
            ShapeError: If a shape or dtype differs from the manifest's.
            HistoryFullError: If there is no room; all earlier rounds are intact.
            HistoryLockedError: If another process, or another store, is writing.
        """
        recording, environment = self._open()
        self.lock()
        if self.sync_every == 1 and not environment.syncs:
            raise HistoryError(
                f"History `{self.path}` is open in this process with `sync_every` > 1, so that no "
                "round would be durable at once. HINT: close the other store first."
            )
        tail = self._tail
        t, previous = tail or self._find_tail()
        arrays.check(recording.manifest, t)
        recording.require_known(arrays.client_ids, writing=True)
        if t == _MAX_ROUNDS:
            raise HistoryError(f"A history cannot hold more than {_MAX_ROUNDS} rounds.")
        self._tail = None  # until all is done
        written = append(
            arrays, recording, environment, previous, self.transaction_bytes, sweep=tail is None
        )
        self._tail = (t + 1, written)
        if not environment.syncs:
            self._unsynced += 1
            if self._unsynced >= self.sync_every or t + 1 == recording.manifest.max_rounds:
                environment.sync()
                self._unsynced = 0

    def truncate(self, num_rounds: int) -> None:
        """Drop all rounds but the first ones; when this returns, that survives a power cut.

        Args:
            num_rounds: How many rounds stay.

        Raises:
            HistoryKeyError: If the history is encrypted and the master key is missing or another.
            HistoryError: If it cannot be written.
            HistoryLockedError: If another process, or another store, is writing.
        """
        recording, environment = self._open()
        self.lock()
        self._tail = None
        truncate(recording, environment, num_rounds)
        if not environment.syncs:
            environment.sync()

    def lock(self) -> None:
        """Take the right to write, as writing does by itself; `close` gives it back.

        Raises:
            HistoryLockedError: If another process, or another store, is writing.
        """
        if self._lock is None or self._lock.pid != os.getpid():
            warn_about(self._directory)
            self._lock = WriterLock(self._directory)
            self._tail = None

    def _find_tail(self) -> tuple[int, str]:
        with self.snapshot() as snapshot:
            t = len(snapshot.rounds())
            return t, snapshot.entry(t - 1)[1] if t else snapshot.start

    def read(self, t: int, client_ids: Sequence[str] | None = None) -> RoundArrays:
        """Read a round as arrays; the result owns its memory.

        Args:
            t: Round, 0-based.
            client_ids: Read only these clients' updates, in this order; `None` for all.

        Raises:
            RoundNotFoundError: If the round, or the update of one of the clients, is not stored.
            ForgottenError: If one of the clients was forgotten.
            HistoryCorruptedError: If the bytes are not those that were written.
            HistoryKeyError: If the history is encrypted and the master key is missing or another.
        """
        with self.snapshot() as snapshot:
            return snapshot.read(snapshot.entry(t)[0], client_ids)

    def read_round(self, t: int, client_ids: Sequence[str] | None = None) -> RoundRecord:
        """Read a round; the result owns its memory.

        Where numba computes, updates of the codec `int8` or `int8+zstd` stay as they are stored
        until somebody asks for them.

        Args:
            t: Round, 0-based.
            client_ids: Read only these clients' updates, in this order; `None` for all.

        Raises:
            RoundNotFoundError: If the round, or the update of one of the clients, is not stored.
            ForgottenError: If one of the clients was forgotten.
            HistoryCorruptedError: If the bytes are not those that were written.
            HistoryKeyError: If the history is encrypted and the master key is missing or another.
        """
        codec = self._open()[0].codec
        if type(codec).decode is not Int8Codec.decode or compiled() is None:
            return super().read_round(t, client_ids)
        from fedrec.history.conversion import to_record
        from fedrec.history.undecoded import UndecodedUpdates

        with self.snapshot() as snapshot:
            entry, _ = snapshot.entry(t)
            arrays, codes, steps = snapshot.read_undecoded(entry, client_ids)
        record = to_record(arrays)
        return dataclasses.replace(record, sent=UndecodedUpdates(codes, steps, record.sent))

    def rounds(self) -> range:
        """Return the rounds that are stored, `range(0, k)`."""
        if self.is_empty:
            return range(0)
        with self.snapshot() as snapshot:
            return snapshot.rounds()

    def index(self, t: int) -> RoundIndex:
        """Return what is known of a round without reading its vectors.

        Bounds of magnitudes were computed when the round was written.

        Raises:
            RoundNotFoundError: If the round is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        with self.snapshot() as snapshot:
            return snapshot.index(t)

    def as_stored(self, updates: Tensor) -> Tensor:
        """Return updates that are to be written as `read_round` would return them afterwards.

        They are encoded for that; when a round with these very updates is written, it is not done
        again.

        Args:
            updates: Shape $(m, d)$; must not be changed until they are written.

        Returns:
            Shape $(m, d)$; `updates` itself if the codec is lossless.
        """
        return self._encoded.add(self._open()[0].codec, updates)

    def seal(self, content: bytes, shard: int = 0) -> bytes:
        """Return the content of a file that lies beside the history: encrypted, if that is.

        Raises:
            HistoryKeyError: If the history is encrypted and the master key is missing or another.
        """
        recording = self._open()[0]
        if recording.manifest.encryption is None:
            return content
        return SEALED + recording.require_keys().seal_file(content)

    def unseal(self, content: bytes, shard: int = 0) -> bytes:
        """Return what `seal` was given.

        Raises:
            HistoryCorruptedError: If it was changed, or is of another history.
            HistoryKeyError: If the history is encrypted and the master key is missing or another.
        """
        if not content.startswith(SEALED):
            return content
        recording = self._open()[0]
        try:
            if recording.manifest.encryption is None:
                raise TamperedError("the history is not encrypted")
            return recording.require_keys().open_file(memoryview(content)[len(SEALED) :])
        except TamperedError as error:
            raise HistoryCorruptedError(
                f"A file beside history `{self.path}` cannot be decrypted: {error}."
            ) from error

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Read the history as it is at one moment, by its entries and vectors; for tools."""
        recording, environment = self._open()
        with environment.read() as txn:
            yield Snapshot(recording, environment, txn)

    @property
    def is_locked(self) -> bool:
        """Whether the recording is encrypted and its keys are not known."""
        return self._open()[0].is_locked

    @property
    def forgotten(self) -> tuple[str, ...]:
        """Clients that were forgotten (`fedrec.history.forget`), or are being forgotten."""
        return () if self.is_empty else tuple(self._open()[0].forgotten)

    def num_bytes(self) -> int:
        """Return the size of `data.mdb` in bytes."""
        return 0 if self.is_empty else (self._directory / DATA).stat().st_size

    def damage(self, progress: Callable[[int], None] | None = None) -> list[Damage]:
        """Read everything, and list every damage: `fedrec.history.repair` drops nothing else.

        Of an encrypted history whose master key is not given, each record is compared with its
        checksum, and no more.

        Args:
            progress: Called with the number of rounds that are left, after each one.

        Returns:
            One entry for each damaged record and each break of the chain; none if all is well.

        Raises:
            HistoryCorruptedError: If the file is truncated, or the manifest is damaged.
        """
        damage = []
        for left, damage_of_round in self._damage():
            damage += damage_of_round
            if progress is not None:
                progress(left)
        return damage

    def verify(self) -> range:
        """Read everything, and follow the chain of hashes from the manifest to the last round.

        Returns:
            The rounds that were verified: all that are stored.

        Raises:
            HistoryCorruptedError: At the first thing that is not as it was written.
        """
        rounds = self.rounds()
        for _, damage in self._damage():
            if damage:
                raise DamagedRecordError(str(self.path), damage[0])
        return rounds

    def _damage(self) -> Iterator[tuple[int, list[Damage]]]:
        """Yield how many rounds are left, and what is damaged in the one that was read."""
        recording, environment = self._open()
        if recording.pending:
            yield len(self.rounds()), [Damage(part="the whole", reason=recording.unfinished())]
        yield from check(recording, environment)

    def close(self) -> None:
        """Let go of the files and of the right to write. The history can be used again."""
        environment, self._environment = self._environment, None
        lock, self._lock = self._lock, None
        self._recording = self._tail = None
        self._encoded.clear()
        unsynced, self._unsynced = self._unsynced, 0
        try:
            if unsynced and environment is not None and environment.pid == os.getpid():
                environment.sync()
        finally:
            if environment is not None:
                environment.release()
            if lock is not None:
                lock.release()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(path={str(self.path)!r})"

    def __del__(self) -> None:
        if "_encoded" in vars(self):  # not if it was called with other arguments
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        unshared = dict.fromkeys(("_environment", "_lock", "_recording", "_tail"))
        fresh = {"_encoded": EncodedUpdates(), "_unsynced": 0, "path": self._directory}
        return {**self.__dict__, **unshared, **fresh}

    def _check_empty(self) -> None:
        if not self.is_empty:
            raise HistoryFormatError(
                f"History `{self.path}` already holds a recording of {len(self.rounds())} rounds. "
                "HINT: resume it, or record to another path."
            )

    def _open(self) -> tuple[StoredManifest, Environment]:
        if self._environment is None or self._environment.pid != os.getpid():
            if not (self._directory / DATA).exists():
                require_one_file(self._directory)
            self._environment = Environment.acquire(
                self._directory, self.map_size, sync=self.sync_every == 1
            )
            self._unsynced = 0
        if self._recording is None:
            self._recording = self._load(self._environment)
        return self._recording, self._environment

    def _load(self, environment: Environment) -> StoredManifest:
        recording = load(str(self.path), environment, self.master_key)
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
        return recording
