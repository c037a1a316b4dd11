"""Errors of a history's file: what they mean, and what to do about them."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import lmdb

from fedrec.exceptions import (
    HistoryError,
    HistoryFormatError,
    HistoryFullError,
    HistoryLockedError,
)

__all__ = ["foreign", "full_disk", "in_use", "write_error"]


def in_use(directory: Path, state: str) -> HistoryLockedError:
    """Return the error for a history that others have open."""
    return HistoryLockedError(
        f"History `{directory}` is {state} by another store or process. HINT: wait until it is "
        "done, or close what has it open."
    )


def write_error(directory: Path, error: lmdb.Error, num_bytes: int) -> HistoryError:
    """Return what an error of LMDB while writing means."""
    if isinstance(error, lmdb.MapFullError):
        return HistoryFullError(
            f"History `{directory}` has no room in its map for {num_bytes} bytes more; all "
            "earlier rounds are intact. HINT: close it and open it with a larger `map_size`."
        )
    # Of a write that the disk takes in part only, LMDB says "Input/output error".
    reasons = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    if any(os.strerror(reason) in str(error) for reason in reasons):
        return full_disk(directory, num_bytes, f"LMDB says: {error}")
    return HistoryError(
        f"History `{directory}` cannot be written: {error}; all earlier rounds are intact. "
        "HINT: close it and open it again."
    )


def full_disk(directory: Path, needed: int, why: str) -> HistoryFullError:
    """Return the error for a disk that has no room."""
    free = shutil.disk_usage(directory).free
    return HistoryFullError(
        f"The disk of history `{directory}` has no room for {needed} bytes more ({free} bytes are "
        f"free; {why}); all earlier rounds are intact. HINT: free some space, or raise the quota "
        "or limit, and resume."
    )


def foreign(directory: Path) -> HistoryFormatError:
    """Return the error for a directory that holds something else."""
    return HistoryFormatError(
        f"`{directory}` does not hold a fedrec history, or its first pages are damaged. "
        "HINT: check the path."
    )
