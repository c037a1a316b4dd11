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


def _dots(matrix, rows, vectors, which, parts, first, last):  # type: ignore[no-untyped-def]
    d = vectors.shape[1]
    for number in range(first, last):
        start = number * _WIDTH
        stop = min(start + _WIDTH, d)
        for i in range(len(rows)):
            y = matrix[rows[i], start:stop]
            for k in range(which.shape[1]):
                x = vectors[which[i, k], start:stop]
                part: Any = np.float32(0)
                for j in range(stop - start):
                    part += y[j] * x[j]
                parts[number, i, k] = part


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
        _dots: (
            f"void({_MATRIX}, {_INTEGERS}, {_MATRIX}, int64[:, ::1], float64[:, :, ::1], "
            "int64, int64)"
        ),
        _push: (
            f"void({_MATRIX}, {_MATRIX}, {_VECTOR}, {_MATRIX}, int64[:, ::1], float64, boolean, "
            f"float32[:, :, ::1], {_INTEGERS}, {_INTEGERS}, float64[:, ::1], float64[:, ::1], "
            "boolean[::1], int64, int64)"
        ),
    }
    return compile_all(signatures, FAST)


def dots(
    matrix: _Float32, rows: _Int64, vectors: _Float32, which: _Int64, num_threads: int
) -> _Float64:
    """Return the products of rows with some vectors each, summed in float64 block by block.

    Args:
        matrix: C-contiguous, shape (n, d).
        rows: Shape (k,).
        vectors: C-contiguous, shape (g, d).
        which: The vectors of each row, shape (k, q).
        num_threads: Threads to share the columns; the result does not depend on it.

    Returns:
        Shape (k, q).
    """
    kernel = compiled()["_dots"]
    blocks = -(-vectors.shape[1] // _WIDTH)
    parts = np.empty((blocks, *which.shape), np.float64)
    share(lambda part: kernel(matrix, rows, vectors, which, parts, *part), blocks, num_threads)
    total: _Float64 = parts.sum(axis=0)
    return total


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
