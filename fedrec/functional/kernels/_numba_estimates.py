"""Estimated updates on a CPU: one pass over what is read and written, compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from fedrec.functional.kernels._numba_kernels import FAST, compile_all
from fedrec.functional.kernels._threads import share

__all__ = ["combine", "compiled", "weighted_sum"]

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
_inline: Any = register_jitable


@_inline
def _all_but_last(  # type: ignore[no-untyped-def]
    i, start, stop, updates, v, sigma, pool, slots, of_pool, delta_g, client, own, target
):
    """Add what comes before the last pass over a block; return what that one starts from."""
    read, scale = updates[i, start:stop], sigma[i]
    for n in range(0, own.shape[1] - _PAIRS, _PAIRS):
        x = v[start:stop]
        y0, y1 = pool[slots[i, n], start:stop], pool[slots[i, n + 1], start:stop]
        z0, z1 = delta_g[client, n, start:stop], delta_g[client, n + 1, start:stop]
        b0, b1, c0, c1 = of_pool[i, n], of_pool[i, n + 1], own[i, n], own[i, n + 1]
        for j in range(stop - start):
            terms = scale * x[j] + b0 * y0[j] + b1 * y1[j] + c0 * z0[j] + c1 * z1[j]
            target[j] = read[j] + terms
        read, scale = target, np.float32(0)
    return read, scale


@_inline
def _last_pairs(i, start, stop, pool, slots, of_pool, delta_g, client, own):  # type: ignore[no-untyped-def]
    """Return vectors and coefficients of the last pass over a block."""
    n = (own.shape[1] - 1) // _PAIRS * _PAIRS
    # Without a second pair, the first is taken twice, the second time with nothing.
    m = min(n + 1, own.shape[1] - 1)
    more = np.float32(m - n)
    return (
        pool[slots[i, n], start:stop],
        pool[slots[i, m], start:stop],
        delta_g[client, n, start:stop],
        delta_g[client, m, start:stop],
        of_pool[i, n],
        of_pool[i, m] * more,
        own[i, n],
        own[i, m] * more,
    )


def _combine(  # type: ignore[no-untyped-def]
    updates, v, sigma, pool, slots, of_pool, delta_g, clients, own, out, largest, first, last
):
    d = updates.shape[1]
    for i in range(first, last):
        highest, client = np.int32(0), clients[i]
        for start in range(0, d, _WIDTH):
            stop = min(start + _WIDTH, d)
            row, x = out[i, start:stop], v[start:stop]
            read, a = _all_but_last(
                i, start, stop, updates, v, sigma, pool, slots, of_pool, delta_g, client, own, row
            )
            y0, y1, z0, z1, b0, b1, c0, c1 = _last_pairs(
                i, start, stop, pool, slots, of_pool, delta_g, client, own
            )
            for j in range(stop - start):
                terms = a * x[j] + b0 * y0[j] + b1 * y1[j] + c0 * z0[j] + c1 * z1[j]
                value = read[j] + terms
                row[j] = value
                highest = max(highest, _bits(value) & _MAGNITUDE)
        largest[i] = highest


def _weighted_sum(  # type: ignore[no-untyped-def]
    updates,
    v,
    sigma,
    pool,
    slots,
    of_pool,
    delta_g,
    clients,
    own,
    weights,
    out,
    largest,
    first,
    last,
):
    scratch = np.empty(_WIDTH, np.float32)
    for start in range(first, last, _WIDTH):
        stop = min(start + _WIDTH, last)
        total, x = out[start:stop], v[start:stop]
        for j in range(stop - start):
            total[j] = np.float32(0)
        for i in range(len(clients)):
            client, highest, weight = clients[i], largest[i], weights[i]
            if client < 0:
                continue
            read, a = _all_but_last(
                i, start, stop, updates, v, sigma, pool, slots, of_pool, delta_g, client, own,
                scratch,
            )  # fmt: skip
            y0, y1, z0, z1, b0, b1, c0, c1 = _last_pairs(
                i, start, stop, pool, slots, of_pool, delta_g, client, own
            )
            for j in range(stop - start):
                terms = a * x[j] + b0 * y0[j] + b1 * y1[j] + c0 * z0[j] + c1 * z1[j]
                value = read[j] + terms
                total[j] += weight * value
                highest = max(highest, _bits(value) & _MAGNITUDE)
            largest[i] = highest


_VECTOR, _MATRIX, _PAIRS_OF_ALL = "float32[::1]", "float32[:, ::1]", "float32[:, :, ::1]"
_INTEGERS, _INDICES = "int64[::1]", "int64[:, ::1]"
_SOURCES = (
    f"{_MATRIX}, {_VECTOR}, {_VECTOR}, {_MATRIX}, {_INDICES}, {_MATRIX}, {_PAIRS_OF_ALL}, "
    f"{_INTEGERS}, {_MATRIX}"
)


@lru_cache(maxsize=1)
def compiled() -> dict[str, Callable[..., None]]:
    """Compile everything, or load it from numba's cache; return it by name."""
    signatures: dict[Any, str] = {
        _combine: f"void({_SOURCES}, {_MATRIX}, int32[::1], int64, int64)",
        _weighted_sum: f"void({_SOURCES}, {_VECTOR}, {_VECTOR}, int32[::1], int64, int64)",
    }
    return compile_all(signatures, FAST)


def combine(
    updates: _Float32,
    v: _Float32,
    sigma: _Float32,
    pool: _Float32,
    slots: _Int64,
    of_pool: _Float32,
    delta_g: _Float32,
    clients: _Int64,
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
    kernel = compiled()["_combine"]
    largest = np.empty(len(updates), np.int32)
    arrays = (updates, v, sigma, pool, slots, of_pool, delta_g, clients, own, out, largest)
    share(lambda part: kernel(*arrays, *part), len(updates), num_threads)
    return largest.view(np.float32)


def weighted_sum(
    updates: _Float32,
    v: _Float32,
    sigma: _Float32,
    pool: _Float32,
    slots: _Int64,
    of_pool: _Float32,
    delta_g: _Float32,
    clients: _Int64,
    own: _Float32,
    weights: _Float32,
    num_threads: int,
) -> tuple[_Float32, _Float32]:
    """Return `weights` times what `combine` writes, without writing it.

    Args:
        updates: Shape (k, d); this and the following are those of `combine`.
        v: Shape (d,).
        sigma: Shape (k,).
        pool: Shape (b, d).
        slots: Shape (k, s).
        of_pool: Shape (k, s).
        delta_g: Shape (c, s, d).
        clients: Shape (k,); rows of negative ones are left out.
        own: Shape (k, s).
        weights: Shape (k,).
        num_threads: Threads to share the columns; the result does not depend on it.

    Returns:
        The sum, shape (d,), and the largest magnitude of each row that went into it, shape (k,).
    """
    kernel = compiled()["_weighted_sum"]
    out = np.empty_like(v)
    found: list[npt.NDArray[np.int32]] = []
    arrays = (updates, v, sigma, pool, slots, of_pool, delta_g, clients, own, weights, out)

    def work(part: tuple[int, int]) -> None:
        largest = np.zeros(len(updates), np.int32)
        # Bounds on whole blocks, so that they do not depend on the number of threads.
        first, last = (min(blocks * _WIDTH, len(v)) for blocks in part)
        kernel(*arrays, largest, first, last)
        found.append(largest)

    share(work, -(-len(v) // _WIDTH), num_threads)
    return out, np.max(found, axis=0).view(np.float32)
