"""Forgetting clients: nothing they sent stays in a run."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from fedrec._files import write_atomically
from fedrec.exceptions import (
    ConfigurationError,
    HistoryCorruptedError,
    HistoryError,
    RoundNotFoundError,
    expected,
)
from fedrec.history.lmdb.audit import NOTE, chained, note, noted
from fedrec.history.lmdb.damage import DamagedRecordError
from fedrec.history.lmdb.encryption import KEYS, destroy
from fedrec.history.lmdb.environment import DATA, Environment, beside, put_in_place
from fedrec.history.lmdb.errors import full_disk
from fedrec.history.lmdb.reading import Snapshot
from fedrec.history.lmdb.records import FORGOTTEN, REPAIRS, Recording
from fedrec.history.lmdb.scan import Probes
from fedrec.history.tools.check import check
from fedrec.history.tools.copying import Progress, copy_rounds, require_whole
from fedrec.history.tools.npz import UNREADABLE
from fedrec.history.tools.repair import BACKUP, alone

__all__ = ["REASON", "Forgetting", "forget"]

REASON = "forgotten"

# Closing a lock file that was opened a second time would give up the lock.
_OURS = {DATA, KEYS, NOTE, "lock.mdb", "writer.lock"}
# An aggregate is a client's update if it is no further from it, relatively, than codecs are.
_SAME = 0.02


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
        probes: Pieces of 64 bytes of these updates that every file of the run was searched for at
            the end: up to four of an update's numbers, and four of its bytes on disk.
        bytes_searched: Size of these files.
    """

    clients: tuple[str, ...]
    when: str
    updates: int
    aggregates: tuple[int, ...]
    keys: tuple[str, ...]
    removed: tuple[Path, ...]
    probes: int
    bytes_searched: int


