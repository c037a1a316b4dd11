"""Facts about a history: sizes, clients, settings, without reading its updates."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedrec.history.lmdb.space import expected_bytes
from fedrec.history.tools.opening import open_history

__all__ = ["HistoryInfo", "info"]


@dataclass(frozen=True, kw_only=True)
class HistoryInfo:
    """What a history holds.

    Args:
        path: Directory of the history.
        num_shards: Files that it lies in: its shards, or 1.
        num_rounds: Rounds that are stored.
        max_rounds: Rounds the recording is meant to have.
        num_clients: Clients of the recording.
        clients: Their ids, in the order of the recording.
        num_updates: Client updates that are stored.
        num_parameters: $d$.
        num_bytes: Size of the files.
        free_bytes: Bytes in them that nothing uses; `compact` gives them back.
        bytes_per_parameter: Bytes that the stored updates take for each of their entries, headers
            and the ends of pages included; `None` before the first one.
        expected_bytes: Size to expect when `max_rounds` are stored, taking those that are as
            typical; before the first one, as `forecast` says.
        codec: Codec of the updates.
        keep: Which updates are stored, as arguments of `Retention`; empty if all are.
        max_error: The most by which any entry of any update is off; 0 where the codec is exact.
        model_fingerprint: `ParameterVector.fingerprint` of the model.
        versions: Versions of fedrec, torch and others that recorded, by name.
        repairs: What each repair has dropped, in the order they were made.
        encryption: Cipher of an encrypted history, or `None`.
        forgotten: Who was forgotten when, in that order.
    """

    path: str
    num_shards: int
    num_rounds: int
    max_rounds: int
    num_clients: int
    clients: tuple[str, ...]
    num_updates: int
    num_parameters: int
    num_bytes: int
    free_bytes: int
    bytes_per_parameter: float | None
    expected_bytes: int
    codec: str
    keep: Mapping[str, Any]
    max_error: float
    model_fingerprint: str
    versions: Mapping[str, str]
    repairs: tuple[Mapping[str, Any], ...]
    encryption: str | None
    forgotten: tuple[Mapping[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain values."""
        return asdict(self)


def info(path: str | os.PathLike[str], *, master_key: str | None = None) -> HistoryInfo:
    """Tell what a history holds. Updates are not read, so that it is quick at any size.

    Args:
        path: The history, or the run folder it lies in.
        master_key: Where the master key of an encrypted history comes from.

    Raises:
        HistoryFormatError: If there is none.
        HistoryKeyError: If it is encrypted and the master key is missing or another.
        HistoryCorruptedError: If the manifest or a round record is damaged, or the file truncated.

    Examples:
        >>> import tempfile
        >>> from fedrec.history import LMDBHistory, Manifest
        >>> manifest = Manifest(
        ...     model_fingerprint="f", num_parameters=2, clients={"a": 10, "b": 20}, seed=0,
        ...     aggregator={}, server_lr=0.1, max_rounds=5,
        ... )
        >>> with tempfile.TemporaryDirectory() as path:
        ...     with LMDBHistory(path, codec="int8") as history:
        ...         history.begin(manifest)
        ...     facts = info(path)
        >>> facts.num_rounds, facts.max_rounds, facts.num_clients, facts.codec
        (0, 5, 2, 'int8')
    """
    with open_history(path, master_key=master_key) as history, history.snapshot() as snapshot:
        manifest, parts = snapshot.recording.manifest, snapshot.parts
        num_rounds = len(snapshot.rounds())
        repairs, forgotten = snapshot.repairs(), snapshot.forgotten()
        errors = (p.entry(t)[0]["max_error"] for p in parts for t in range(num_rounds))
        max_error = max((e for row in errors for e in row or () if e is not None), default=0.0)
        num_updates = updates = used = size = expected = 0
        for part in parts:
            environment = part.environment
            num_updates += environment.count(part.txn, "updates")
            updates += environment.stored_bytes(part.txn, "updates")
            used += environment.compact_bytes(part.txn)
            size += environment.num_bytes()
            expected += expected_bytes(environment, part.recording.manifest, num_rounds)
    entries = num_updates * manifest.num_parameters
    return HistoryInfo(
        path=str(history.path),
        num_shards=len(parts),
        num_rounds=num_rounds,
        max_rounds=manifest.max_rounds,
        num_clients=len(manifest.clients),
        clients=tuple(manifest.clients),
        num_updates=num_updates,
        num_parameters=manifest.num_parameters,
        num_bytes=size,
        free_bytes=max(0, size - used),
        bytes_per_parameter=updates / entries if entries else None,
        expected_bytes=expected,
        codec=manifest.codec,
        keep=dict(manifest.keep),
        max_error=max_error,
        model_fingerprint=manifest.model_fingerprint,
        versions=dict(manifest.versions),
        repairs=tuple(repairs),
        encryption=manifest.encryption,
        forgotten=tuple(forgotten),
    )
