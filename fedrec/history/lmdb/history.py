"""The history on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedrec.history.base import HistoryStore
from fedrec.history.codecs import CODECS
from fedrec.history.conversion import host_memory, to_arrays, to_record
from fedrec.history.lmdb.damage import Damage
from fedrec.history.lmdb.encoding import as_stored
from fedrec.history.lmdb.pool import Buffers
from fedrec.history.lmdb.store import RoundStore
from fedrec.history.manifest import Manifest
from fedrec.history.rounds import RoundIndex
from fedrec.types import RoundRecord

__all__ = ["LMDBHistory"]


class LMDBHistory(HistoryStore):
    """The history in a directory, in one LMDB file.

    When `write_round` returns, the round survives a killed process and a power cut. Every value
    carries a checksum that is compared at each read, so what is read is what was written, or an
    error that names round and client. Global weights and aggregates are stored exactly; how
    client updates are stored is up to the `codec`, by default exactly, too.

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

    Raises:
        ConfigurationError: If `path` is not a path, `codec` is not known, `map_size` is less than
            65,536, `master_key` says no place, or `sync_every` is less than 1.

    Examples:
        >>> import tempfile, torch
        >>> from fedrec.types import CohortUpdates
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
        self._store = RoundStore(
            path,
            codec=codec,
            keep=keep,
            map_size=map_size,
            master_key=master_key,
            sync_every=sync_every,
        )
        self._store.buffers = Buffers(host_memory)

    @property
    def path(self) -> Path:
        """Directory of the history."""
        return self._store.path

    @property
    def codec(self) -> str | None:
        """Codec that was asked for, or `None` for that of the recording."""
        return self._store.codec

    @property
    def keep(self) -> dict[str, int | float] | None:
        """Retention that was asked for, or `None` for that of the recording."""
        return self._store.keep

    @property
    def map_size(self) -> int | None:
        """Most bytes the history may take, or `None` for the default."""
        return self._store.map_size

    @property
    def master_key(self) -> str | None:
        """Where the master key comes from, or `None` for the default."""
        return self._store.master_key

    @property
    def sync_every(self) -> int:
        """Rounds after which what was written is made durable."""
        return self._store.sync_every

    @property
    def forgotten(self) -> tuple[str, ...]:
        """Clients that were forgotten (`fedrec.history.forget`), or are being forgotten."""
        return self._store.forgotten()

    @property
    def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            HistoryFormatError: If nothing has been recorded yet, or by a newer fedrec, or with
                another codec than was asked for.
        """
        return self._store.manifest

    @property
    def is_empty(self) -> bool:
        """Whether nothing, not even a manifest, has been written yet."""
        return self._store.is_empty

    def begin(self, manifest: Manifest) -> None:
        """Start a recording in an empty store.

        Args:
            manifest: The manifest; what was asked for as `codec` and `keep` is replaced.

        Raises:
            HistoryFormatError: If the store already holds a recording.
            HistoryFullError: If the disk cannot hold all of its rounds (`forecast`).
            HistoryLockedError: If another process is just starting one.
        """
        self._store.begin(manifest)

    def write_round(self, record: RoundRecord) -> None:
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
        self._store.write_round(to_arrays(record))

    def read_round(self, t: int, client_ids: Sequence[str] | None = None) -> RoundRecord:
        """Read a round; the result owns its memory.

        Args:
            t: Round, 0-based.
            client_ids: Read only these clients' updates, in this order; `None` for all.

        Raises:
            RoundNotFoundError: If the round, or the update of one of the clients, is not stored.
            ForgottenError: If one of the clients was forgotten.
            HistoryCorruptedError: If the bytes are not those that were written.
            HistoryKeyError: If the history is encrypted and the master key is missing or another.
        """
        return to_record(self._store.read_round(t, client_ids))

    def index(self, t: int) -> RoundIndex:
        """Return what is known of a round without reading its vectors.

        Bounds of magnitudes were found when the round was written.

        Raises:
            RoundNotFoundError: If the round is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        return self._store.index(t)

    def as_stored(self, updates: Tensor) -> Tensor:
        """Return updates that are to be written as `read_round` would return them afterwards."""
        exact = updates.detach().cpu().contiguous().numpy()
        stored = as_stored(CODECS[self.manifest.codec], exact)
        return updates if stored is exact else torch.from_numpy(stored).to(updates.device)

    def rounds(self) -> range:
        """Return the rounds that are stored, `range(0, k)`."""
        return self._store.rounds()

    def num_bytes(self) -> int:
        """Return the size of `data.mdb` in bytes."""
        return self._store.num_bytes()

    def damage(self) -> list[Damage]:
        """Read everything, and list all that is not as it was written.

        What `fedrec.history.repair` would drop can be told from it. Of an encrypted history whose
        master key is not given, each record is compared with its checksum, and no more.

        Returns:
            One entry for each damaged record and each break of the chain; none if all is well.

        Raises:
            HistoryCorruptedError: If the file is truncated, or the manifest is damaged.
        """
        return [one for _, found in self._store.damage() for one in found]

    def verify(self) -> range:
        """Read everything, and follow the chain of hashes from the manifest to the last round.

        Returns:
            The rounds that were verified: all that are stored.

        Raises:
            HistoryCorruptedError: At the first thing that is not as it was written.
        """
        return self._store.verify()

    def close(self) -> None:
        """Let go of the files and of the right to write. The history can be used again."""
        self._store.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(path={str(self.path)!r})"