def forget(
    path: str | os.PathLike[str],
    client_ids: Sequence[str],
    *,
    progress: Progress | None = None,
    master_key: str | None = None,
) -> Forgetting:
    """Leave nothing of what these clients sent in a history and the run folder it lies in.

    - Other files of the run that hold a piece of their updates (exports, caches) are removed,
      and so are `data.mdb.damaged`, checkpoints of recoveries that they take part in, comparisons
      with their exact updates (diagnostics.csv), and their detection scores.
    - In an encrypted history, their data keys are destroyed: copies of `data.mdb` elsewhere are
      noise now, as far as they are concerned.
    - The history is written anew without their updates and all that is known of them: magnitude
      bounds, error bounds, checksums. They count as refused in their rounds, with the reason
      "forgotten". The new file is read back before it takes the place of the old one.
    - An aggregate that is one of these updates, unchanged (of Krum, or of a round with one client),
      is replaced by what the global weights before and after the round tell of it.
    - Every file of the run is searched for pieces of the updates.

    Global weights and aggregates, to which these clients contributed, stay: the other clients'
    recovery needs them. It gives the same bits as before. The history keeps its `store_id`, so
    that half-finished recoveries without these clients go on. A list in it, chained by hashes,
    says who was forgotten when.

    Whenever this is interrupted, it can be called again. Until it is finished, the history says so,
    and these clients cannot be read. Copies outside the run folder are out of reach; so are the
    free blocks of the disk, where the history is not encrypted.

    Args:
        path: The history, or the run folder it lies in. Nobody else may have it open.
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
        HistoryError: If a file still holds a piece of an update at the end.

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
    with alone(path, master_key, forgetting=True) as (directory, recording, environment):
        if recording.is_locked:
            recording.require_keys()
        known = recording.client_ids
        if not client_ids or not set(client_ids) <= set(known):
            requirement = "ids of recorded clients, at least one"
            raise ConfigurationError(
                expected("client_ids", requirement, list(client_ids), known=known[:20])
            )
        run = _run_folder(Path(path).absolute(), directory.resolve())
        store_id = recording.manifest.store_id
        earlier = noted(directory, store_id) or {"clients": [], "when": None, "aggregates": []}
        clients = tuple(c for c in known if c in {*client_ids, *earlier["clients"]})
        _require_whole_without(clients, recording, environment, progress)
        found = _Found.collect(clients, recording, environment)
        when = earlier["when"] or datetime.now(UTC).isoformat(timespec="seconds")
        aggregates = tuple(sorted({*found.aggregates, *earlier["aggregates"]}))
        content = {"store_id": store_id, "clients": clients, "when": when}
        note(directory, {**content, "aggregates": aggregates})
        # First what is found by its contents, which nobody can tell without the keys.
        removed = _remove_others(run, directory, clients, found.probes)
        keys: tuple[str, ...] = ()
        if recording.keys is not None:
            keys = destroy(recording.history, directory, clients)
        searched = _rewrite(directory, recording, environment, found, when, aggregates, progress)
        searched += _require_gone(run, found.probes)
        (directory / NOTE).unlink()
    return Forgetting(
        clients=clients,
        when=when,
        updates=sum(found.updates.values()),
        aggregates=aggregates,
        keys=keys,
        removed=tuple(removed),
        probes=len(found.probes),
        bytes_searched=searched,
    )


@dataclass(kw_only=True, eq=False)
class _Found:
    """What a history holds of some clients."""

    updates: dict[str, int]
    probes: Probes = field(default_factory=Probes)
    aggregates: set[int] = field(default_factory=set)

    @classmethod
    def collect(
        cls, clients: Sequence[str], recording: Recording, environment: Environment
    ) -> _Found:
        """Read what is left of the clients' updates."""
        found = cls(updates=dict.fromkeys(clients, 0))
        indices = {recording.indices[c] for c in clients}
        with environment.read() as txn:
            rounds = Snapshot(recording, environment, txn).rounds()
        for t in rounds:
            with environment.read() as txn:
                snapshot = Snapshot(recording, environment, txn)
                entry, _ = snapshot.entry(t)
                present = set(entry["present"])
                if present and present <= indices:  # theirs alone
                    found.aggregates.add(t)
                for index in sorted(indices & present):
                    found._add(snapshot, entry, recording.client_ids[index], index)
        return found

    def _add(self, snapshot: Snapshot, entry: dict[str, Any], client_id: str, index: int) -> None:
        t = entry["round"]
        stored = snapshot.stored_payload(t, index)
        if stored is None:  # not to be kept
            return
        self.updates[client_id] += 1
        self.probes.add(stored)
        try:
            arrays = snapshot.read(entry, [client_id])
        except (RoundNotFoundError, HistoryCorruptedError):
            return  # nobody can read it any more
        update = arrays.updates[0]
        self.probes.add(update.tobytes())
        if np.linalg.norm(arrays.aggregate - update) <= _SAME * np.linalg.norm(update):
            self.aggregates.add(t)


def _require_whole_without(
    clients: tuple[str, ...],
    recording: Recording,
    environment: Environment,
    progress: Progress | None,
) -> None:
    """Find out whether the history can be written anew, before anything is changed."""
    with environment.read() as txn:
        needed = environment.compact_bytes(txn)
    if shutil.disk_usage(environment.directory).free < needed:
        raise full_disk(environment.directory, needed, "the new file needs as much")
    recording.forgotten, recording.pending = {}, clients  # these are not looked at
    for left, damage in check(recording, environment):
        if damage:
            raise DamagedRecordError(recording.history, damage[0])
        if progress is not None:
            progress(left)
    recording.pending = ()


def _run_folder(path: Path, directory: Path) -> Path:
    """Return the folder that is searched: the run's, if that is known to be one."""
    run = directory.parent
    is_run = any((run / name).exists() for name in ("recipe.yaml", "record", "recover"))
    return run if path == run or (directory.name == "history" and is_run) else directory


def _remove_others(
    run: Path, directory: Path, clients: tuple[str, ...], probes: Probes
) -> list[Path]:
    """Remove what the clients left in other files than the history's own."""
    gone = [directory / BACKUP, *directory.glob("*.tmp"), *run.rglob("recover/*/*.tmp")]
    gone.append(run / "record" / "aggregator.npz")  # a rule may remember single clients
    gone += [
        path for path in run.rglob("recover/*/checkpoint.npz") if not _is_without(path, clients)
    ]
    compared = [p for p in run.rglob("recover/*/diagnostics.csv") if _names(p, clients)]
    gone += [file for p in compared for file in (p, p.parents[2] / "report.html")]
    for found in run.rglob("detection.json"):
        if _remove_scores(found, clients):  # `fedrec report` makes these again
            gone += [found.with_name("results.json"), found.with_name("report.html")]
    gone += [path for path in _files(run) if path not in gone and probes.find(path)]
    gone = [path for path in dict.fromkeys(gone) if path.exists()]
    for path in gone:
        path.unlink()
    return gone


