"""Memory for the updates of a round, used again when nobody holds it any more."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["ArrayPool"]

# One that is worked on, one that is read ahead, one that its reader is about to let go.
_MOST = 3
# Less comes from memory that the process has already.
_SMALL = 2**20


def _empty(size: int) -> NDArray[np.float32]:
    return np.empty(size, np.float32)


class ArrayPool:
    """Hands out arrays that nobody else holds, and takes back those that were let go.

    New memory has to be mapped and cleared page by page, which takes as long as filling it. An
    array is free when nothing refers to it, no view and no tensor either: what was handed out
    never changes while anyone can see it. As long as one is held, free ones are kept; with the last
    one they all go.

    Args:
        allocate: Returns a new flat float32 array of a size, which is no view of another array.

    Examples:
        >>> pool = ArrayPool()
        >>> first, second = pool.take(1024, 512), pool.take(1024, 512)
        >>> address = first.ctypes.data
        >>> del first
        >>> pool.take(1024, 512).ctypes.data == address
        True
    """

    def __init__(self, allocate: Callable[[int], NDArray[np.float32]] = _empty) -> None:
        self._allocate = allocate
        self._mutex = threading.RLock()  # an array may be collected while its thread holds it
        self._kept: list[NDArray[np.float32]] = []
        self._held = 0

    def take(self, *shape: int) -> NDArray[np.float32]:
        """Return an array of that shape; what it contains is of no meaning."""
        size = math.prod(shape)
        if 4 * size < _SMALL:
            return np.empty(shape, np.float32)
        with self._mutex:
            free = [k for k in range(len(self._kept)) if self._is_free(k)]
            fitting = [k for k in free if self._kept[k].size == size]
            if not fitting:
                for k in reversed(free):  # they are of other rounds
                    del self._kept[k]
                fitting = [len(self._kept)]
                self._kept.append(self._allocate(size))
            array = self._kept[fitting[0]].reshape(shape)
            del self._kept[_MOST:]
            self._held += 1
            weakref.finalize(array, self._let_go).atexit = False
            return array

    def __reduce__(self) -> tuple[type[ArrayPool], tuple[object, ...]]:
        return type(self), (self._allocate,)  # what it keeps is of no use elsewhere

    def _is_free(self, k: int) -> bool:
        # Views of views refer to the array itself.
        return sys.getrefcount(self._kept[k]) == _UNSEEN

    def _let_go(self) -> None:
        with self._mutex:
            self._held -= 1
            if self._held == 0:
                self._kept.clear()


def _unseen() -> int:
    """Return the references to an array in a list if there are no others, counted as above."""
    kept = [_empty(1)]
    return sys.getrefcount(kept[0])


_UNSEEN = _unseen()
