"""Opening a history for a tool: in one file or in shards, to read it or to have it alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedrec.exceptions import HistoryError
from fedrec.history.lmdb.environment import DATA, Environment
from fedrec.history.lmdb.history import LMDBHistory
from fedrec.history.lmdb.lock import WriterLock
from fedrec.history.lmdb.reading import Snapshot, load
from fedrec.history.lmdb.records import StoredManifest
from fedrec.history.lmdb.shards import (
    REPAIRING,
    missing,
    mixed,
    require_repaired,
    shard_folder,
    shard_folders,
    shards_of,
)
from fedrec.history.sharded import ShardedHistory

__all__ = ["Part", "Parts", "alone", "history_folder", "open_history", "store_class"]


def history_folder(path: str | os.PathLike[str]) -> Path:
    """Return the directory of a history, given that, a run folder it lies in, or a shard of it."""
    path = Path(path)
    inside = path / "history"
    if (inside / DATA).exists() or shard_folders(inside):
        return inside
    is_shard = path.absolute() in shard_folders(path.absolute().parent).values()
    return path.parent if is_shard else path


def open_history(
    path: str | os.PathLike[str], *, master_key: str | None = None
) -> LMDBHistory | ShardedHistory:
    """Return the store for a history, in one file or in shards.

    Args:
        path: The history, the run folder it lies in, or a shard of it.
        master_key: Where the master key of an encrypted history comes from.
    """
    folder = history_folder(path)
    return store_class(folder)(folder, master_key=master_key)


def store_class(folder: Path) -> type[LMDBHistory] | type[ShardedHistory]:
    """Return the class of the store for what is in a directory."""
    is_sharded = not (folder / DATA).exists() and shard_folders(folder)
    return ShardedHistory if is_sharded else LMDBHistory


@dataclass(frozen=True, eq=False)
class Part:
    """A file of a history that nobody else has open: all of it, or a shard.

    Args:
        directory: Directory of the file, an absolute path.
        recording: The recording in it.
        environment: The open file.
    """

    directory: Path
    recording: StoredManifest
    environment: Environment

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Read it as it is at one moment."""
        with self.environment.read() as txn:
            yield Snapshot(self.recording, self.environment, txn)


@dataclass(frozen=True, eq=False)
class Parts:
    """A history that nobody else has open.

    Args:
        directory: Directory of the history, an absolute path.
        parts: Its files.
        sharded: Whether these are shards.
    """

    directory: Path
    parts: tuple[Part, ...]
    sharded: bool


@contextmanager
def alone(
    path: str | os.PathLike[str],
    master_key: str | None = None,
    *,
    forgetting: bool = False,
    repairing: bool = False,
) -> Iterator[Parts]:
    """Open a history that nobody else has open, and keep it so.

    Args:
        path: The history, the run folder it lies in, or a shard of it.
        master_key: Where the master key of an encrypted history comes from.
        forgetting: Whether clients may be half forgotten.
        repairing: Whether shards may be half repaired.

    Raises:
        HistoryLockedError: If another store or process has it open.
        HistoryFormatError: If a shard is missing.
        HistoryError: If clients are half forgotten, or shards half repaired.
    """
    folder = history_folder(path)
    sharded = store_class(folder) is ShardedHistory
    shards = list(shard_folders(folder)) if sharded else []
    folders = [shard_folder(folder, shard) for shard in shards] or [folder]
    if sharded and not repairing:
        require_repaired(folder)
    with ExitStack() as stack:
        parts = [stack.enter_context(_alone(one, master_key, forgetting)) for one in folders]
        if sharded:
            num_shards = shards_of(parts[0].recording.manifest)
            if shards != list(range(num_shards)):
                raise missing(folder, sorted({*range(num_shards)} - {*shards}), num_shards)
            ids = {part.recording.manifest.store_id for part in parts}
            if len(ids) > 1 and not (folder / REPAIRING).exists():
                raise mixed(folder)
        yield Parts(folder.absolute(), tuple(parts), sharded)


@contextmanager
def _alone(folder: Path, master_key: str | None, forgetting: bool) -> Iterator[Part]:
    directory = folder.absolute()
    environment = Environment.acquire(directory, None)
    try:
        lock = WriterLock(directory)
        try:
            environment.claim()
            recording = load(str(folder), environment, master_key)
            if recording.pending and not forgetting:
                raise HistoryError(f"History `{folder}`: {recording.unfinished()}.")
            yield Part(directory, recording, environment)
        finally:
            lock.release()
    finally:
        environment.release()