def _files(run: Path) -> Iterator[Path]:
    """Yield the files of a run, those of the open history left out."""
    for folder, _, names in os.walk(run):
        files = (Path(folder, name) for name in sorted(names) if name not in _OURS)
        yield from (path for path in files if path.is_file() and not path.is_symlink())


def _is_without(checkpoint: Path, clients: tuple[str, ...]) -> bool:
    """Return whether a recovery left these clients out, and so keeps nothing of theirs."""
    try:
        with np.load(checkpoint, allow_pickle=False) as archive:
            state = json.loads(archive["__json__"].tobytes())
        return set(clients) <= set(state["identity"]["exclude"])
    except UNREADABLE:
        return False


def _names(path: Path, clients: tuple[str, ...]) -> bool:
    """Return whether a table that begins with a column of client ids has one of these."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        return any(row and row[0] in clients for row in csv.reader(file))


def _remove_scores(path: Path, clients: tuple[str, ...]) -> bool:
    """Remove the scores that a detector gave the clients; return whether there were some."""
    try:
        stored = json.loads(path.read_bytes())
        scores = stored["result"]["scores"]
        found = [c for c in clients if scores.pop(c, None) is not None]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    if found:
        write_atomically(path, json.dumps(stored, indent=2).encode() + b"\n", private=True)
    return bool(found)


def _rewrite(
    directory: Path,
    recording: Recording,
    environment: Environment,
    found: _Found,
    when: str,
    aggregates: tuple[int, ...],
    progress: Progress | None,
) -> int:
    """Write the history anew without the clients; return how many bytes were searched then."""
    clients = tuple(found.updates)
    with environment.read() as txn:
        snapshot = Snapshot(recording, environment, txn)
        rounds, repairs, forgotten = snapshot.rounds(), snapshot.repairs(), snapshot.forgotten()
    if not any(found.updates.values()) and set(clients) <= {e["client_id"] for e in forgotten}:
        return 0  # done, when this was interrupted
    new_entries = [
        {"client_id": c, "when": when, "updates": count, "aggregates": aggregates}
        for c, count in found.updates.items()
    ]
    lists = {FORGOTTEN: {"forgotten": chained(forgotten, new_entries)}}
    if repairs:
        lists[REPAIRS] = {"repairs": repairs}
    indices = {recording.indices[c] for c in clients}
    with beside(directory) as new:
        copy_rounds(
            recording,
            environment,
            recording,
            new,
            len(rounds),
            lambda t, index: REASON if index in indices else None,
            lists=lists,
            blurred=aggregates,
        )
        require_whole(new, recording, progress)
        left = found.probes.find(new / DATA)
        if left and (left := _not_of_others(new, left)):
            raise HistoryError(
                f"History `{recording.history}` would still hold {len(left)} pieces of updates of "
                f"{', '.join(clients)}, and was not changed."
            )
        searched = (new / DATA).stat().st_size
        put_in_place(new, directory)
    return searched


def _not_of_others(new: Path, pieces: set[bytes]) -> set[bytes]:
    """Return the pieces that are in no record: other clients may have sent the very same."""
    probes = Probes.of(pieces)
    environment = Environment.acquire(new, None)
    try:
        with environment.read() as txn:
            for database in ("updates", "models"):
                for _, record in environment.cursor(txn, database):
                    pieces = pieces - probes.find_in(bytes(record))
    finally:
        environment.release()
    return pieces


def _require_gone(run: Path, probes: Probes) -> int:
    """Search every file but the new history, which was searched; return how many bytes."""
    searched = 0
    for path in _files(run):
        if probes.find(path):
            raise HistoryError(
                f"`{path}` holds pieces of updates that were to be forgotten; it was written just "
                "now. HINT: stop what writes it, and forget again."
            )
        searched += path.stat().st_size
    return searched
