"""Writing files atomically, and making the text of CSV files."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["csv_text", "sync", "write_atomically"]


def csv_text(lines: Iterable[Sequence[object]]) -> str:
    """Return rows as the text of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def temporary_of(path: Path) -> Path:
    """Return the path at which `write_atomically` writes a file before it renames it."""
    return path.with_name(path.name + ".tmp")


def write_atomically(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a file so that after a crash either the old or the new content is there, whole.

    Args:
        path: The file; its folder is made if it is missing.
        data: The new content.
        private: Whether only the file's owner may read it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_of(path)
    temporary.unlink(missing_ok=True)  # a process that was killed may have left it
    mode = 0o600 if private else 0o666
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as file:  # noqa: PTH123 - of a descriptor
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until the disk has the content of a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
