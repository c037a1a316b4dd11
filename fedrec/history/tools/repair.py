"""Rewriting a history: without its free pages, or without what is damaged.

The new file is made beside the old one, read back, and put in its place in one step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrec._files import sync, write_atomically
from fedrec.distributed.sharding import Sharding
from fedrec.exceptions import HistoryCorruptedError, HistoryError
from fedrec.history.lmdb.damage import Damage, DamagedRecordError
from fedrec.history.lmdb.environment import DATA, beside, put_in_place
from fedrec.history.lmdb.reading import Snapshot
from fedrec.history.lmdb.records import FORGOTTEN, NAMES, REPAIRS, StoredManifest, canonical
from fedrec.history.lmdb.shards import (
    MODELS,
    REPAIRING,
    ShardSnapshots,
    damage_of_shard,
    of_whole,
)
from fedrec.history.tools.check import BROKEN_CHAIN, check
from fedrec.history.tools.copying import Progress, copy_rounds, require_whole
from fedrec.history.tools.opening import Part, Parts, alone

__all__ = ["Compaction", "Repair", "compact", "repair"]

BACKUP = "data.mdb.damaged"
DROPPED = "damaged, dropped by a repair"
# What every shard has, by the name of the part.
_VECTORS = frozenset(NAMES[index] for index in MODELS)
# What an interrupted repair of shards has written down.
_PLANNED = frozenset(
    {"store_id", "damage", "rounds_before", "rounds", "dropped", "mended", "repairs", "forgotten"}
)


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
        mended: What was damaged in one shard, and was taken from another.
        backups: Where the old files are kept, one for each shard; none if nothing was damaged.
    """

    damage: tuple[Damage, ...]
    rounds_before: int
    rounds: int
    dropped: tuple[tuple[int, str], ...]
    mended: tuple[Damage, ...]
    backups: tuple[Path, ...]


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
    before = after = 0
    with alone(path, master_key) as whole:
        for part, of_part in _in_turn(whole, progress):
            with beside(part.directory) as new:
                before += (part.directory / DATA).stat().st_size
                part.environment.copy(new)
                require_whole(new, part.recording, of_part)
                after += (new / DATA).stat().st_size
                put_in_place(new, part.directory)
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

    Every shard of a history has the global weights, aggregates and buffers: what is damaged in one
    is taken from another. All else that has to go goes from all shards, and so do the rounds that
    one has lost. Until an interrupted repair is finished, by calling it again, the history cannot
    be used.

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
    with alone(path, master_key, repairing=True) as whole:
        for part in whole.parts:
            if part.recording.is_locked:
                part.recording.require_keys()
        decided = _noted(whole.directory) if whole.sharded else None
        plan = decided or _plan(whole, progress)
        if not plan["damage"]:
            return Repair(
                damage=(),
                rounds_before=plan["rounds_before"],
                rounds=plan["rounds"],
                dropped=(),
                mended=(),
                backups=(),
            )
        if whole.sharded:  # from here on, it has to be finished
            write_atomically(whole.directory / REPAIRING, canonical(plan) + b"\n", private=True)
        with ExitStack() as stack:
            written = []  # all are, before one takes the place of an old one, which others may need
            for part, of_part in _in_turn(whole, progress):
                if part.recording.manifest.store_id != plan["store_id"]:
                    new = stack.enter_context(beside(part.directory))
                    _write_anew(part, whole.parts, plan, new, of_part)
                    written.append((part.directory, new))
            for directory, new in written:
                _replace(directory, new)
        if whole.sharded:
            (whole.directory / REPAIRING).unlink()
            sync(whole.directory)
    return Repair(
        damage=tuple(Damage(**damage) for damage in plan["damage"]),
        rounds_before=plan["rounds_before"],
        rounds=plan["rounds"],
        dropped=tuple((t, client_id) for t, client_id in plan["dropped"]),
        mended=tuple(Damage(**damage) for damage in plan["mended"]),
        backups=tuple(part.directory / BACKUP for part in whole.parts),
    )


def _in_turn(whole: Parts, progress: Progress | None) -> Iterator[tuple[Part, Progress]]:
    """Yield each file, and what is to be called with the number of rounds that are left of it."""
    for number, part in enumerate(whole.parts, start=1):
        with part.snapshot() as snapshot:
            rounds = len(snapshot.round_numbers())

        def show(left: int, others: int = (len(whole.parts) - number) * rounds) -> None:
            if progress is not None:
                progress(left + others)

        yield part, show


def _noted(directory: Path) -> dict[str, Any] | None:
    """Return what an interrupted repair of shards had decided, if there was one.

    Raises:
        HistoryCorruptedError: If it cannot be read.
    """
    path = directory / REPAIRING
    try:
        plan: dict[str, Any] = json.loads(path.read_bytes())
        if plan.keys() != _PLANNED:
            raise ValueError(f"it has the entries {sorted(plan)}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise HistoryCorruptedError(
            f"`{path}`, which says how the history is being repaired, cannot be read: {error}. "
            "HINT: restore the history from a copy."
        ) from error
    return plan


