"""Estimated updates on a CPU: one pass over what is read and written, compiled by numba."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fedrec.functional._numba_kernels import compile_kernel
from fedrec.functional._threads import for_each

__all__ = ["combine", "prepare"]

# Columns of a block: the rows of a pass stay in a core's first-level cache.
_WIDTH = 1024
# Pairs of a pass over a row.
_PAIRS = 2
_MAGNITUDE = np.int32(0x7FFFFFFF)

_Float32 = npt.NDArray[np.float32]


def _combine(  # type: ignore[no-untyped-def]
    updates, v, sigma, pool, slots, of_pool, delta_g, clients, own, out, bits, largest, first, last
):
    d, num_pairs = updates.shape[1], delta_g.shape[1]
    for i in range(first, last):
        highest = np.int32(0)
        client, scale = clients[i], sigma[i]
        for start in range(0, d, _WIDTH):
            stop = min(start + _WIDTH, d)
            row, read, x = out[i, start:stop], updates[i, start:stop], v[start:stop]
            a = scale
            for n in range(0, num_pairs, _PAIRS):
                # Without a second pair, the first is taken twice, the second time with nothing.
                m = min(n + 1, num_pairs - 1)
                more = np.float32(m - n)
                b0, b1 = of_pool[i, n], of_pool[i, m] * more
                c0, c1 = own[i, n], own[i, m] * more
                y0, y1 = pool[slots[i, n], start:stop], pool[slots[i, m], start:stop]
                z0, z1 = delta_g[client, n, start:stop], delta_g[client, m, start:stop]
                for j in range(stop - start):
                    terms = a * x[j] + b0 * y0[j] + b1 * y1[j] + c0 * z0[j] + c1 * z1[j]
                    row[j] = read[j] + terms
                read, a = row, np.float32(0)
            # Magnitudes are ordered like their bits, and NaN is above all of them.
            magnitudes = bits[i, start:stop]
            for j in range(stop - start):
                highest = max(highest, magnitudes[j] & _MAGNITUDE)
        largest[i] = highest


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., None]:
    vector, matrix = "float32[::1]", "float32[:, ::1]"
    integers, indices = "int64[::1]", "int64[:, ::1]"
    signature = (
        f"void({matrix}, {vector}, {vector}, {matrix}, {indices}, {matrix}, float32[:, :, ::1], "
        f"{integers}, {matrix}, {matrix}, int32[:, ::1], int32[::1], int64, int64)"
    )
    return compile_kernel(_combine, signature)


def prepare() -> None:
    """Compile what `combine` calls, or load it from numba's cache."""
    _compiled()


def combine(
    updates: _Float32,
    v: _Float32,
    sigma: _Float32,
    pool: _Float32,
    slots: npt.NDArray[np.int64],
    of_pool: _Float32,
    delta_g: _Float32,
    clients: npt.NDArray[np.int64],
    own: _Float32,
    out: _Float32,
    num_threads: int,
) -> _Float32:
    """Write `updates + sigma * v + of_pool @ pool[slots] + own @ delta_g`, client by client.

    All arrays are C-contiguous.

    Args:
        updates: Shape (k, d).
        v: A vector of all clients, shape (d,).
        sigma: Its coefficients, shape (k,).
        pool: Vectors that clients share, shape (b, d).
        slots: Which of them are a client's, shape (k, s).
        of_pool: Their coefficients, shape (k, s).
        delta_g: Vectors of the clients' own, shape (c, s, d).
        clients: Which client each row is, shape (k,).
        own: Their coefficients, shape (k, s).
        out: Shape (k, d), written.
        num_threads: Threads to share the rows; the result does not depend on it.

    Returns:
        The largest magnitude of each row of `out`, shape (k,); NaN where there is one.
    """
    compiled: Any = _compiled()
    rows = len(updates)
    largest = np.empty(rows, np.int32)
    arrays = (updates, v, sigma, pool, slots, of_pool, delta_g, clients, own, out)
    # More shares than threads: one that is held up does not hold up the others.
    shares = 4 * num_threads if num_threads > 1 else 1
    bounds = [rows * i // shares for i in range(shares + 1)]

    def share(part: tuple[int, int]) -> None:
        compiled(*arrays, out.view(np.int32), largest, *part)

    for_each(share, itertools.pairwise(bounds), num_threads)
    return largest.view(np.float32)
