"""The rows of a round on all processors."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["map_rows", "stream_rows"]

T = TypeVar("T")
R = TypeVar("R")

_MOST_THREADS = 8
_BYTES_A_THREAD = 2**20  # fewer are done before a thread has started


def map_rows(function: Callable[[T], R], rows: Sequence[T], num_bytes: int) -> list[R]:
    """Call a function for every row, on several threads if it pays.

    The threads end with the call, so that a fork inherits none. Results do not depend on their
    number.

    Args:
        function: What to do; NumPy, zstd, lz4 and xxhash let other threads run meanwhile.
        rows: Its arguments.
        num_bytes: How much there is to do in all.

    Returns:
        The results, in the order of the rows.
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
    """Call a function for every row as `map_rows` does, a few rows ahead of the caller.

    No more results wait than there are threads, and their memory is soon used again: fresh memory
    for all of them would have to be mapped and cleared, which takes longer than copying.

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
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for row in rows:
            if len(waiting) > num_threads:
                yield waiting.popleft().result()
            waiting.append(pool.submit(function, row))
        while waiting:
            yield waiting.popleft().result()


def _num_threads(num_rows: int, num_bytes: int) -> int:
    processors = len(os.sched_getaffinity(0))
    return min(processors, _MOST_THREADS, num_rows, num_bytes // _BYTES_A_THREAD)
