"""Writing files atomically, and making the text of CSV files."""

from __future__ import annotations

import csv
import errno
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fedrec.exceptions import FileWriteError

__all__ = ["csv_text", "sync", "temporary_of", "write_atomically", "writing"]

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say of an error of the operating system what could not be written, and what to do.

    Args:
        path: The file or folder that is written until exit.

    Raises:
        FileWriteError: In place of any `OSError`.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, FileWriteError):
            raise
        files = [parent for parent in (path, *path.parents) if parent.is_file()]
        if error.errno in _FULL:
            hint = "free space, and give the same command again: what is done is kept."
        elif files and error.errno in (errno.ENOTDIR, errno.EEXIST):
            hint = f"`{files[0]}` is a file, not a folder: choose another path."
        else:
            hint = "choose a path that can be written to."
        reason = error.strerror or str(error)
        failed = FileWriteError(f"`{path}` cannot be written: {reason}. HINT: {hint}")
        failed.errno = error.errno
        raise failed from error


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

    Raises:
        FileWriteError: If it cannot be written; the old content stays.
    """
    temporary = temporary_of(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # a process that was killed may have left it
        mode = 0o600 if private else 0o666
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with open(descriptor, "wb") as file:  # noqa: PTH123 - of a descriptor
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until the disk has the content of a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
