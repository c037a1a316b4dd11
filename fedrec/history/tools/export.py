"""Writing a history as plain NumPy files, which hold arrays and nothing that could be run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrec._files import sync
from fedrec.exceptions import HistoryError, HistoryFullError
from fedrec.history.lmdb.damage import Damage, DamagedRecordError
from fedrec.history.lmdb.records import NAMES, ROUND, StoredManifest, canonical
from fedrec.history.lmdb.shards import AnySnapshot
from fedrec.history.manifest import FLOAT_BYTES
from fedrec.history.tools.check import BROKEN_CHAIN
from fedrec.history.tools.npz import UNREADABLE
from fedrec.history.tools.opening import open_history

__all__ = ["FORMAT", "MANIFEST_FILE", "Export", "export_history", "exported", "round_file"]

FORMAT = "fedrec history export 1"
MANIFEST_FILE = "manifest.json"

_DATE = (1980, 1, 1, 0, 0, 0)  # the same rounds give the same bytes


@dataclass(frozen=True, kw_only=True)
class Export:
    """What an export wrote.

    Args:
        folder: Where it lies.
        rounds: Rounds that were written.
        num_bytes: Size of their files.
    """

    folder: str
    rounds: int
    num_bytes: int


def export_history(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    master_key: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Export:
    """Write every round of a history to an `.npz` file of its own, and a `manifest.json`.

    Everything is checked while it is read. Updates are written as they come back from the history,
    as float32, and not encrypted. The folder appears when all of it is complete and durable.

    A file has the arrays `global_weights` (d,), `aggregate` (d,), `updates` (k, d) of the clients
    `client_ids` (k,), the clients `present` (m,) whose updates were aggregated with their
    `num_samples` (m,), the `cohort` that was asked, who of it was `refused` for which of the
    `reasons`, `bounds` (k,) that no magnitude in an update exceeds, `max_error` (k,) of an
    inexact codec, and `buffers` of a model that has some. Where the history keeps some updates
    only, k is less than m.

    Args:
        path: The history, or the run folder it lies in. It may be recorded to meanwhile.
        folder: Folder to make; an empty one is taken, too.
        master_key: Where the master key of an encrypted history comes from, as in `LMDBHistory`.
        progress: Called after each round, with the number of rounds left.

    Raises:
        HistoryFormatError: If there is no history.
        HistoryCorruptedError: If it is damaged.
        HistoryFullError: If the disk has no room.
        HistoryError: If the folder is not empty or cannot be written.

    Examples:
        >>> import tempfile
        >>> from fedrec.history import LMDBHistory, Manifest
        >>> manifest = Manifest(
        ...     model_fingerprint="f", num_parameters=2, clients={"a": 10, "b": 20}, seed=0,
        ...     aggregator={}, server_lr=0.1, max_rounds=5,
        ... )
        >>> with tempfile.TemporaryDirectory() as path:
        ...     with LMDBHistory(f"{path}/history") as history:
        ...         history.begin(manifest)
        ...     done = export_history(f"{path}/history", f"{path}/plain")
        ...     done.rounds, os.listdir(done.folder)
        (0, ['manifest.json'])
    """
    target = Path(folder).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise HistoryError(f"`{target}` exists and is not empty. HINT: export to another folder.")
    new = target.with_name(f".{target.name}.new")
    try:
        with open_history(path, master_key=master_key) as source, source.snapshot() as snapshot:
            recording = snapshot.recording
            if recording.pending:
                raise HistoryError(f"History `{source.path}`: {recording.unfinished()}.")
            shutil.rmtree(new, ignore_errors=True)  # of a process that was killed here
            new.mkdir(mode=0o700, parents=True)
            done = _write(snapshot, new, progress)
        new.replace(target)
        with suppress(OSError):  # not every file system can
            sync(target.parent)
    except OSError as error:
        raise HistoryError(f"`{target}` cannot be written: {error}.") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return replace(done, folder=str(target))


def round_file(t: int) -> str:
    """Return the name of a round's file."""
    return f"round-{t:06d}.npz"


def exported(folder: Path, client_ids: Collection[str]) -> Iterator[Path]:
    """Yield the files of exports below a folder that have to do with clients, or are broken."""
    for path in sorted(folder.rglob("round-*.npz")):
        try:
            with np.load(path, allow_pickle=False) as arrays:
                concerned = not set(client_ids).isdisjoint(arrays["present"].tolist())
        except UNREADABLE:
            concerned = True  # of an export that was killed
        if concerned:
            yield path


