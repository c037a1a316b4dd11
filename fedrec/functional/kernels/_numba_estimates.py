"""Estimated updates on a CPU: one pass over what is read and written, compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from fedrec.functional.kernels._numba_kernels import FAST, compile_all, middle_mean_blocks, tables
from fedrec.functional.kernels._numba_kernels import WIDTH as FEWEST
from fedrec.functional.kernels._numba_pairs import WIDTH, dot, end_of, num_blocks
from fedrec.functional.kernels._numba_sums import sum_rows
from fedrec.functional.kernels._threads import share

__all__ = ["Following", "Reduced", "combine", "compiled", "reduce", "vectors_of"]

# Pairs of a pass over a row.
_PAIRS = 2
_MAGNITUDE = np.int32(0x7FFFFFFF)
# Whole numbers that share a step, as in `fedrec.history.codecs.Int8Codec`.
_BLOCK = 64
_NOTHING = np.empty(0, np.float32)
_NO_ROWS = np.empty((0, 0), np.float32)
_NO_CODES = np.empty((0, 0), np.int8), _NO_ROWS

_Float32 = npt.NDArray[np.float32]
_Float64 = npt.NDArray[np.float64]
_Int64 = npt.NDArray[np.int64]

_inline: Any = register_jitable


class Following(NamedTuple):
    """What is known of the next round.

    Attributes:
        weights: Global weights of this round, shape (d,).
        server_lr: What the aggregate times this is subtracted from them.
        recorded: Recorded weights of this round, shape (d,).
        recorded_aggregate: Recorded aggregate, of which the same is expected, shape (d,).
        now: Models, shape (g, d).
        then: Recorded models, shape (g, d).
        beta: As in `vectors_of`, like `gamma`.
        gamma: A number.
    """

    weights: _Float32
    server_lr: float
    recorded: _Float32
    recorded_aggregate: _Float32
    now: _Float32
    then: _Float32
    beta: float
    gamma: float


class Reduced(NamedTuple):
    """What is left of rows that were aggregated.

    Attributes:
        aggregate: Shape (d,).
        largest: The largest magnitude of each row, shape (k,); NaN where there is one.
        vectors: Those of the next round, if it goes as expected, shape (g, d).
        products: Of each client's own vectors with its vector of the next round, shape (k, s).
        of_pool: Of the vectors of the next round with those that clients share, where one has both,
            shape (g, b).
    """

    aggregate: _Float32
    largest: _Float32
    vectors: _Float32
    products: _Float64
    of_pool: _Float64


def _generate_bits(typing_context, value):  # type: ignore[no-untyped-def]
    """Return the bits of a number. Magnitudes are ordered like theirs, NaN above all of them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


_bits: Any = intrinsic(_generate_bits)


