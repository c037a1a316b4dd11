"""Estimated updates on a CPU: one pass over what is read and written, compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fedrec.functional.kernels._numba_kernels import FAST, compile_all
from fedrec.functional.kernels._threads import share

__all__ = ["combine", "compiled"]

# Columns of a block: what all rows share stays in the second-level cache, and a row is long enough
# for the memory to stream.
_WIDTH = 4096
# Pairs of a pass over a row.
_PAIRS = 2
_MAGNITUDE = np.int32(0x7FFFFFFF)

_Float32 = npt.NDArray[np.float32]
_Int64 = npt.NDArray[np.int64]


def _generate_bits(typing_context, value):  # type: ignore[no-untyped-def]
    """Return the bits of a number. Magnitudes are ordered like theirs, NaN above all of them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


_bits: Any = intrinsic(_generate_bits)


def _combine(  # type: ignore[no-untyped-def]
    updates, anchors, recorded, weight, anchored, vectors, which, sigma, pool, slots, of_pool,
    delta_g, clients, own, out, largest, first, last,
):  # fmt: skip
    d, num_pairs = vectors.shape[1], own.shape[1]
    for number in range(first, last):
        start = number * _WIDTH
        stop = min(start + _WIDTH, d)
        for i in range(len(clients)):
            client = clients[i]
            row, read, x = out[i, start:stop], updates[i, start:stop], vectors[which[i], start:stop]
            a, highest = sigma[i], np.int32(0)
            for n in range(0, num_pairs, _PAIRS):
                # Without a second pair, the first is taken twice, the second time with nothing.
                m = min(n + 1, num_pairs - 1)
                more = np.float32(m - n)
                y0, y1 = pool[slots[i, n], start:stop], pool[slots[i, m], start:stop]
                z0, z1 = delta_g[client, n, start:stop], delta_g[client, m, start:stop]
                b0, b1 = of_pool[i, n], of_pool[i, m] * more
                c0, c1 = own[i, n], own[i, m] * more
                highest = np.int32(0)
                # Three loops, since one that might read what it writes is not vectorized.
                if n > 0:
                    for j in range(stop - start):
                        terms = b0 * y0[j] + b1 * y1[j] + c0 * z0[j] + c1 * z1[j]
                        value = row[j] + terms
                        row[j] = value
                        highest = max(highest, _bits(value) & _MAGNITUDE)
                elif anchored:
                    anchor, then = anchors[client, start:stop], recorded[client, start:stop]
                    for j in range(stop - start):
                        terms = a * x[j] + b0 * y0[j] + b1 * y1[j] + c0 * z0[j] + c1 * z1[j]
                        value = anchor[j] + weight * (read[j] - then[j]) + terms
                        row[j] = value
                        highest = max(highest, _bits(value) & _MAGNITUDE)
                else:
                    for j in range(stop - start):
                        terms = a * x[j] + b0 * y0[j] + b1 * y1[j] + c0 * z0[j] + c1 * z1[j]
                        value = read[j] + terms
                        row[j] = value
                        highest = max(highest, _bits(value) & _MAGNITUDE)
            largest[number, i] = highest


_VECTOR, _MATRIX, _PAIRS_OF_ALL = "float32[::1]", "float32[:, ::1]", "float32[:, :, ::1]"
_INTEGERS, _INDICES = "int64[::1]", "int64[:, ::1]"


@lru_cache(maxsize=1)
def compiled() -> dict[str, Callable[..., None]]:
    """Compile everything, or load it from numba's cache; return it by name."""
    signatures: dict[Any, str] = {
        _combine: (
            f"void({_MATRIX}, {_MATRIX}, {_MATRIX}, float32, boolean, {_MATRIX}, {_INTEGERS}, "
            f"{_VECTOR}, {_MATRIX}, {_INDICES}, {_MATRIX}, {_PAIRS_OF_ALL}, {_INTEGERS}, "
            f"{_MATRIX}, {_MATRIX}, int32[:, ::1], int64, int64)"
        ),
    }
    return compile_all(signatures, FAST)


def combine(
    updates: _Float32,
    vectors: _Float32,
    which: _Int64,
    sigma: _Float32,
    pool: _Float32,
    slots: _Int64,
    of_pool: _Float32,
    delta_g: _Float32,
    clients: _Int64,
    own: _Float32,
    out: _Float32,
    num_threads: int,
    anchors: tuple[_Float32, _Float32, float] | None = None,
) -> _Float32:
    """Write `updates + sigma * vectors[which] + of_pool @ pool[slots] + own @ delta_g`.

    A block of columns after the other, so that what clients share is read once. All arrays are
    C-contiguous.

    Args:
        updates: Shape (k, d).
        vectors: Vectors that clients share, shape (g, d).
        which: The one of each row, shape (k,).
        sigma: Its coefficients, shape (k,).
        pool: Vectors that clients share, shape (b, d).
        slots: Which of them are a client's, shape (k, s).
        of_pool: Their coefficients, shape (k, s).
        delta_g: Vectors of the clients' own, shape (c, s, d).
        clients: Which client each row is, shape (k,).
        own: Their coefficients, shape (k, s).
        out: Shape (k, d), written.
        num_threads: Threads to share the columns; the result does not depend on it.
        anchors: Of all clients, vectors a and r of shape (c, d), and a number b: it starts from
            `a + b * (updates - r)` in place of `updates`.

    Returns:
        The largest magnitude of each row of `out`, shape (k,); NaN where there is one.
    """
    kernel = compiled()["_combine"]
    a, r, weight = (updates, updates, 0.0) if anchors is None else anchors
    blocks = -(-vectors.shape[1] // _WIDTH)
    largest = np.empty((blocks, len(updates)), np.int32)
    arrays = (vectors, which, sigma, pool, slots, of_pool, delta_g, clients, own, out, largest)
    start = (updates, a, r, weight, anchors is not None)
    share(lambda part: kernel(*start, *arrays, *part), blocks, num_threads)
    highest: _Float32 = largest.max(axis=0).view(np.float32)
    return highest