def _write(snapshot: AnySnapshot, new: Path, progress: Callable[[int], None] | None) -> Export:
    recording = snapshot.recording
    _require_room(snapshot, new)
    files: list[dict[str, Any]] = []
    previous = snapshot.start
    rounds = snapshot.rounds()
    for t in rounds:
        entry, following = snapshot.entry(t)
        if entry["previous"] != previous:
            broken = Damage(part=NAMES[ROUND], reason=BROKEN_CHAIN, round=t)
            raise DamagedRecordError(recording.history, broken)
        previous = following
        path = new / round_file(t)
        _write_arrays(path, _arrays(snapshot, entry))
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            checksum = hashlib.file_digest(stream, "sha256").hexdigest()
        size = path.stat().st_size
        files.append({"file": path.name, "num_bytes": size, "sha256": checksum})
        if progress is not None:
            progress(len(rounds) - 1 - t)
    content = {
        "format": FORMAT,
        # The files are not encrypted.
        "manifest": json.loads(replace(recording.manifest, encryption=None).to_json()),
        "repairs": snapshot.repairs(),
        "forgotten": snapshot.forgotten(),
        "rounds": files,
    }
    text = json.dumps({**content, "sha256": checksum_of(content)}, indent=1)
    manifest = new / MANIFEST_FILE
    descriptor = os.open(manifest, os.O_WRONLY | os.O_CREAT, 0o600)
    with open(descriptor, "w", encoding="utf-8") as stream:  # noqa: PTH123 - of a descriptor
        stream.write(text + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    with suppress(OSError):  # not every file system can
        sync(new)
    num_bytes = sum(file["num_bytes"] for file in files)
    return Export(folder=str(new), rounds=len(rounds), num_bytes=num_bytes)


def checksum_of(content: Mapping[str, Any]) -> str:
    """Return the checksum of what a `manifest.json` says, the order of clients included."""
    clients = list(content["manifest"]["clients"])
    return hashlib.sha256(canonical({**content, "clients": clients})).hexdigest()


def _require_room(snapshot: AnySnapshot, new: Path) -> None:
    size = FLOAT_BYTES * snapshot.recording.manifest.num_parameters
    vectors = sum(2 + len(snapshot.kept(snapshot.entry(t)[0])) for t in snapshot.rounds())
    free = shutil.disk_usage(new).free
    if free < vectors * size:
        raise HistoryFullError(
            f"The disk of `{new.parent}` has {free} bytes free, but the export takes "
            f"{vectors * size}: {vectors * size - free} bytes are missing. HINT: free some space, "
            "or export to another disk."
        )


def _arrays(snapshot: AnySnapshot, entry: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a round's file, by name."""
    recording, rows = snapshot.recording, snapshot.kept(entry)
    present = [recording.client_ids[index] for index in entry["present"]]
    read = snapshot.read(entry, [present[k] for k in rows])
    arrays: dict[str, NDArray[Any]] = {
        "global_weights": read.global_weights.astype("<f4", copy=False),
        "aggregate": read.aggregate.astype("<f4", copy=False),
        "updates": read.updates.astype("<f4", copy=False),
        "client_ids": _text(recording, read.client_ids),
        "present": _text(recording, present),
        "num_samples": np.array(entry["num_samples"], "<i8"),
        "cohort": _text(recording, read.cohort),
        "refused": _text(recording, tuple(read.refused)),
        "reasons": _text(recording, tuple(read.refused.values())),
        "bounds": np.array([entry["bounds"][k] for k in rows], "<f8"),
    }
    if not recording.codec.lossless:
        arrays["max_error"] = np.array([entry["max_error"][k] for k in rows], "<f8")
    if read.buffers is not None:
        arrays["buffers"] = read.buffers.astype(read.buffers.dtype.newbyteorder("<"), copy=False)
    if read.departure is not None:
        arrays["departure"] = _text(recording, (json.dumps(read.departure),))
    return arrays


def _text(recording: StoredManifest, texts: tuple[str, ...] | list[str]) -> NDArray[np.str_]:
    array = np.array(texts, dtype="<U" if texts else "<U1")
    if array.tolist() != list(texts):  # NumPy drops zeros at the end
        raise HistoryError(
            f"History `{recording.history}` names a client or reason with a zero character at its "
            "end, which an array of text cannot hold."
        )
    return array


def _write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write an `.npz` file whose bytes are a function of the arrays alone."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w+b") as file, zipfile.ZipFile(file, "w") as archive:  # noqa: PTH123
        for name, array in arrays.items():
            member = zipfile.ZipInfo(f"{name}.npy", _DATE)
            member.create_system = 3
            member.external_attr = 0o600 << 16
            with archive.open(member, "w", force_zip64=True) as out:
                np.lib.format.write_array(
                    out, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False
                )
