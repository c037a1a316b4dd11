"""Opening the recording that an environment holds."""

from __future__ import annotations

from fedrec.exceptions import HistoryFormatError
from fedrec.history.lmdb.audit import noted
from fedrec.history.lmdb.damage import DamagedRecordError
from fedrec.history.lmdb.encryption import Keys, master_key
from fedrec.history.lmdb.environment import Environment
from fedrec.history.lmdb.reading import Snapshot
from fedrec.history.lmdb.records import MANIFEST, StoredManifest, key

__all__ = ["load"]


def load(history: str, environment: Environment, source: str | None = None) -> StoredManifest:
    """Read what a history was begun with, and its keys if it is encrypted.

    Args:
        history: How errors name the history.
        environment: Where it is.
        source: Where its master key comes from, as in `fedrec.history.lmdb.encryption.master_key`.

    Raises:
        HistoryFormatError: If it is not a history, or of a newer format version.
        HistoryCorruptedError: If it is not what was written.
        HistoryKeyError: If the master key is not that of the history.
    """
    with environment.read() as txn:
        found = environment.cursor(txn, "meta").get(key(0, MANIFEST), b"")
        recording = StoredManifest.load(history, bytes(found))
    if recording.manifest.encryption is not None:
        master = master_key(source, environment.directory)
        if master is not None:
            recording.keys = Keys.load(history, environment.directory, master)
    elif source is not None:
        raise HistoryFormatError(
            f"History `{history}` is not encrypted, but was opened with a master key. HINT: leave "
            "that out, or record to another path."
        )
    _load_forgotten(recording, environment)
    return recording


def _load_forgotten(recording: StoredManifest, environment: Environment) -> None:
    if not recording.is_locked:
        with environment.read() as txn:
            try:
                entries = Snapshot(recording, environment, txn).forgotten()
            except DamagedRecordError:  # `check` says so
                entries = []
        recording.forgotten = {entry["client_id"]: entry["when"] for entry in entries}
    note = noted(environment.directory, recording.manifest.store_id)
    if note is not None:
        recording.pending = tuple(note["clients"])
        recording.forgotten |= dict.fromkeys(recording.pending, note["when"])
