"""One process at a time writes to a history."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import ClassVar

from fedrec.exceptions import HistoryError, HistoryLockedError

__all__ = ["WriterLock"]


class WriterLock:
    """The right to write to a directory. It ends with the process, however that dies.

    A process that was killed while it had the right may have left a folder `new`: that is removed.

    Args:
        directory: The directory; it is made if it is missing.

    Raises:
        HistoryLockedError: If another process, or another holder in this process, has it.
        HistoryError: If nothing can be written there at all.
    """

    # POSIX locks belong to the process: which locks it holds is kept here.
    _held: ClassVar[dict[tuple[int, int], int]] = {}

    def __init__(self, directory: Path) -> None:
        self.pid = os.getpid()
        path = directory / "writer.lock"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if path.exists() and self._held.get(_identity(path.stat())) == self.pid:
                raise _locked(directory, str(self.pid))
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise HistoryError(f"History `{directory}` cannot be written: {error}.") from error
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, str(self.pid).encode(), 0)
        except OSError as error:
            holder = os.pread(self._file, 32, 0).decode(errors="replace")
            os.close(self._file)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _locked(directory, holder) from error
            raise HistoryError(f"History `{directory}` cannot be locked: {error}.") from error
        self._identity = _identity(os.fstat(self._file))
        self._held[self._identity] = self.pid
        shutil.rmtree(directory / "new", ignore_errors=True)

    def release(self) -> None:
        """Let others write."""
        os.close(self._file)
        if self.pid == os.getpid():
            del self._held[self._identity]


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _locked(directory: Path, holder: str) -> HistoryLockedError:
    where = "this process" if holder == str(os.getpid()) else "another process"
    return HistoryLockedError(
        f"History `{directory}` is being written by {where} ({holder or 'unknown id'}). HINT: wait "
        "until it is done, or close the store that writes; reading is possible meanwhile."
    )
