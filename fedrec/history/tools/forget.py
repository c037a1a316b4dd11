"""Forgetting clients: nothing they sent stays in a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from fedrec._derived import forget_derived
from fedrec.exceptions import (
    ConfigurationError,
    HistoryCorruptedError,
    RoundNotFoundError,
    expected,
)
from fedrec.history.lmdb.damage import DamagedRecordError
from fedrec.history.lmdb.encryption import destroy
from fedrec.history.lmdb.environment import Environment, beside, put_in_place
from fedrec.history.lmdb.errors import full_disk
from fedrec.history.lmdb.forgotten import NOTE, chained, noted, write_note
from fedrec.history.lmdb.reading import Snapshot
from fedrec.history.lmdb.records import FORGOTTEN, REPAIRS, StoredManifest
from fedrec.history.tools.check import check
from fedrec.history.tools.copying import Progress, copy_rounds, require_whole
from fedrec.history.tools.export import exported
from fedrec.history.tools.opening import Part, alone
from fedrec.history.tools.repair import BACKUP

__all__ = ["REASON", "Forgetting", "forget"]

REASON = "forgotten"

# An aggregate is a client's update if it is no further from it, relatively, than codecs are.
_SAME = 0.02

# What a run folder has in it, whatever the name of the history.
_OF_A_RUN = ("record", "recover")


@dataclass(frozen=True, kw_only=True)
class Forgetting:
    """What forgetting clients did.

    Args:
        clients: Who was forgotten.
        when: When, in UTC.
        updates: How many of their updates were in the history.
        aggregates: Rounds whose aggregate was one of these updates, unchanged.
        keys: Clients whose data key was destroyed, where the history is encrypted.
        removed: Other files of the run that held something of theirs, and were removed.
    """

    clients: tuple[str, ...]
    when: str
    updates: int
    aggregates: tuple[int, ...]
    keys: tuple[str, ...]
    removed: tuple[Path, ...]


def forget(
    path: str | os.PathLike[str],
    client_ids: Sequence[str],
    *,
    progress: Progress | None = None,
    master_key: str | None = None,
) -> Forgetting:
    """Leave nothing of what these clients sent in a history and the run folder it lies in.

    - What the run has derived from their updates is removed: all files that were registered for it
      (`register_derived`), such as checkpoints of recoveries that they take part in, comparisons
      with their exact updates and their detection scores; files of exports; `data.mdb.damaged`.
    - In an encrypted history, their data keys are destroyed: copies of `data.mdb` elsewhere are
      noise now, as far as they are concerned.
    - The history is written anew without their updates and all that is known of them: magnitude
      bounds, error bounds, checksums. They count as refused in their rounds, with the reason
      "forgotten". The new file is read back before it takes the place of the old one.
    - An aggregate that is one of these updates, unchanged (of Krum, or of a round with one client),
      is replaced by what the global weights before and after the round tell of it.

    Global weights and aggregates, to which these clients contributed, stay: the other clients'
    recovery needs them. It gives the same bits as before. The history keeps its `store_id`, so
    that half-finished recoveries without these clients go on. A list in it, chained by hashes,
    says who was forgotten when.

    Whenever this is interrupted, it can be called again. Until it is finished, the history says so,
    and these clients cannot be read. Copies that you made are out of reach; so are the free blocks
    of the disk, where the history is not encrypted.

    Args:
        path: The history, or the run folder it lies in, also by a link. Nobody else may have it
            open.
        client_ids: Clients to forget.
        progress: Called after each round that was read, with the number of rounds left; the
            history is read twice.
        master_key: Where the master key of an encrypted history comes from.

    Returns:
        What was done.

    Raises:
        ConfigurationError: If there is no such client.
        HistoryFormatError: If there is no history.
        HistoryLockedError: If another store or process has it open.
        HistoryKeyError: If it is encrypted and the master key is missing.
        HistoryCorruptedError: If it is damaged; repair it first.
        HistoryFullError: If the disk has no room for the new file.

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
        ...     _ = forget(path, ["a"])
        ...     LMDBHistory(path).forgotten
        ('a',)
    """
    done = _forget(path, client_ids, progress, master_key)
    others = [c for c in client_ids if c not in done.clients]
    if not others:
        return done
    # What was finished first had been interrupted.
    more = _forget(path, others, progress, master_key)
    return Forgetting(
        clients=done.clients + more.clients,
        when=more.when,
        updates=done.updates + more.updates,
        aggregates=tuple(sorted({*done.aggregates, *more.aggregates})),
        keys=done.keys + more.keys,
        removed=done.removed + more.removed,
    )


def _forget(
    path: str | os.PathLike[str],
    client_ids: Sequence[str],
    progress: Progress | None,
    master_key: str | None,
) -> Forgetting:
    """Forget clients, or finish what was interrupted."""
    with alone(path, master_key, forgetting=True) as whole:
        parts = whole.parts
        for part in parts:
            if part.recording.is_locked:
                part.recording.require_keys()
        known, store_id = parts[0].recording.client_ids, parts[0].recording.manifest.store_id
        if not client_ids or not set(client_ids) <= set(known):
            requirement = "ids of recorded clients, at least one"
            raise ConfigurationError(
                expected("client_ids", requirement, list(client_ids), known=known[:20])
            )
        folders = _searched(Path(path).absolute(), whole.directory)
        notes = [note for part in parts if (note := noted(part.directory, store_id)) is not None]
        chosen = notes[0]["clients"] if notes else client_ids
        clients = tuple(c for c in known if c in set(chosen))
        for part in parts:
            _require_whole_without(clients, part.recording, part.environment, progress)
        updates = [_Updates.collect(clients, part) for part in parts]
        when = notes[0]["when"] if notes else datetime.now(UTC).isoformat(timespec="seconds")
        # Every shard has the aggregate, and one of them the update that it is.
        found = {t for of_part in updates for t in of_part.aggregates}
        aggregates = tuple(sorted(found.union(*(note["aggregates"] for note in notes))))
        counts = {c: sum(of_part.counts[c] for of_part in updates) for c in clients}
        for note in notes:
            counts = {c: max(count, note["updates"][c]) for c, count in counts.items()}
        content = {"store_id": store_id, "clients": clients, "when": when, "updates": counts}
        for part in parts:
            write_note(part.directory, {**content, "aggregates": aggregates})
        removed = _remove_others(folders, [part.directory for part in parts], clients)
        keys: tuple[str, ...] = ()
        for part in parts:
            if part.recording.keys is not None:
                destroyed = destroy(part.recording.history, part.directory, clients)
                keys += tuple(c for c in destroyed if c not in keys)
        forgettings = [
            {"client_id": c, "when": when, "updates": count, "aggregates": aggregates}
            for c, count in counts.items()
        ]
        for part, of_part in zip(parts, updates, strict=True):
            _rewrite(part, of_part, forgettings, aggregates, progress)
        for part in parts:
            (part.directory / NOTE).unlink()
    return Forgetting(
        clients=clients,
        when=when,
        updates=sum(counts.values()),
        aggregates=aggregates,
        keys=keys,
        removed=tuple(removed),
    )


@dataclass(kw_only=True, eq=False)
class _Updates:
    """How many updates of some clients a file holds, and which aggregates are one of these."""

    counts: dict[str, int]
    aggregates: set[int] = field(default_factory=set)

    @classmethod
    def collect(cls, clients: Sequence[str], part: Part) -> _Updates:
        """Read what is left of the clients' updates."""
        recording = part.recording
        updates = cls(counts=dict.fromkeys(clients, 0))
        indices = {recording.indices[c] for c in clients}
        with part.snapshot() as snapshot:
            rounds = snapshot.rounds()
        for t in rounds:
            with part.snapshot() as snapshot:
                entry, _ = snapshot.entry(t)
                present = set(entry["present"])
                if present and present <= indices:  # theirs alone
                    updates.aggregates.add(t)
                for index in sorted(indices & present):
                    updates._add(snapshot, entry, recording.client_ids[index], index)
        return updates

    def _add(self, snapshot: Snapshot, entry: dict[str, Any], client_id: str, index: int) -> None:
        t = entry["round"]
        if not snapshot.holds(t, index):  # not to be kept, or in another shard
            return
        self.counts[client_id] += 1
        try:
            arrays = snapshot.read(entry, [client_id])
        except (RoundNotFoundError, HistoryCorruptedError):
            return  # nobody can read it any more
        update = arrays.updates[0]
        if np.linalg.norm(arrays.aggregate - update) <= _SAME * np.linalg.norm(update):
            self.aggregates.add(t)