def _plan(whole: Parts, progress: Progress | None) -> dict[str, Any]:
    """Read everything, and decide what has to go.

    Raises:
        HistoryCorruptedError: If no round would be left.
        HistoryError: If a backup is in the way.
    """
    damage: list[Damage] = []
    counts: list[int] = []
    vectors: dict[tuple[int | None, str], list[Damage]] = {}
    lists = []
    for number, (part, of_part) in enumerate(_in_turn(whole, progress)):
        for left, found in check(part.recording, part.environment):
            named = [damage_of_shard(d, number) for d in found] if whole.sharded else found
            damage += named
            for one, of_shard in zip(found, named, strict=True):
                if one.part in _VECTORS:
                    vectors.setdefault((one.round, one.part), []).append(of_shard)
            of_part(left)
        with part.snapshot() as snapshot:
            counts.append(len(snapshot.round_numbers()))
        lists.append(_lists(part))
    if whole.sharded and not damage:
        damage = _disagreement(whole, min(counts))
    plan: dict[str, Any] = {
        "store_id": uuid.uuid4().hex,
        "damage": [dataclasses.asdict(d) for d in damage],
        "rounds_before": min(counts),
        "rounds": min(counts),
        "dropped": [],
        "mended": [],
        "repairs": max((repairs for repairs, _ in lists), key=len),
        "forgotten": max((forgotten for _, forgotten in lists), key=len),
    }
    if not damage:
        return plan
    for part in whole.parts:
        backup = part.directory / BACKUP
        # A backup that is the file itself was left by a repair that was killed just before its end.
        if backup.exists() and not backup.samefile(part.directory / DATA):
            raise HistoryError(
                f"History `{part.directory}` was repaired before, and what was damaged then is "
                f"still in `{backup}`. HINT: move that away, or remove it."
            )
    # What every shard has is taken from one in which it is whole.
    groups = (group for group in vectors.values() if len(group) < len(whole.parts))
    mended = [one for group in groups for one in group]
    fatal = [one for one in damage if one not in mended]
    rounds = min(_rounds_left(fatal, counts[0]), *counts)
    if rounds < 1:
        raise HistoryCorruptedError(
            f"History `{whole.directory}` cannot be repaired, as no round would be left: "
            f"{(fatal or damage)[0]}. HINT: restore it from a copy."
        )
    lost = {(d.round, d.client_id) for d in damage if d.client_id is not None}
    ids = whole.parts[0].recording.client_ids
    dropped = [[t, c] for t in range(rounds) for c in ids if (t, c) in lost]
    note = {"rounds_before": min(counts), "rounds": rounds, "dropped": dropped}
    changes = {
        "rounds": rounds,
        "dropped": dropped,
        "mended": [dataclasses.asdict(d) for d in mended if d.round in range(rounds)],
        "repairs": [*plan["repairs"], note],
    }
    return {**plan, **changes}


def _disagreement(whole: Parts, rounds: int) -> list[Damage]:
    """Return in what shards do not agree, each of which is as it was written."""
    recording = StoredManifest(str(whole.directory), of_whole(whole.parts[0].recording.manifest))
    sharding = Sharding(client_ids=recording.client_ids, num_shards=len(whole.parts))
    damage = []
    for t in range(rounds):
        with ExitStack() as stack:
            shards = {v: stack.enter_context(part.snapshot()) for v, part in enumerate(whole.parts)}
            damage += ShardSnapshots(recording, sharding, shards, rounds).damage(t)
    return damage


@dataclass(frozen=True, eq=False)
class _Mending(Snapshot):
    """Reads rounds of a shard; vectors of the model that are damaged are read from others.

    Args:
        others: The other shards, each of which has these vectors, too.
    """

    others: tuple[Snapshot, ...]

    def payload(
        self, t: int, database: str, index: int, checksum: str
    ) -> tuple[memoryview, int, int]:
        try:
            return super().payload(t, database, index, checksum)
        except DamagedRecordError:
            for other in self.others if index in MODELS else ():
                with suppress(HistoryCorruptedError):
                    return other.payload(t, database, index, other.entry(t)[0][MODELS[index]])
            raise


def _write_anew(
    part: Part, parts: Sequence[Part], plan: Mapping[str, Any], new: Path, progress: Progress
) -> None:
    """Write one of the files without what is to go to another directory, and read it back."""
    recording = part.recording
    lost = {(t, client_id) for t, client_id in plan["dropped"]}
    manifest = dataclasses.replace(recording.manifest, store_id=plan["store_id"])
    copied = StoredManifest(recording.history, manifest, recording.keys)
    lists = {REPAIRS: {"repairs": plan["repairs"]}}
    if plan["forgotten"]:
        lists[FORGOTTEN] = {"forgotten": plan["forgotten"]}
    ids = recording.client_ids

    @contextmanager
    def mending() -> Iterator[Snapshot]:
        with ExitStack() as stack:
            own = stack.enter_context(part.snapshot())
            others = [stack.enter_context(one.snapshot()) for one in parts if one is not part]
            yield _Mending(own.recording, own.environment, own.txn, tuple(others))

    copy_rounds(
        mending,
        copied,
        new,
        plan["rounds"],
        lambda t, index: DROPPED if (t, ids[index]) in lost else None,
        lists=lists,
    )
    require_whole(new, copied, progress)


def _replace(directory: Path, new: Path) -> None:
    """Put a new file in the place of the old one, and keep that as a backup."""
    backup = directory / BACKUP
    try:
        backup.unlink(missing_ok=True)
        backup.hardlink_to(directory / DATA)
    except OSError as error:
        raise HistoryError(f"`{backup}` cannot be made: {error}.") from error
    put_in_place(new, directory)


def _rounds_left(damage: list[Damage], stored: int) -> int:
    """Return how many rounds a recovery can still rely on."""
    ends = (
        d.round - (d.reason == BROKEN_CHAIN)
        for d in damage
        if d.round is not None and d.client_id is None
    )
    return min(ends, default=stored)


def _lists(part: Part) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the lists of repairs and of forgotten clients, empty if they are damaged."""
    lists = []
    with part.snapshot() as snapshot:
        for read in (snapshot.repairs, snapshot.forgotten):
            try:
                lists.append(read())
            except DamagedRecordError:
                lists.append([])
    return lists[0], lists[1]
