"""Weighted sums of client updates on a CPU, compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable

from fedrec.functional.kernels._numba_kernels import FAST, compile_all
from fedrec.functional.kernels._threads import share

__all__ = ["compiled", "sum_rows", "weighted_sum"]

# Columns of a block: their sums stay in the first-level cache.
_WIDTH = 4096

_Float32 = npt.NDArray[np.float32]

_inline: Any = register_jitable


@_inline
def sum_rows(rows, factors, out):  # type: ignore[no-untyped-def]
    """Write `factors @ rows`."""
    x, a = rows[0], factors[0]
    for j in range(len(out)):
        out[j] = a * x[j]
    for i in range(1, len(rows)):
        x, a = rows[i], factors[i]
        for j in range(len(out)):
            out[j] += a * x[j]


def _weighted_sum(rows, factors, out, first, last):  # type: ignore[no-untyped-def]
    d = rows.shape[1]
    for number in range(first, last):
        start = number * _WIDTH
        stop = min(start + _WIDTH, d)
        sum_rows(rows[:, start:stop], factors, out[start:stop])


@lru_cache(maxsize=1)
def compiled() -> dict[str, Callable[..., None]]:
    """Compile everything, or load it from numba's cache; return it by name."""
    signatures: dict[Any, str] = {
        _weighted_sum: "void(float32[:, ::1], float32[::1], float32[::1], int64, int64)"
    }
    return compile_all(signatures, FAST)


def weighted_sum(rows: _Float32, factors: _Float32, out: _Float32, num_threads: int) -> None:
    """Write `factors @ rows`, adding one row after the other to every column.

    So the bits of a column depend neither on the columns beside it nor on threads.

    Args:
        rows: C-contiguous, shape (m, d).
        factors: Shape (m,).
        out: Shape (d,).
        num_threads: Threads to share the columns.
    """
    kernel = compiled()["_weighted_sum"]
    blocks = -(-rows.shape[1] // _WIDTH)
    share(lambda part: kernel(rows, factors, out, *part), blocks, num_threads)
