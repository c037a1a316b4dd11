"""Making a history of an export, every part of which is checked before it is used."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from fedrec.exceptions import (
    ConfigurationError,
    FedrecError,
    HistoryCorruptedError,
    HistoryFormatError,
)
from fedrec.history.lmdb.encryption import CIPHER, KEYS, Keys
from fedrec.history.lmdb.encryption import master_key as read_master_key
from fedrec.history.lmdb.environment import DATA, Environment, beside, put_in_place
from fedrec.history.lmdb.forgotten import broken_chain
from fedrec.history.lmdb.history import LMDBHistory
from fedrec.history.lmdb.lock import WriterLock
from fedrec.history.lmdb.records import FORGOTTEN, MANIFEST, REPAIRS, StoredManifest, canonical, key
from fedrec.history.lmdb.shards import shard_folders
from fedrec.history.lmdb.space import require_room_for_all
from fedrec.history.manifest import Manifest
from fedrec.history.rounds import RoundArrays, largest_magnitudes
from fedrec.history.tools.copying import require_whole
from fedrec.history.tools.export import FORMAT, MANIFEST_FILE, checksum_of, round_file
from fedrec.history.tools.npz import UNREADABLE, open_plain, read_arrays, refuse

__all__ = ["Import", "import_history"]

_LARGEST_MANIFEST = 2**26


@dataclass(frozen=True, kw_only=True)
class Import:
    """What an import made.

    Args:
        path: The new history.
        rounds: Rounds in it.
        num_bytes: Size of its file.
    """

    path: str
    rounds: int
    num_bytes: int


def import_history(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    codec: str | None = None,
    master_key: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Import:
    """Make a history of what `export_history` wrote.

    Sizes, checksums, names, types, shapes, order and numbers are checked before they are used, the
    new history is read back, and it appears as a whole or not at all. What the files say is not
    run, and no memory is taken for what is not there. Clients that were forgotten stay so.

    Args:
        folder: What `export_history` wrote.
        path: Directory of the new history.
        codec: How to store updates; it must give back just these numbers. By default as they
            were stored.
        master_key: Where the master key of the new history comes from, as in `LMDBHistory`; by
            default it is not encrypted.
        progress: Called after each round, with the number of rounds left; the files are read, and
            then the new history.

    Raises:
        HistoryFormatError: If the folder is no export, `path` already holds a history, or the codec
            would change the updates.
        HistoryCorruptedError: If the export is not what was written, or not what one can be.
        HistoryFullError: If the disk has no room.

    Examples:
        >>> import tempfile
        >>> from fedrec.history import LMDBHistory, Manifest, export_history
        >>> manifest = Manifest(
        ...     model_fingerprint="f", num_parameters=2, clients={"a": 10, "b": 20}, seed=0,
        ...     aggregator={}, server_lr=0.1, max_rounds=5,
        ... )
        >>> with tempfile.TemporaryDirectory() as path:
        ...     with LMDBHistory(f"{path}/history") as history:
        ...         history.begin(manifest)
        ...     _ = export_history(f"{path}/history", f"{path}/plain")
        ...     import_history(f"{path}/plain", f"{path}/again").rounds
        0
    """
    source, directory = Path(folder), Path(path).absolute()
    content = _read_manifest(source / MANIFEST_FILE)
    files, manifest = content["rounds"], content["manifest"]
    if codec is not None:
        manifest = replace(manifest, codec=codec)
    keys = None
    master = None if master_key is None else read_master_key(master_key, directory)
    if master is not None:
        manifest = replace(manifest, encryption=CIPHER)
        keys = Keys.create(str(path), manifest.clients, master)
    recording = StoredManifest(str(path), manifest, keys)
    recording.forgotten = {f["client_id"]: f["when"] for f in content["forgotten"]}
    if (directory / DATA).exists() or shard_folders(directory):
        raise HistoryFormatError(f"`{directory}` already holds a history. HINT: use another path.")
    require_room_for_all(directory, replace(manifest, max_rounds=max(1, len(files))), None)
    is_new = not directory.exists()
    lock = WriterLock(directory)
    try:
        with beside(directory) as new:
            records = {key(0, MANIFEST): recording.record}
            for index, name in ((REPAIRS, "repairs"), (FORGOTTEN, "forgotten")):
                if content[name]:
                    listed = canonical({name: content[name]})
                    records[key(0, index)] = recording.pack(0, index, listed)[0]
            if keys is not None:
                keys.write(new)
            Environment.create(new, records, None)
            history = LMDBHistory(new, master_key=master_key)
            try:
                for t, file in enumerate(files):
                    history.append(_read_round(source / file["file"], file, t, recording, files))
                    if progress is not None:
                        progress(2 * len(files) - 1 - t)
            finally:
                history.close()
            require_whole(new, recording, progress)
            if keys is not None:
                keys.write(directory)
            put_in_place(new, directory)
    except BaseException:
        if keys is not None and not (directory / DATA).exists():
            (directory / KEYS).unlink(missing_ok=True)
        if is_new:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        lock.release()
    size = (directory / DATA).stat().st_size
    return Import(path=str(directory), rounds=len(files), num_bytes=size)


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read the `manifest.json` of an export; its `manifest` becomes a `Manifest`."""

    def no_number(text: str) -> NoReturn:
        raise ValueError(f"{text} is not a number")

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            raise ValueError("a name is there twice")
        return mapping

    if not path.exists():
        raise HistoryFormatError(f"`{path.parent}` is no export: it has no `{MANIFEST_FILE}`.")
    with open_plain(path, _LARGEST_MANIFEST) as file:
        data = file.read(_LARGEST_MANIFEST + 1)
    try:
        raw = json.loads(data, parse_constant=no_number, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        refuse(path, f"it is not JSON ({error})", error)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise HistoryFormatError(f"`{path}` does not say that it is a {FORMAT!r}.")
    names = {"format", "manifest", "repairs", "forgotten", "rounds", "sha256"}
    if raw.keys() != names:
        refuse(path, f"it has missing or unknown entries: {sorted(raw.keys() ^ names)}")
    try:
        checksum = checksum_of({k: v for k, v in raw.items() if k != "sha256"})
        manifest = Manifest.from_json(json.dumps(raw["manifest"]))
        StoredManifest("the export", manifest)  # codec and policy are known
    except (HistoryFormatError, ConfigurationError):
        raise
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
        refuse(path, f"its manifest is none ({error})", error)
    if raw["sha256"] != checksum:
        refuse(path, "its checksum is wrong")
    if manifest.encryption is not None:
        refuse(path, "it says that it is encrypted")
    _check_lists(path, raw, manifest)
    return {**raw, "manifest": manifest}


def _check_lists(path: Path, raw: Mapping[str, Any], manifest: Manifest) -> None:
    for name in ("repairs", "forgotten", "rounds"):
        if not isinstance(raw[name], list) or not all(isinstance(x, dict) for x in raw[name]):
            refuse(path, f"`{name}` is not a list of mappings")
    for t, file in enumerate(raw["rounds"]):
        if file.keys() != {"file", "num_bytes", "sha256"} or file["file"] != round_file(t):
            refuse(path, f"entry {t} of `rounds` is not that of `{round_file(t)}`")
    for forgetting in raw["forgotten"]:
        texts = [forgetting.get(name) for name in ("client_id", "when", "previous")]
        if (
            forgetting.keys() != {"client_id", "when", "updates", "aggregates", "previous"}
            or not all(isinstance(text, str) for text in texts)
            or forgetting["client_id"] not in manifest.clients
        ):
            refuse(path, "`forgotten` does not say which client was forgotten when")
    for repair in raw["repairs"]:
        if (
            repair.keys() != {"rounds_before", "rounds", "dropped"}
            or not isinstance(repair["dropped"], list)
            or not all(
                isinstance(update, list) and len(update) == 2 for update in repair["dropped"]
            )
        ):
            refuse(path, "`repairs` does not say what was dropped")
    broken = broken_chain(raw["forgotten"])
    if broken:
        refuse(path, broken[0].reason)


def _read_round(
    path: Path,
    listed: Mapping[str, Any],
    t: int,
    recording: StoredManifest,
    files: list[dict[str, Any]],
) -> RoundArrays:
    """Read the file of a round, which is as it is listed or refused."""
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size != listed["num_bytes"]:
            refuse(path, f"it does not have {listed['num_bytes']} bytes")
        if hashlib.file_digest(file, "sha256").hexdigest() != listed["sha256"]:
            refuse(path, "its checksum is wrong")
        file.seek(0)
        try:
            with zipfile.ZipFile(file) as archive:
                arrays = read_arrays(path, archive, listed["num_bytes"], recording.manifest)
        except FedrecError:
            raise
        except UNREADABLE as error:
            refuse(path, f"it is not an .npz file of ours ({error})", error)
    try:
        return _round(path, arrays, t, recording, len(files))
    except HistoryCorruptedError:
        raise
    except FedrecError as error:
        refuse(path, str(error), error)


def _round(
    path: Path, arrays: Mapping[str, Any], t: int, recording: StoredManifest, num_rounds: int
) -> RoundArrays:
    """Return a round of these arrays, if the history can have had it."""
    present, kept, updates = arrays["present"], arrays["client_ids"], arrays["updates"]
    cohort, refused, reasons = arrays["cohort"], arrays["refused"], arrays["reasons"]
    bounds = arrays["bounds"]
    retention = recording.retention
    allowed = set(recording.sampled)
    if not retention.stores(t) or retention.expired(t, num_rounds):
        allowed = set()
    if len({len(kept), len(updates), len(bounds)}) > 1 or len(arrays["num_samples"]) != len(
        present
    ):
        refuse(path, "its arrays are not of the same clients")
    if kept != [c for c in present if c in set(kept)] or not set(kept) <= allowed:
        refuse(path, "it has updates that the history would not have kept")
    if len(reasons) != len(refused) or len(set(refused)) != len(refused):
        refuse(path, "its reasons are not those of the clients refused")
    if set(present) & set(refused) or set(cohort) != {*present, *refused}:
        refuse(path, "its cohort is not who is present and who was refused")
    if (arrays["num_samples"] < 0).any():
        refuse(path, "it has a negative number of samples")
    result = RoundArrays(
        round=t,
        global_weights=arrays["global_weights"].astype(np.float32),
        client_ids=tuple(present),
        updates=updates.astype(np.float32, copy=False),
        num_samples=arrays["num_samples"].astype(np.int64),
        aggregate=arrays["aggregate"].astype(np.float32),
        cohort=tuple(cohort),
        refused=dict(zip(refused, reasons, strict=True)),
        buffers=arrays["buffers"].astype(recording.manifest.buffer_dtype)
        if "buffers" in arrays
        else None,
        departure=(
            _departure(path, arrays["departure"], recording) if "departure" in arrays else None
        ),
        dropped=frozenset(present) - frozenset(kept),
    )
    result.check(recording.manifest, t)
    recording.require_known(present)
    if kept:
        largest = largest_magnitudes(updates)
        if not (np.isfinite(bounds).all() and (largest <= bounds).all()):
            refuse(path, "an update exceeds the bound that is said to hold for it")
    _require_exact(recording, updates)
    return result


def _departure(path: Path, texts: list[str], recording: StoredManifest) -> dict[str, Any]:
    """Read why the executor had left its plan; its values are checked when the round is read."""
    try:
        departure = json.loads(texts[0])
        result = {name: departure[name] for name in ("round", "reason", "client", "difference")}
        recording.require_known([c for c in (result["client"],) if c is not None])
        return result
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        refuse(path, f"what it says of the execution cannot be read ({error})", error)


def _require_exact(recording: StoredManifest, updates: NDArray[np.float32]) -> None:
    """Check that the history's codec gives back just these numbers."""
    codec = recording.codec
    if codec.lossless:
        return
    out = np.empty(updates.shape[1], np.float32)
    for update in updates:
        codec.decode(memoryview(codec.encode(update.astype(np.float32)).payload), out)
        if out.tobytes() != update.tobytes():
            raise HistoryFormatError(
                f"Stored as `{codec.name}` again, the updates would change once more. HINT: import "
                "them with the codec `float32`, or another exact one."
            )
