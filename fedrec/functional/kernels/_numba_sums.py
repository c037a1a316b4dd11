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
    """Write `factors @ rows`, adding one row after the other."""
    for j in range(len(out)):
        out[j] = 0
    whole = len(rows) // 4 * 4
    # Four at a time: with one, the sums are read and written as often as the rows are read.
    for i in range(0, whole, 4):
        x0, x1, x2, x3 = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
        a0, a1, a2, a3 = factors[i], factors[i + 1], factors[i + 2], factors[i + 3]
        for j in range(len(out)):
            out[j] = (((out[j] + a0 * x0[j]) + a1 * x1[j]) + a2 * x2[j]) + a3 * x3[j]
    for i in range(whole, len(rows)):
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
