"""The rows of a round on all processors."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["map_rows", "stream_rows", "unaided_until"]

T = TypeVar("T")
R = TypeVar("R")

_MOST_THREADS = 8
_BYTES_A_THREAD = 2**20  # less is done before a thread has started
_this_thread = threading.local()


def map_rows(function: Callable[[T], R], rows: Sequence[T], num_bytes: int) -> list[R]:
    """Call a function for every row, on several threads if it pays.

    The threads end with the call, so that a fork finds none. What comes out does not depend on
    their number.

    Args:
        function: What to do; NumPy, zstd, lz4 and xxhash let other threads run meanwhile.
        rows: Its arguments.
        num_bytes: How much there is to do in all.

    Returns:
        Its results, in the order of the rows.
    """
    num_threads = _num_threads(len(rows), num_bytes)
    if num_threads < 2:
        return [function(row) for row in rows]

    def part(k: int) -> list[R]:
        return [function(row) for row in rows[k::num_threads]]

    with ThreadPoolExecutor(num_threads - 1) as pool:
        others = [pool.submit(part, k) for k in range(1, num_threads)]
        parts = [part(0), *(other.result() for other in others)]
    return [parts[i % num_threads][i // num_threads] for i in range(len(rows))]


def stream_rows(
    function: Callable[[T], R], rows: Sequence[T], num_bytes: int
) -> Generator[R, None, None]:
    """Call a function for every row as `map_rows` does, a few rows ahead of who takes the results.

    No more results wait than there are threads, and their memory is soon used again: fresh memory
    for all of them would have to be mapped and cleared, which takes longer than copying. Other
    threads do none of it while `unaided_until` says so.

    Args:
        function: As for `map_rows`.
        rows: Its arguments.
        num_bytes: How much there is to do in all.

    Yields:
        Its results, in the order of the rows.
    """
    num_threads = _num_threads(len(rows), num_bytes)
    if num_threads < 2:
        yield from map(function, rows)
        return
    someone_waits = getattr(_this_thread, "someone_waits", lambda: True)
    aided = False
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for row in rows:
            aided = aided or someone_waits()
            if not aided:
                yield function(row)
                continue
            if len(waiting) > num_threads:
                yield waiting.popleft().result()
            waiting.append(pool.submit(function, row))
        while waiting:
            yield waiting.popleft().result()


@contextmanager
def unaided_until(someone_waits: Callable[[], bool]) -> Iterator[None]:
    """Let `stream_rows`, called in this thread, do without others until someone waits for it.

    What one thread encodes and writes stays in its processor's cache. With several it is done
    sooner, but takes more of the processors' time in all, which those that compute have to wait
    for.

    Args:
        someone_waits: Asked before every row. Once it was true, other threads do the rest.
    """
    _this_thread.someone_waits = someone_waits
    try:
        yield
    finally:
        del _this_thread.someone_waits


def _num_threads(num_rows: int, num_bytes: int) -> int:
    processors = len(os.sched_getaffinity(0))
    return min(processors, _MOST_THREADS, num_rows, num_bytes // _BYTES_A_THREAD)
