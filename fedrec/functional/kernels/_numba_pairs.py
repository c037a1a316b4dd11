"""Products and differences of L-BFGS pairs on a CPU, compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable

from fedrec.functional.kernels._numba_kernels import FAST, compile_all
from fedrec.functional.kernels._threads import share

__all__ = ["compiled", "dots", "push"]

# Columns that are added up in float32, before they are in float64.
_WIDTH = 4096
# Rows that are multiplied with a vector at a time.
_ROWS = 4

_Float32 = npt.NDArray[np.float32]
_Float64 = npt.NDArray[np.float64]
_Int64 = npt.NDArray[np.int64]

_inline: Any = register_jitable


@_inline
def _dot(x, y):  # type: ignore[no-untyped-def]
    """Multiply two vectors, adding blocks in float64."""
    total = 0.0
    for start in range(0, len(x), _WIDTH):
        a, b = x[start : start + _WIDTH], y[start : start + _WIDTH]
        part: Any = np.float32(0)
        for j in range(len(a)):
            part += a[j] * b[j]
        total += part
    return total


def _dots(matrix, rows, v, out, first, last):  # type: ignore[no-untyped-def]
    for i in range(first, last, _ROWS):
        end = len(rows) - 1  # the last row may be taken several times
        r0, r1, r2, r3 = (
            rows[i],
            rows[min(i + 1, end)],
            rows[min(i + 2, end)],
            rows[min(i + 3, end)],
        )
        t0, t1, t2, t3 = 0.0, 0.0, 0.0, 0.0
        for start in range(0, len(v), _WIDTH):
            stop = min(start + _WIDTH, len(v))
            x = v[start:stop]
            y0, y1 = matrix[r0, start:stop], matrix[r1, start:stop]
            y2, y3 = matrix[r2, start:stop], matrix[r3, start:stop]
            p0, p1, p2, p3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for j in range(stop - start):
                p0 += y0[j] * x[j]
                p1 += y1[j] * x[j]
                p2 += y2[j] * x[j]
                p3 += y3[j] * x[j]
            t0 += float(p0)
            t1 += float(p1)
            t2 += float(p2)
            t3 += float(p3)
        # One by one: numba takes seconds to compile a slice that is assigned to.
        for k, total in enumerate((t0, t1, t2, t3)):
            if i + k < len(rows):
                out[i + k] = total


def _push(  # type: ignore[no-untyped-def]
    exact, historical, delta_w, pool, slots, least, negative, delta_g, clients, columns, own,
    models, kept, first, last,
):  # fmt: skip
    d, num_pairs = exact.shape[1], delta_g.shape[1]
    difference = np.empty(d, np.float32)
    for i in range(first, last):
        client, column = clients[i], columns[i]
        for j in range(d):
            difference[j] = exact[i, j] - historical[i, j]
        curvature = _dot(difference, delta_w)
        if not (least < (abs(curvature) if negative else curvature) < np.inf):
            continue
        kept[i] = True
        own[i, column] = models[i, column] = curvature
        for n in range(num_pairs):
            if n != column:
                models[i, n] = _dot(delta_g[client, n], delta_w)
                if slots[i, n] >= 0:
                    own[i, n] = _dot(difference, pool[slots[i, n]])
        for j in range(d):
            delta_g[client, column, j] = difference[j]


_MATRIX, _VECTOR, _INTEGERS = "float32[:, ::1]", "float32[::1]", "int64[::1]"


@lru_cache(maxsize=1)
def compiled() -> dict[str, Callable[..., None]]:
    """Compile everything, or load it from numba's cache; return it by name."""
    signatures: dict[Any, str] = {
        _dots: f"void({_MATRIX}, {_INTEGERS}, {_VECTOR}, float64[::1], int64, int64)",
        _push: (
            f"void({_MATRIX}, {_MATRIX}, {_VECTOR}, {_MATRIX}, int64[:, ::1], float64, boolean, "
            f"float32[:, :, ::1], {_INTEGERS}, {_INTEGERS}, float64[:, ::1], float64[:, ::1], "
            "boolean[::1], int64, int64)"
        ),
    }
    return compile_all(signatures, FAST)


def dots(matrix: _Float32, rows: _Int64, v: _Float32, num_threads: int) -> _Float64:
    """Return the products of these rows with a vector, summed in float64 block by block.

    Args:
        matrix: C-contiguous, shape (n, d).
        rows: Shape (k,).
        v: Shape (d,).
        num_threads: Threads to share the rows; the result does not depend on it.

    Returns:
        Shape (k,).
    """
    kernel = compiled()["_dots"]
    out = np.empty(len(rows), np.float64)

    def work(part: tuple[int, int]) -> None:
        # Bounds on whole groups, so that they do not depend on the number of threads.
        first, last = (min(groups * _ROWS, len(rows)) for groups in part)
        kernel(matrix, rows, v, out, first, last)

    share(work, -(-len(rows) // _ROWS), num_threads)
    return out


def push(
    exact: _Float32,
    historical: _Float32,
    delta_w: _Float32,
    pool: _Float32,
    slots: _Int64,
    least: float,
    negative: bool,
    delta_g: _Float32,
    clients: _Int64,
    columns: _Int64,
    num_threads: int,
) -> tuple[_Float64, _Float64, npt.NDArray[np.bool_]]:
    """Put `exact - historical` into a column of each client's pairs, if its curvature will do.

    Args:
        exact: Shape (k, d).
        historical: Shape (k, d).
        delta_w: The model difference of the pair, shape (d,).
        pool: Model differences, shape (b, d).
        slots: Which of them are a client's, shape (k, s); negative for none.
        least: What the product of the two differences has to exceed.
        negative: Whether it may be negative, and its size has to exceed that.
        delta_g: Update differences, shape (c, s, d), written.
        clients: Which client each row is, shape (k,).
        columns: Where each row goes, shape (k,).
        num_threads: Threads to share the clients; the result does not depend on it.

    Returns:
        Products of the new update difference with the client's model differences, and of the
        client's update differences with the new model difference, the new ones in their column,
        each of shape (k, s); and who got a pair, shape (k,).
    """
    kernel = compiled()["_push"]
    own, models = np.zeros((2, len(exact), delta_g.shape[1]))
    kept = np.zeros(len(exact), np.bool_)
    arrays = (
        exact,
        historical,
        delta_w,
        pool,
        slots,
        least,
        negative,
        delta_g,
        clients,
        columns,
        own,
        models,
    )
    share(lambda part: kernel(*arrays, kept, *part), len(exact), num_threads)
    return own, models, kept
