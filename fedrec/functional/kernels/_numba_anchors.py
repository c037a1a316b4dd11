"""What a round in which clients were asked tells an anchored estimate, compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fedrec.functional.kernels._numba_kernels import FAST, compile_all
from fedrec.functional.kernels._threads import share

__all__ = ["compiled", "move"]

# Columns of a block: what a client reads of it stays in the first-level cache.
_WIDTH = 1024
# Where the products of four vectors are in a row of ten.
_PLACES = np.array([[0, 1, 2, 3], [1, 4, 5, 6], [2, 5, 7, 8], [3, 6, 8, 9]])

_Float32 = npt.NDArray[np.float32]
_Float64 = npt.NDArray[np.float64]
_Int64 = npt.NDArray[np.int64]


def _move(  # type: ignore[no-untyped-def]
    exact, updates, anchors, recorded, clients, vectors, which, sigma, pool, slots, of_pool,
    delta_g, own, beta, gamma, gains, parts, errors, first, last_block,
):  # fmt: skip
    d, num_pairs = vectors.shape[1], own.shape[2]
    now, then = np.empty(_WIDTH, np.float32), np.empty(_WIDTH, np.float32)
    of_now, of_then = np.empty(_WIDTH, np.float32), np.empty(_WIDTH, np.float32)
    for number in range(first, last_block):
        start = number * _WIDTH
        stop = min(start + _WIDTH, d)
        for i in range(len(clients)):
            client = clients[i]
            e, a = exact[i, start:stop], anchors[client, start:stop]
            u, u0 = updates[i, start:stop], recorded[client, start:stop]
            x, y = vectors[which[i, 0], start:stop], vectors[which[i, 1], start:stop]
            scale = sigma[i]
            # Loops that write to one vector each, or they are not vectorized.
            for j in range(stop - start):
                now[j] = e[j] - a[j]
            for j in range(stop - start):
                then[j] = u[j] - u0[j]
            for j in range(stop - start):
                of_now[j] = scale * x[j]
            for j in range(stop - start):
                of_then[j] = scale * y[j]
            for n in range(num_pairs):
                s, z = pool[slots[i, n], start:stop], delta_g[client, n, start:stop]
                b0, c0 = of_pool[i, 0, n], own[i, 0, n]
                b1, c1 = of_pool[i, 1, n], own[i, 1, n]
                for j in range(stop - start):
                    of_now[j] += b0 * s[j] + c0 * z[j]
                for j in range(stop - start):
                    of_then[j] += b1 * s[j] + c1 * z[j]
            p0: Any = np.float32(0)
            p1, p2, p3, p4, p5, p6, p7, p8, p9 = p0, p0, p0, p0, p0, p0, p0, p0, p0
            for j in range(stop - start):
                g, b, h, k = now[j], then[j], of_now[j], of_then[j]
                p0 += g * g
                p1 += g * b
                p2 += g * h
                p3 += g * k
                p4 += b * b
                p5 += b * h
                p6 += b * k
                p7 += h * h
                p8 += h * k
                p9 += k * k
            products = parts[number, i]
            products[0], products[1], products[2], products[3], products[4] = p0, p1, p2, p3, p4
            products[5], products[6], products[7], products[8], products[9] = p5, p6, p7, p8, p9
            error = errors[i, start:stop]
            for j in range(stop - start):
                error[j] = now[j] - beta * then[j] - gamma * (of_now[j] - beta * of_then[j])
            rest = np.float32(1) - gains[i]
            if rest > 0:
                for j in range(stop - start):
                    a[j] = e[j] - rest * now[j]
                for j in range(stop - start):
                    u0[j] = u[j] - rest * then[j]
            else:
                for j in range(stop - start):
                    a[j] = e[j]
                for j in range(stop - start):
                    u0[j] = u[j]


_MATRIX, _VECTOR, _INTEGERS = "float32[:, ::1]", "float32[::1]", "int64[::1]"
_TENSOR, _INDICES = "float32[:, :, ::1]", "int64[:, ::1]"


@lru_cache(maxsize=1)
def compiled() -> dict[str, Callable[..., None]]:
    """Compile everything, or load it from numba's cache; return it by name."""
    signatures: dict[Any, str] = {
        _move: (
            f"void({_MATRIX}, {_MATRIX}, {_MATRIX}, {_MATRIX}, {_INTEGERS}, {_MATRIX}, "
            f"{_INDICES}, {_VECTOR}, {_MATRIX}, {_INDICES}, {_TENSOR}, {_TENSOR}, {_TENSOR}, "
            f"float32, float32, {_VECTOR}, float64[:, :, ::1], {_MATRIX}, int64, int64)"
        ),
    }
    return compile_all(signatures, FAST)


def move(
    exact: _Float32,
    updates: _Float32,
    anchors: _Float32,
    recorded: _Float32,
    clients: _Int64,
    vectors: _Float32,
    which: _Int64,
    sigma: _Float32,
    pool: _Float32,
    slots: _Int64,
    of_pool: _Float32,
    delta_g: _Float32,
    own: _Float32,
    beta: float,
    gamma: float,
    gains: _Float32,
    errors: _Float32,
    num_threads: int,
) -> _Float64:
    """Multiply how far averages are off, and move them.

    All arrays are C-contiguous.

    Args:
        exact: What clients sent, shape (k, d).
        updates: What they had sent in the recording, shape (k, d).
        anchors: Averages of what clients sent, of all of them, shape (c, d); written.
        recorded: Averages of what they had sent in the recording, shape (c, d); written.
        clients: Which client each row is, shape (k,).
        vectors: Changes of models that clients share, shape (g, d).
        which: Those of each row, of the recovered and of the recorded model, shape (k, 2).
        sigma: What of a vector is in its product with H, shape (k,).
        pool: Vectors that clients share, shape (b, d).
        slots: Which of them are a client's, shape (k, s).
        of_pool: What of them is in the two products, shape (k, 2, s).
        delta_g: Vectors of the clients' own, shape (c, s, d).
        own: What of them is in the two products, shape (k, 2, s).
        beta: The weight of history.
        gamma: The weight of products.
        gains: How far the averages of each client move, shape (k,).
        errors: How far estimates are off, shape (k, d); written.
        num_threads: Threads to share the columns; the result does not depend on it.

    Returns:
        Products of how far updates and recorded updates were from their averages, and what H says
        of the models now and then, shape (k, 4, 4).
    """
    kernel = compiled()["_move"]
    blocks = -(-vectors.shape[1] // _WIDTH)
    parts = np.empty((blocks, len(clients), 10), np.float64)
    arrays = (exact, updates, anchors, recorded, clients, vectors, which, sigma, pool)
    more = (slots, of_pool, delta_g, own, beta, gamma, gains, parts, errors)
    share(lambda part: kernel(*arrays, *more, *part), blocks, num_threads)
    products: _Float64 = parts.sum(axis=0)[:, _PLACES]
    return products
