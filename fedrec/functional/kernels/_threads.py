"""Sharing work that leaves Python's lock among a few threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["default_threads", "for_each", "share"]

T = TypeVar("T")

# Parameters below which starting several threads takes longer than their work.
_SMALL_MODEL = 20_000


def default_threads(num_parameters: int, threads: int) -> int:
    """Return how many threads torch computes with, where nothing else is said.

    Args:
        num_parameters: $d$.
        threads: Threads for a model that is not small.
    """
    return 1 if num_parameters < _SMALL_MODEL else threads


def for_each(function: Callable[[T], object], items: Iterable[T], num_threads: int) -> None:
    """Call a function with every item, on so many threads, this one among them.

    The threads end with the call: they cost 0.1 ms, and neither a fork nor threads of the caller
    can disturb them, as they can numba's.
    """
    waiting = iter(items)

    def work() -> None:
        for item in waiting:
            function(item)

    if num_threads == 1:
        work()
        return
    with ThreadPoolExecutor(num_threads - 1) as pool:
        others = [pool.submit(work) for _ in range(num_threads - 1)]
        work()
        for other in others:
            other.result()


def share(function: Callable[[tuple[int, int]], object], size: int, num_threads: int) -> None:
    """Split `range(size)`, and call a function with the bounds of each part."""
    num_threads = max(min(num_threads, size), 1)
    # More parts than threads: one that is held up does not hold up the others.
    parts = 4 * num_threads if num_threads > 1 else 1
    bounds = [size * i // parts for i in range(parts + 1)]
    for_each(function, itertools.pairwise(bounds), num_threads)
