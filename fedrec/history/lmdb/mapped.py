"""Copying out of a file that is mapped into memory, by way of the file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["MappedFile"]

# What is asked for at once should not drive out what is in use.
_MOST_AHEAD = 2**28
# Where the rest of a page goes that nobody wants.
_SKIPPED = memoryview(bytearray(4096))


class MappedFile:
    """Finds where in a file a view of its map lies, and reads it from there.

    The kernel copies out of its page cache twice as fast as a process copies out of the map, where
    every page is 4 KiB of its own, to the processor as well.

    Args:
        path: The file. It may be mapped later, and more than once.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self._inode = os.fstat(self._file).st_ino
        self._maps: list[tuple[int, int, int]] = []

    def offset(self, view: memoryview) -> int | None:
        """Return where in the file a view of its map begins, or `None` if it is none."""
        return self._offset(np.frombuffer(view, np.uint8).ctypes.data)

    def read_into(self, wanted: Iterable[tuple[int, Sequence[Any]]]) -> bool:
        """Read from places in the file into buffers, from those next to each other in one go.

        Args:
            wanted: Places in their order, each with the buffers that are filled from there, one
                after the other.

        Returns:
            Whether that was done; `False` where it cannot be.
        """
        runs: list[tuple[int, list[Any]]] = []  # where in the file, and where to
        end = 0
        for offset, buffers in wanted:
            if runs and 0 <= offset - end <= len(_SKIPPED):
                runs[-1][1].append(_SKIPPED[: offset - end])
            else:
                runs.append((offset, []))
            runs[-1][1].extend(buffers)
            end = offset + sum(map(len, buffers))
        try:
            return all(
                os.preadv(self._file, buffers, offset) == sum(map(len, buffers))
                for offset, buffers in runs
            )
        except OSError:
            return False

    def expect(self, offset: int, num_bytes: int) -> None:
        """Ask the kernel to fetch a part of the file."""
        if 0 < num_bytes <= _MOST_AHEAD and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)

    def _offset(self, address: int) -> int | None:
        for _ in range(2):
            for first, last, offset in self._maps:
                if first <= address < last:
                    return address - first + offset
            self._maps = self._find()  # not yet known
        return None

    def _find(self) -> list[tuple[int, int, int]]:
        """Return the maps of the file in this process: first address, last, offset in the file."""
        found = []
        try:
            with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:  # noqa: PTH123
                for line in lines:
                    addresses, _, offset, _, inode, *_ = line.split(maxsplit=5)
                    if int(inode) == self._inode:
                        first, last = (int(number, 16) for number in addresses.split("-"))
                        found.append((first, last, int(offset, 16)))
        except (OSError, ValueError):
            return []  # not Linux
        return found