def _require_whole_without(
    clients: tuple[str, ...],
    recording: StoredManifest,
    environment: Environment,
    progress: Progress | None,
) -> None:
    """Find out whether the history can be written anew, before anything is changed."""
    with environment.read() as txn:
        needed = environment.compact_bytes(txn)
    if shutil.disk_usage(environment.directory).free < needed:
        raise full_disk(environment.directory, needed, "the new file needs as much")
    recording.forgotten, recording.pending = {}, clients  # `check` leaves their updates out
    for left, damage in check(recording, environment):
        if damage:
            raise DamagedRecordError(recording.history, damage[0])
        if progress is not None:
            progress(left)
    recording.pending = ()


def _searched(path: Path, directory: Path) -> list[Path]:
    """Return the folders that are searched: the history's, and those of runs that it lies in."""
    found = {}
    for history in (directory, directory.resolve()):  # a run may have a link to it
        run = history.parent
        marks = (*_OF_A_RUN, "recipe.yaml") if history.name == "history" else _OF_A_RUN
        if run == path or any((run / name).exists() for name in marks):
            found[run.resolve()] = run
    return [*found.values(), directory]


def _remove_others(
    folders: Sequence[Path], directories: Sequence[Path], clients: tuple[str, ...]
) -> list[Path]:
    """Remove what the clients left in other files than the history's own."""
    gone = [path for folder in folders for path in forget_derived(folder, clients)]
    left = [path for d in directories for path in (d / BACKUP, *sorted(d.glob("*.tmp")))]
    left += [path for folder in folders for path in exported(folder, clients)]
    for path in left:
        if path.exists():
            path.unlink()
            gone.append(path)
    return gone


def _rewrite(
    part: Part,
    updates: _Updates,
    new_forgettings: Sequence[Mapping[str, Any]],
    aggregates: tuple[int, ...],
    progress: Progress | None,
) -> None:
    """Write a file anew without the clients."""
    recording, clients = part.recording, tuple(updates.counts)
    with part.snapshot() as snapshot:
        rounds, repairs, forgotten = snapshot.rounds(), snapshot.repairs(), snapshot.forgotten()
    if not any(updates.counts.values()) and set(clients) <= {f["client_id"] for f in forgotten}:
        return  # done, when this was interrupted
    lists = {FORGOTTEN: {"forgotten": chained(forgotten, new_forgettings)}}
    if repairs:
        lists[REPAIRS] = {"repairs": repairs}
    indices = {recording.indices[c] for c in clients}
    with beside(part.directory) as new:
        copy_rounds(
            part.snapshot,
            recording,
            new,
            len(rounds),
            lambda t, index: REASON if index in indices else None,
            lists=lists,
            blurred=aggregates,
        )
        require_whole(new, recording, progress)
        put_in_place(new, part.directory)
