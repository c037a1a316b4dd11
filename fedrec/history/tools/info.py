"""Facts about a history: sizes, clients, settings, without reading its updates."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedrec.history.lmdb.environment import DATA, Environment
from fedrec.history.lmdb.reading import Snapshot, load
from fedrec.history.lmdb.space import expected_bytes

__all__ = ["HistoryInfo", "history_folder", "info"]


@dataclass(frozen=True, kw_only=True)
class HistoryInfo:
    """What a history holds.

    Args:
        path: Directory of the history.
        num_rounds: Rounds that are stored.
        max_rounds: Rounds the recording is meant to have.
        num_clients: Clients of the recording.
        clients: Their ids, in the order of the recording.
        num_updates: Client updates that are stored.
        num_parameters: $d$.
        num_bytes: Size of the file.
        free_bytes: Bytes in the file that nothing uses; `compact` gives them back.
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


def history_folder(path: str | os.PathLike[str]) -> Path:
    """Return the directory of a history, given that or a run folder it lies in."""
    path = Path(path)
    return path / "history" if (path / "history" / DATA).exists() else path


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
    folder = history_folder(path)
    environment = Environment.acquire(folder.absolute(), None)
    try:
        recording = load(str(folder), environment, master_key)
        manifest = recording.manifest
        with environment.read() as txn:
            snapshot = Snapshot(recording, environment, txn)
            num_rounds = len(snapshot.rounds())
            num_updates = environment.count(txn, "updates")
            updates = environment.stored_bytes(txn, "updates")
            repairs, forgotten = snapshot.repairs(), snapshot.forgotten()
            errors = (snapshot.entry(t)[0]["max_error"] for t in range(num_rounds))
            max_error = max((e for row in errors for e in row or () if e is not None), default=0.0)
            used = environment.compact_bytes(txn)
        expected = expected_bytes(environment, manifest, num_rounds)
    finally:
        environment.release()
    entries = num_updates * manifest.num_parameters
    size = (folder / DATA).stat().st_size
    return HistoryInfo(
        path=str(folder),
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
