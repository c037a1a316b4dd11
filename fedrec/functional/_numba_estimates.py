"""Estimated updates on a CPU: one pass over what is read and written, compiled by numba."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from fedrec.functional._threads import for_each

__all__ = ["combine", "prepare"]

# Columns of a block: the rows of a pass stay in a core's first-level cache.
_WIDTH = 1024
# Vectors of a pass over a row: shared ones, and the client's own.
_SHARED, _OWN = 3, 2
_MAGNITUDE = np.int32(0x7FFFFFFF)

_Float32 = npt.NDArray[np.float32]


def _combine(  # type: ignore[no-untyped-def]
    updates, basis, shared, delta_g, clients, own, out, bits, largest, first, last
):
    d, num_shared, num_own = updates.shape[1], basis.shape[0], delta_g.shape[1]
    for i in range(first, last):
        highest = np.int32(0)
        client = clients[i]
        for start in range(0, d, _WIDTH):
            stop = min(start + _WIDTH, d)
            row, read = out[i, start:stop], updates[i, start:stop]
            for number in range(max(shared.shape[1] // _SHARED, own.shape[1] // _OWN)):
                # Coefficients beyond the vectors are 0, and whichever vector they are given to.
                k, n = number * _SHARED, number * _OWN
                a0, a1, a2 = shared[i, k], shared[i, k + 1], shared[i, k + 2]
                x0 = basis[min(k, num_shared - 1), start:stop]
                x1 = basis[min(k + 1, num_shared - 1), start:stop]
                x2 = basis[min(k + 2, num_shared - 1), start:stop]
                b0, b1 = own[i, n], own[i, n + 1]
                y0 = delta_g[client, min(n, num_own - 1), start:stop]
                y1 = delta_g[client, min(n + 1, num_own - 1), start:stop]
                for j in range(stop - start):
                    terms = a0 * x0[j] + a1 * x1[j] + a2 * x2[j] + b0 * y0[j] + b1 * y1[j]
                    row[j] = read[j] + terms
                read = row
            # Magnitudes are ordered like their bits, and NaN is above all of them.
            magnitudes = bits[i, start:stop]
            for j in range(stop - start):
                highest = max(highest, magnitudes[j] & _MAGNITUDE)
        largest[i] = highest


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., None]:
    matrix, integers = "float32[:, ::1]", "int64[::1]"
    signature = (
        f"void({matrix}, {matrix}, {matrix}, float32[:, :, ::1], {integers}, {matrix}, {matrix}, "
        "int32[:, ::1], int32[::1], int64, int64)"
    )
    compiled: Callable[..., None]
    try:
        compiled = numba.njit(signature, nogil=True, cache=True)(_combine)
    except (OSError, RuntimeError):  # nowhere to write, or a full disk
        compiled = numba.njit(signature, nogil=True)(_combine)
    return compiled


def prepare() -> None:
    """Compile what `combine` calls, or load it from numba's cache."""
    _compiled()


def combine(
    updates: _Float32,
    basis: _Float32,
    shared: _Float32,
    delta_g: _Float32,
    clients: npt.NDArray[np.int64],
    own: _Float32,
    out: _Float32,
    num_threads: int,
) -> _Float32:
    """Write `updates + shared @ basis + own @ delta_g`, client by client, and find the largest.

    All arrays are C-contiguous.

    Args:
        updates: Shape (k, d).
        basis: Vectors that clients share, shape (b, d).
        shared: Their coefficients, shape (k, b).
        delta_g: Vectors of the clients, shape (c, s, d).
        clients: Which client each row is, shape (k,).
        own: Coefficients of the client's own vectors, shape (k, s).
        out: Shape (k, d), written.
        num_threads: Threads to share the rows; the result does not depend on it.

    Returns:
        The largest magnitude of each row of `out`, shape (k,); NaN where there is one.
    """
    compiled: Any = _compiled()
    passes = max(-(-len(basis) // _SHARED), -(-delta_g.shape[1] // _OWN))
    shared, own = _padded(shared, passes * _SHARED), _padded(own, passes * _OWN)
    rows = len(updates)
    largest = np.empty(rows, np.int32)
    bits = out.view(np.int32)
    # More shares than threads: one that is held up does not hold up the others.
    shares = 4 * num_threads if num_threads > 1 else 1
    bounds = [rows * i // shares for i in range(shares + 1)]

    def share(part: tuple[int, int]) -> None:
        compiled(updates, basis, shared, delta_g, clients, own, out, bits, largest, *part)

    for_each(share, itertools.pairwise(bounds), num_threads)
    return largest.view(np.float32)


def _padded(coefficients: _Float32, columns: int) -> _Float32:
    padded = np.zeros((len(coefficients), columns), np.float32)
    padded[:, : coefficients.shape[1]] = coefficients
    return padded
