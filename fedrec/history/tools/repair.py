"""Rewriting a history: without its free pages, or without what is damaged.

The new file is made beside the old one, read back, and put in its place in one step.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrec.exceptions import HistoryCorruptedError, HistoryError
from fedrec.history.lmdb.damage import Damage, DamagedRecordError
from fedrec.history.lmdb.environment import DATA, Environment, beside, put_in_place
from fedrec.history.lmdb.lock import WriterLock
from fedrec.history.lmdb.reading import Snapshot, load
from fedrec.history.lmdb.records import FORGOTTEN, REPAIRS, StoredManifest
from fedrec.history.tools.check import BROKEN_CHAIN, check
from fedrec.history.tools.copying import Progress, copy_rounds, require_whole
from fedrec.history.tools.info import history_folder

__all__ = ["Compaction", "Repair", "alone", "compact", "repair"]

BACKUP = "data.mdb.damaged"
DROPPED = "damaged, dropped by a repair"


@dataclass(frozen=True, kw_only=True)
class Compaction:
    """What a compaction did.

    Args:
        bytes_before: Size of the file before, in bytes.
        bytes_after: Size of the file afterwards.
    """

    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, kw_only=True)
class Repair:
    """What a repair did.

    Args:
        damage: All that was damaged; nothing has changed if this is empty.
        rounds_before: Rounds before the repair.
        rounds: Rounds that are left, `0..rounds - 1`.
        dropped: Round and client of each update that was dropped from a round that is left.
        backup: Where the damaged file is kept, or `None` if nothing was damaged.
    """

    damage: tuple[Damage, ...]
    rounds_before: int
    rounds: int
    dropped: tuple[tuple[int, str], ...]
    backup: Path | None


def compact(
    path: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    master_key: str | None = None,
) -> Compaction:
    """Give the free space in a history's file back to the disk.

    A compact copy is made beside the file, read and checked to its last byte, and put in its
    place; the disk has to hold both for that time. Whenever this is interrupted, the old or the
    new file is there, whole.

    Args:
        path: The history, or the run folder it lies in. Nobody else may have it open.
        progress: Called after each round that was checked, with the number of rounds left.
        master_key: Where the master key of an encrypted history comes from. Without one, each
            record is compared with its checksum, and no more.

    Returns:
        The sizes before and after.

    Raises:
        HistoryFormatError: If there is no history.
        HistoryLockedError: If another store or process has it open.
        HistoryCorruptedError: If it is damaged; it is left as it is.
        HistoryFullError: If the disk has no room for the copy.

    Examples:
        >>> import tempfile
        >>> from fedrec.history import LMDBHistory, Manifest
        >>> manifest = Manifest(
        ...     model_fingerprint="f", num_parameters=2, clients={"a": 10, "b": 20}, seed=0,
        ...     aggregator={}, server_lr=0.1, max_rounds=5,
        ... )
        >>> with tempfile.TemporaryDirectory() as path:
        ...     with LMDBHistory(path) as history:
        ...         history.begin(manifest)
        ...     done = compact(path)
        >>> done.bytes_after <= done.bytes_before
        True
    """
    with alone(path, master_key) as opened, beside(opened[0]) as new:
        directory, recording, environment = opened
        before = (directory / DATA).stat().st_size
        environment.copy(new)
        require_whole(new, recording, progress)
        after = (new / DATA).stat().st_size
        put_in_place(new, directory)
    return Compaction(bytes_before=before, bytes_after=after)


def repair(
    path: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    master_key: str | None = None,
) -> Repair:
    """Drop what is damaged from a history, and nothing else.

    - A damaged client update is dropped; its client counts as refused in that round, with the
      reason "damaged, dropped by a repair". The round's aggregate stays as it was recorded.
    - Where global weights, aggregate, buffers or round record of round t are damaged, the rounds
      from t on are dropped: a recovery needs them of every round. Where the chain is broken between
      two rounds, either can be the wrong one, and both are dropped with what follows.

    What is left is copied to a new file, which is read back before it takes the place of the old
    one; that is kept as `data.mdb.damaged`. What was dropped is written down in the history
    (`info`). It has a new `store_id`, so that no half-finished recovery from the damaged history
    goes on with it.

    Args:
        path: The history, or the run folder it lies in. Nobody else may have it open.
        progress: Called after each round that was read, with the number of rounds left; the
            history is read, and then the new file.
        master_key: Where the master key of an encrypted history comes from.

    Returns:
        What was damaged, and what was dropped.

    Raises:
        HistoryFormatError: If there is no history.
        HistoryLockedError: If another store or process has it open.
        HistoryCorruptedError: If no round would be left, or the file is truncated; it is left as
            it is.
        HistoryFullError: If the disk has no room for the new file.
        HistoryKeyError: If the history is encrypted and the master key is missing.
        HistoryError: If a `data.mdb.damaged` is there already.

    Examples:
        >>> import tempfile
        >>> from fedrec.history import LMDBHistory, Manifest
        >>> manifest = Manifest(
        ...     model_fingerprint="f", num_parameters=2, clients={"a": 10, "b": 20}, seed=0,
        ...     aggregator={}, server_lr=0.1, max_rounds=5,
        ... )
        >>> with tempfile.TemporaryDirectory() as path:
        ...     with LMDBHistory(path) as history:
        ...         history.begin(manifest)
        ...     repair(path).damage
        ()
    """
    with alone(path, master_key) as opened, beside(opened[0]) as new:
        directory, recording, environment = opened
        if recording.is_locked:
            recording.require_keys()
        damage: list[Damage] = []
        for left, damage_of_round in check(recording, environment):
            damage += damage_of_round
            if progress is not None:
                progress(left)
        with environment.read() as txn:
            stored = Snapshot(recording, environment, txn).round_numbers()
        whole = Repair(
            damage=(), rounds_before=len(stored), rounds=len(stored), dropped=(), backup=None
        )
        if not damage:
            return whole
        backup = directory / BACKUP
        # A backup that is the file itself was left by a repair that was killed just before its end.
        if backup.exists() and not backup.samefile(directory / DATA):
            raise HistoryError(
                f"History `{directory}` was repaired before, and what was damaged then is still in "
                f"`{backup}`. HINT: move that away, or remove it."
            )
        rounds = _rounds_left(damage, stored)
        if rounds < 1:
            raise HistoryCorruptedError(
                f"History `{directory}` cannot be repaired, as no round would be left: {damage[0]}."
                " HINT: restore it from a copy."
            )
        lost = {(d.round, d.client_id) for d in damage if d.client_id is not None}
        ids = recording.client_ids
        dropped = tuple((t, c) for t in range(rounds) for c in ids if (t, c) in lost)
        note = {"rounds_before": len(stored), "rounds": rounds, "dropped": dropped}
        manifest = dataclasses.replace(recording.manifest, store_id=uuid.uuid4().hex)
        copied = StoredManifest(recording.history, manifest, recording.keys)
        repairs, forgotten = _lists(recording, environment)
        lists = {REPAIRS: {"repairs": [*repairs, note]}}
        if forgotten:
            lists[FORGOTTEN] = {"forgotten": forgotten}
        copy_rounds(
            recording,
            environment,
            copied,
            new,
            rounds,
            lambda t, index: DROPPED if (t, ids[index]) in lost else None,
            lists=lists,
        )
        require_whole(new, copied, progress)
        try:
            backup.unlink(missing_ok=True)
            backup.hardlink_to(directory / DATA)
        except OSError as error:
            raise HistoryError(f"`{backup}` cannot be made: {error}.") from error
        put_in_place(new, directory)
    return dataclasses.replace(
        whole, damage=tuple(damage), rounds=rounds, dropped=dropped, backup=backup
    )


def _rounds_left(damage: list[Damage], stored: list[int]) -> int:
    """Return how many rounds a recovery can still rely on."""
    ends = (
        d.round - (d.reason == BROKEN_CHAIN)
        for d in damage
        if d.round is not None and d.client_id is None
    )
    return min(ends, default=len(stored))


def _lists(
    recording: StoredManifest, environment: Environment
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the lists of repairs and of forgotten clients, empty if they are damaged."""
    lists = []
    with environment.read() as txn:
        snapshot = Snapshot(recording, environment, txn)
        for read in (snapshot.repairs, snapshot.forgotten):
            try:
                lists.append(read())
            except DamagedRecordError:
                lists.append([])
    return lists[0], lists[1]


@contextmanager
def alone(
    path: str | os.PathLike[str], master_key: str | None = None, *, forgetting: bool = False
) -> Iterator[tuple[Path, StoredManifest, Environment]]:
    """Open a history that nobody else has open, and keep it so.

    Args:
        path: The history, or the run folder it lies in.
        master_key: Where the master key of an encrypted history comes from.
        forgetting: Whether clients may be half forgotten.

    Raises:
        HistoryLockedError: If another store or process has it open.
        HistoryError: If clients are half forgotten.
    """
    folder = history_folder(path)
    directory = folder.absolute()
    environment = Environment.acquire(directory, None)
    try:
        lock = WriterLock(directory)
        try:
            environment.claim()
            recording = load(str(folder), environment, master_key)
            if recording.pending and not forgetting:
                raise HistoryError(f"History `{folder}`: {recording.unfinished()}.")
            yield directory, recording, environment
        finally:
            lock.release()
    finally:
        environment.release()
