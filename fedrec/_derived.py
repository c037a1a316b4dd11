"""A register of files that hold data of single clients, so that forgetting a client finds them."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedrec._files import temporary_of, write_atomically, writing

__all__ = ["forget_derived", "register_derived"]

_REGISTER = "derived.jsonl"


def register_derived(
    path: Path, *, without: Collection[str] = (), keys: Sequence[str] = ()
) -> None:
    """Register a file that will hold data of single clients, such as norms of their updates.

    Call it before the file is written: `fedrec.history.forget` removes the registered files of a
    run folder. The entry is a line of `derived.jsonl` beside the file. If a file has several
    entries, the last one counts.

    Args:
        path: The file.
        without: Clients of whom the file holds no data: forgetting only these keeps the file.
        keys: For a JSON file: keys that lead to an object with one entry per client id, the only
            data of single clients in it. Forgetting a client takes its entry out of the file.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     register_derived(Path(folder) / "norms.csv")
        ...     (Path(folder) / "derived.jsonl").read_text().strip()
        '{"file": "norms.csv", "without": [], "keys": []}'
    """
    entry = {"file": path.name, "without": sorted(without), "keys": list(keys)}
    register = path.parent / _REGISTER
    if _entries(register).get(path.name) == entry:
        return
    # The line feed comes first: a power cut may have left the line before half written.
    line = f"\n{json.dumps(entry)}".encode()
    with writing(register):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(register, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def forget_derived(folder: Path, client_ids: Collection[str]) -> Iterator[Path]:
    """Remove clients' data from the registered files in a folder and in the folders below it.

    Args:
        folder: A run folder.
        client_ids: Ids of the clients to forget.

    Yields:
        The files that were removed.
    """
    for register in sorted(folder.rglob(_REGISTER)):
        for name, entry in _entries(register).items():
            path = register.with_name(name)
            removed = [temporary_of(path)]  # a process that was killed may have left it
            if not set(client_ids) <= set(entry["without"]) and (
                not entry["keys"] or not _take_out(path, entry["keys"], client_ids)
            ):
                removed.append(path)
            for file in removed:
                if file.exists():
                    file.unlink()
                    yield file


def _entries(register: Path) -> dict[str, dict[str, Any]]:
    """Return the last entry of each file in a register, by file name."""
    entries = {}
    lines = register.read_bytes().splitlines() if register.exists() else []
    for line in lines:
        try:
            entry = json.loads(line)
            entries[Path(entry["file"]).name] = entry
        except (ValueError, TypeError, KeyError):
            continue  # a line half written: its file is written only after the whole line
    return entries


def _take_out(path: Path, keys: Sequence[str], client_ids: Collection[str]) -> bool:
    """Take clients out of an object in a JSON file; return whether the file could be read so."""
    try:
        content = inner = json.loads(path.read_bytes())
        for key in keys:
            inner = inner[key]
        left = {k: value for k, value in inner.items() if k not in client_ids}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    if len(left) < len(inner):
        inner.clear()
        inner.update(left)
        write_atomically(path, json.dumps(content, indent=2).encode() + b"\n", private=True)
    return True