@_inline
def _decode(codes, steps, out):  # type: ignore[no-untyped-def]
    for start in range(0, len(out), _BLOCK):
        step = steps[start // _BLOCK]
        # Slices, since a loop that does not begin at 0 is not vectorized.
        numbers, values = codes[start : start + _BLOCK], out[start : start + _BLOCK]
        for j in range(len(values)):
            values[j] = np.float32(numbers[j]) * step


@_inline
def _step(weights, server_lr, aggregate, out):  # type: ignore[no-untyped-def]
    # Two loops: a product that goes through memory is rounded, as in torch, and not fused with the
    # subtraction.
    for j in range(len(out)):
        out[j] = server_lr * aggregate[j]
    for j in range(len(out)):
        out[j] = weights[j] - out[j]


@_inline
def _vector(weights, recorded, now, then, beta, gamma, out):  # type: ignore[no-untyped-def]
    for j in range(len(out)):
        out[j] = beta * (recorded[j] - then[j])
    for j in range(len(out)):
        out[j] = gamma * ((weights[j] - now[j]) - out[j])


def _vectors_of(  # type: ignore[no-untyped-def]
    weights, recorded, now, then, beta, gamma, out
):
    for g in range(len(out)):
        _vector(weights, recorded, now[g], then[g], beta, gamma, out[g])


def _combine(  # type: ignore[no-untyped-def]
    updates, anchors, weight, anchored, vectors, which, sigma, pool, slots, of_pool, delta_g,
    clients, own, largest, out, reduces, codes, steps, factors, network, kept, aggregate, weights,
    server_lr, recorded, recorded_aggregate, now, then, beta, gamma, ahead, parts, asked, shared,
    first, last,
):  # fmt: skip
    d, num_pairs, k = vectors.shape[1], own.shape[1], len(clients)
    memory = np.empty(k * 2 * WIDTH if reduces else 0, np.float32)
    new, following = np.empty(2 * WIDTH, np.float32), np.empty(2 * WIDTH, np.float32)
    decoded = np.empty(2 * WIDTH, np.float32)
    for number in range(first, last):
        start = number * WIDTH
        stop = end_of(number, len(largest), d)
        # Rows of the block: those of `out`, or in memory that stays in the cache.
        block, begin = out, start
        if reduces:
            block, begin = memory[: k * (stop - start)].reshape(k, stop - start), 0
        for i in range(k):
            client = clients[i]
            row = block[i, begin : begin + stop - start]
            if len(codes):
                read = decoded[: stop - start]
                _decode(codes[i, start:stop], steps[i, start // _BLOCK :], read)
            else:
                read = updates[i, start:stop]
            highest = np.int32(0)
            if num_pairs == 0:
                anchor = anchors[client, start:stop]
                for j in range(stop - start):
                    value = anchor[j] + weight * read[j]
                    row[j] = value
                    highest = max(highest, _bits(value) & _MAGNITUDE)
            for n in range(0, num_pairs, _PAIRS):
                x, a = vectors[which[i], start:stop], sigma[i]
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
                    anchor = anchors[client, start:stop]
                    for j in range(stop - start):
                        terms = a * x[j] + b0 * y0[j] + b1 * y1[j] + c0 * z0[j] + c1 * z1[j]
                        value = anchor[j] + weight * read[j] + terms
                        row[j] = value
                        highest = max(highest, _bits(value) & _MAGNITUDE)
                else:
                    for j in range(stop - start):
                        terms = a * x[j] + b0 * y0[j] + b1 * y1[j] + c0 * z0[j] + c1 * z1[j]
                        value = read[j] + terms
                        row[j] = value
                        highest = max(highest, _bits(value) & _MAGNITUDE)
            largest[number, i] = highest
        if not reduces:
            continue
        total = aggregate[start:stop]
        if len(factors):
            sum_rows(block, factors, total)
        else:
            pieces = -(-(stop - start) // FEWEST)
            middle_mean_blocks(memory, k, stop - start, network, kept, 0, pieces, total)
        if num_pairs == 0:
            continue
        # In the next round, pairs are multiplied with these vectors; now they are in the cache.
        size = stop - start
        _step(weights[start:stop], server_lr, total, new[:size])
        _step(recorded[start:stop], server_lr, recorded_aggregate[start:stop], following[:size])
        for g in range(len(ahead)):
            x, y, z = ahead[g, start:stop], now[g, start:stop], then[g, start:stop]
            _vector(new[:size], following[:size], y, z, beta, gamma, x)
            for n in range(len(pool)):
                if asked[g, n]:
                    shared[number, g, n] = dot(pool[n, start:stop], x)
        for i in range(k):
            x = ahead[which[i], start:stop]
            for n in range(num_pairs):
                parts[number, i, n] = dot(delta_g[clients[i], n, start:stop], x)


_VECTOR, _MATRIX, _PAIRS_OF_ALL = "float32[::1]", "float32[:, ::1]", "float32[:, :, ::1]"
_INTEGERS, _INDICES, _SUMS = "int64[::1]", "int64[:, ::1]", "float64[:, :, ::1]"


@lru_cache(maxsize=1)
def compiled() -> dict[str, Callable[..., None]]:
    """Compile everything, or load it from numba's cache; return it by name."""
    signatures: dict[Any, str] = {
        _combine: (
            f"void({_MATRIX}, {_MATRIX}, float32, boolean, {_MATRIX}, {_INTEGERS}, "
            f"{_VECTOR}, {_MATRIX}, {_INDICES}, {_MATRIX}, {_PAIRS_OF_ALL}, {_INTEGERS}, "
            f"{_MATRIX}, int32[:, ::1], {_MATRIX}, boolean, int8[:, ::1], {_MATRIX}, {_VECTOR}, "
            f"{_INDICES}, {_INTEGERS}, "
            f"{_VECTOR}, {_VECTOR}, float32, {_VECTOR}, {_VECTOR}, {_MATRIX}, {_MATRIX}, float32, "
            f"float32, {_MATRIX}, {_SUMS}, boolean[:, ::1], {_SUMS}, int64, int64)"
        ),
        _vectors_of: (
            f"void({_VECTOR}, {_VECTOR}, {_MATRIX}, {_MATRIX}, float32, float32, {_MATRIX})"
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
    anchors: tuple[_Float32, float] | None = None,
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
        own: Their coefficients, shape (k, s). Without pairs, s = 0, there have to be anchors.
        out: Shape (k, d), written.
        num_threads: Threads to share the columns; the result does not depend on it.
        anchors: Vectors a of all clients, shape (c, d), and a number b: it starts from
            `a + b * updates` in place of `updates`.

    Returns:
        The largest magnitude of each row of `out`, shape (k,); NaN where there is one.
    """
    arrays = (updates, vectors, which, sigma, pool, slots, of_pool, delta_g, clients, own)
    rule = (_NOTHING, *tables(1, 0), _NOTHING)
    following = (_NOTHING, 0.0, _NOTHING, _NOTHING, _NO_ROWS, _NO_ROWS, 0.0, 0.0)
    sums = np.empty((0, 0, 0))
    rest = (*_NO_CODES, *rule, *following, _NO_ROWS, sums, np.empty((0, 0), np.bool_), sums)
    return _pass(arrays, anchors, out, False, rest, num_threads)


def reduce(
    updates: _Float32 | tuple[npt.NDArray[np.int8], _Float32],
    vectors: _Float32,
    which: _Int64,
    sigma: _Float32,
    pool: _Float32,
    slots: _Int64,
    of_pool: _Float32,
    delta_g: _Float32,
    clients: _Int64,
    own: _Float32,
    factors: _Float32,
    num_trim: int,
    following: Following,
    num_threads: int,
    anchors: tuple[_Float32, float] | None = None,
) -> Reduced:
    """Aggregate what `combine` writes, without writing it, and look ahead to the next round.

    While a block of columns is in the cache, its rows are aggregated, and `delta_g` is multiplied
    with what `vectors` is going to be in the next round: so `delta_g` is read once a round.

    Args:
        updates: As in `combine`, like the others that are not named here; or whole numbers, shape
            (k, d), and what 64 of them are multiplied with at a time, shape (k, d / 64).
        vectors: Shape (g, d).
        which: Shape (k,).
        sigma: Shape (k,).
        pool: Shape (b, d).
        slots: Shape (k, s).
        of_pool: Shape (k, s).
        delta_g: Shape (c, s, d).
        clients: Shape (k,).
        own: Shape (k, s).
        factors: What rows are multiplied with and added up, shape (k,); or empty, for
        num_trim: the mean of every column without so many of its smallest and largest values, of at
            least 192 columns.
        following: What is known of the next round.
        num_threads: Threads to share the columns; the result does not depend on it.
        anchors: Where rows start.
    """
    (k, s), d = own.shape, vectors.shape[1]
    codes = updates if isinstance(updates, tuple) else _NO_CODES
    rows = _NO_ROWS if isinstance(updates, tuple) else updates
    arrays = (rows, vectors, which, sigma, pool, slots, of_pool, delta_g, clients, own)
    aggregate, ahead = np.empty(d, np.float32), np.empty_like(vectors)
    parts = np.empty((num_blocks(d), k, s), np.float64)
    asked = np.zeros((len(vectors), len(pool)), np.bool_)
    asked[which[:, None], slots] = True
    shared = np.zeros((num_blocks(d), *asked.shape), np.float64)
    rule = (factors, *tables(k, num_trim), aggregate)
    rest = (*codes, *rule, *following, ahead, parts, asked, shared)
    largest = _pass(arrays, anchors, _NO_ROWS, True, rest, num_threads)
    return Reduced(aggregate, largest, ahead, parts.sum(axis=0), shared.sum(axis=0))


def _pass(
    arrays: tuple[Any, ...],
    anchors: tuple[_Float32, float] | None,
    out: _Float32,
    reduces: bool,
    rest: tuple[Any, ...],
    num_threads: int,
) -> _Float32:
    """Call the kernel for all blocks; return the largest magnitude of each row."""
    kernel, (updates, *others) = compiled()["_combine"], arrays
    start, weight = (updates, 0.0) if anchors is None else anchors
    vectors, clients = arrays[1], arrays[8]
    blocks = num_blocks(vectors.shape[1])
    largest = np.empty((blocks, len(clients)), np.int32)
    given = (updates, start, weight, anchors is not None, *others, largest, out, reduces, *rest)
    share(lambda part: kernel(*given, *part), blocks, num_threads)
    highest: _Float32 = largest.max(axis=0).view(np.float32)
    return highest


def vectors_of(
    weights: _Float32,
    recorded: _Float32,
    now: _Float32,
    then: _Float32,
    beta: float,
    gamma: float,
) -> _Float32:
    """Return `gamma * ((weights - now) - beta * (recorded - then))`, shape (g, d).

    Args:
        weights: Global weights, shape (d,).
        recorded: Recorded weights, shape (d,).
        now: Models, shape (g, d).
        then: Recorded models, shape (g, d).
        beta: A number.
        gamma: A number.
    """
    out = np.empty_like(now)
    compiled()["_vectors_of"](weights, recorded, now, then, beta, gamma, out)
    return out
