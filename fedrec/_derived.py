"""Files that hold something of single clients, registered so that forgetting a client finds all."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedrec._files import temporary_of, write_atomically

__all__ = ["forget_derived", "register_derived"]

_REGISTER = "derived.jsonl"


def register_derived(
    path: Path, *, without: Collection[str] = (), keys: Sequence[str] = ()
) -> None:
    """Register a file that will hold something of single clients, such as their updates.

    Call it before the file is written: `fedrec.history.forget` removes what is registered in a run
    folder. The entry is a line of `derived.jsonl` beside the file; the last one of a file counts.

    Args:
        path: The file.
        without: Clients of whom it holds nothing: forgetting them alone keeps the file.
        keys: The file is JSON, and all that it holds of single clients is the object at this place,
            whose keys are client ids. Forgetting a client takes its entry out.

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
    path.parent.mkdir(parents=True, exist_ok=True)
    # A line of its own, also behind one that a power cut has left half written.
    line = f"\n{json.dumps(entry)}".encode()
    descriptor = os.open(register, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def forget_derived(folder: Path, client_ids: Collection[str]) -> Iterator[Path]:
    """Remove what the registered files in a folder, and in those below it, hold of clients.

    Args:
        folder: A run folder.
        client_ids: The clients.

    Yields:
        Files that were removed.
    """
    for register in sorted(folder.rglob(_REGISTER)):
        for name, entry in _entries(register).items():
            path = register.with_name(name)
            removed = [temporary_of(path)]  # never needed: left by a process that was killed
            if not set(client_ids) <= set(entry["without"]) and (
                not entry["keys"] or not _take_out(path, entry["keys"], client_ids)
            ):
                removed.append(path)
            for gone in removed:
                if gone.exists():
                    gone.unlink()
                    yield gone


def _entries(register: Path) -> dict[str, dict[str, Any]]:
    """Read a register: the last entry of each file."""
    found = {}
    lines = register.read_bytes().splitlines() if register.exists() else []
    for line in lines:
        try:
            entry = json.loads(line)
            found[Path(entry["file"]).name] = entry
        except (ValueError, TypeError, KeyError):
            continue  # half written, and so its file was not yet
    return found


def _take_out(path: Path, keys: Sequence[str], client_ids: Collection[str]) -> bool:
    """Take clients out of an object in a JSON file; return whether that is done."""
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
