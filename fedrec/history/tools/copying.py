"""Writing a history anew, without some of its updates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from fedrec.history.lmdb.damage import DamagedRecordError
from fedrec.history.lmdb.environment import Environment
from fedrec.history.lmdb.history import LMDBHistory
from fedrec.history.lmdb.records import (
    AGGREGATE,
    FLOAT32,
    MANIFEST,
    ROUND,
    StoredManifest,
    canonical,
    digest,
    key,
)
from fedrec.history.lmdb.shards import MODELS, AnySnapshot
from fedrec.history.manifest import FLOAT_BYTES
from fedrec.history.tools.check import check

__all__ = ["Progress", "copy_rounds", "require_whole"]


#: Called with the number of rounds that are left.
Progress = Callable[[int], None]

#: Called with round and client index: why this client's part of it goes, or `None` if it stays.
Reason = Callable[[int, int], str | None]


def copy_rounds(
    snapshot: Callable[[], AbstractContextManager[AnySnapshot]],
    copied: StoredManifest,
    new: Path,
    rounds: int,
    reason: Reason,
    *,
    lists: Mapping[int, Mapping[str, Any]],
    blurred: Collection[int] = (),
    only: Collection[int] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the first rounds of a history to a new file.

    Args:
        snapshot: Begins to read the history.
        copied: The recording that the new file is to hold.
        new: Empty directory for it.
        rounds: How many rounds.
        reason: Which updates are left out. Their clients count as refused.
        lists: Lists of repairs and of forgotten clients for the new file, by index.
        blurred: Rounds whose aggregate is replaced by the difference of the global weights.
        only: Clients whose updates are copied, by index; those of others are not stored there.
        progress: Called after each round, with the number of rounds left.
    """
    records = {key(0, MANIFEST): copied.record}
    for index, content in lists.items():
        records[key(0, index)] = copied.pack(0, index, canonical(content))[0]
    Environment.create(new, records, None)
    target = Environment.acquire(new, None)
    try:
        previous = digest(copied.record)
        for t in range(rounds):
            with snapshot() as source:
                entry = _edited(source, t, reason, previous, only)
                entry["execution"] = copied.execution
                previous = _copy_round(source, entry, target, copied, t in blurred)
            if progress is not None:
                progress(rounds - 1 - t)
    finally:
        target.release()


def require_whole(new: Path, recording: StoredManifest, progress: Progress | None) -> None:
    """Read a new file back before it takes the place of another."""
    environment = Environment.acquire(new, None)
    try:
        for left, damage in check(recording, environment):
            if damage:
                raise DamagedRecordError(recording.history, damage[0])
            if progress is not None:
                progress(left)
    finally:
        environment.release()


def _edited(
    snapshot: AnySnapshot, t: int, reason: Reason, previous: str, only: Collection[int] | None
) -> dict[str, Any]:
    """Return the entry of round `t` as it is to be written."""
    entry = dict(snapshot.entry(t)[0])
    why = {index: reason(t, index) for index in entry["present"]}
    kept = set(snapshot.kept(entry))  # with fewer rounds, updates that have expired stay so
    if only is not None:
        kept = {row for row in kept if entry["present"][row] in only}
    for name in ("updates", "bounds", "max_error"):
        if entry[name] is not None:
            entry[name] = [v if row in kept else None for row, v in enumerate(entry[name])]
    rows = [row for row, index in enumerate(entry["present"]) if why[index] is None]
    entry["refused"] = [[i, reason(t, i) or earlier] for i, earlier in entry["refused"]]
    entry["refused"] += [[index, why[index]] for index in entry["present"] if why[index]]
    for name in ("present", "num_samples", "updates", "bounds", "max_error"):
        if entry[name] is not None:
            entry[name] = [entry[name][row] for row in rows]
    departure = entry["departure"]
    client = None if departure is None else departure["client"]
    if client is not None and reason(t, client):
        # The difference is a number from the update that the client sent.
        entry["departure"] = {**departure, "client": None, "difference": None}
    entry["previous"] = previous
    return entry


def _copy_round(
    snapshot: AnySnapshot,
    entry: dict[str, Any],
    target: Environment,
    copied: StoredManifest,
    blurred: bool,
) -> str:
    """Write the round of an edited entry; return the hash of its new record."""
    t = entry["round"]
    checksum_of = dict(zip(entry["present"], entry["updates"], strict=True))
    vectors = [("updates", i, c) for i, c in sorted(checksum_of.items()) if c is not None]
    vectors += [("models", i, entry[name]) for i, name in MODELS.items() if entry[name]]
    new_checksum_of: dict[int, str] = {}
    num_bytes = FLOAT_BYTES * copied.manifest.num_parameters
    at_once = max(1, LMDBHistory.transaction_bytes // num_bytes)
    for start in range(0, len(vectors), at_once):
        group = vectors[start : start + at_once]
        with target.write(len(group) * num_bytes) as txn:
            for database, index, checksum in group:
                payload, codec, size = snapshot.payload(t, database, index, checksum)
                if index == AGGREGATE and blurred:
                    payload = memoryview(_blurred(snapshot, entry, copied.manifest.server_lr))
                record, new_checksum_of[index] = copied.pack(
                    t, index, payload, codec=codec, dtype=FLOAT32, size=size
                )
                target.append(txn, database, key(t, index), record)
            if start + at_once >= len(vectors):
                entry["updates"] = [new_checksum_of.get(index) for index in entry["present"]]
                entry |= {name: new_checksum_of.get(index) for index, name in MODELS.items()}
                record, _ = copied.pack(t, ROUND, canonical(entry))
                target.append(txn, "rounds", key(t, ROUND), record)
    return digest(record)


def _blurred(snapshot: AnySnapshot, entry: dict[str, Any], server_lr: float) -> bytes:
    r"""Return $(w_t - w_{t+1}) / \eta$ in place of the aggregate, with no entry the same but 0."""
    arrays = snapshot.read(entry, ())
    weights, aggregate = arrays.global_weights, arrays.aggregate
    following = weights - np.float32(server_lr) * aggregate
    derived = (weights - following) / np.float32(server_lr)
    is_same = (derived == aggregate) & (derived != 0)
    derived = np.where(is_same, np.nextafter(derived, np.float32(0)), derived)
    return derived.astype(np.float32).tobytes()
