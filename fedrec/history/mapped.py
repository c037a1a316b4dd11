"""Copying out of a file that is mapped into memory, by way of the file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["MappedFile"]

# What is asked for at once should not drive out what is in use.
_MOST_AHEAD = 2**28


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

    def read_into(self, view: memoryview, buffers: Sequence[Any]) -> bool:
        """Copy a view of the map into buffers, which it fills one after the other.

        Args:
            view: What to copy, as long as the buffers are together.
            buffers: Where it goes.

        Returns:
            Whether that was done; `False` where it cannot be.
        """
        address = np.frombuffer(view, np.uint8).ctypes.data
        offset = self._offset(address)
        if offset is None:
            return False
        try:
            return os.preadv(self._file, buffers, offset) == len(view)
        except OSError:
            return False

    def expect(self, first: memoryview, last: memoryview) -> None:
        """Ask the kernel to fetch all from the start of one view to the end of another."""
        begin, end = (self._offset(np.frombuffer(v, np.uint8).ctypes.data) for v in (first, last))
        if begin is not None and end is not None and hasattr(os, "posix_fadvise"):
            length = end + len(last) - begin
            if 0 < length <= _MOST_AHEAD:
                os.posix_fadvise(self._file, begin, length, os.POSIX_FADV_WILLNEED)

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
