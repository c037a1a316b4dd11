"""Products and differences of L-BFGS pairs on a CPU, compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from fedrec.functional.kernels._numba_kernels import FAST, LANES, address, compile_all
from fedrec.functional.kernels._threads import share

__all__ = ["WIDTH", "compiled", "dot", "dots", "end_of", "num_blocks", "push"]

#: Columns of a block, which are added up in float32 before they are in float64. 100 rows of them,
#: with two pairs of each, fit a second-level cache.
WIDTH = 1024
# Columns that `_dot` adds up in float32.
_WIDTH = 4096
# Vectors that are added up beside each other.
_SUMS = 4

_Float32 = npt.NDArray[np.float32]
_Float64 = npt.NDArray[np.float64]
_Int64 = npt.NDArray[np.int64]

_inline: Any = register_jitable


def _generate_dot(typing_context, x, y):  # type: ignore[no-untyped-def]
    """Multiply two vectors, in an order that is written out: the same bits in every kernel."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector, lane = ir.VectorType(ir.FloatType(), LANES), ir.IntType(32)
        array = cgutils.create_struct_proxy(signature.args[0])(context, builder, arguments[0])
        size = cgutils.unpack_tuple(builder, array.shape, 1)[0]
        index, width = size.type, LANES * _SUMS
        whole = builder.sub(size, builder.srem(size, index(width)))
        sums = [cgutils.alloca_once(builder, vector) for _ in range(_SUMS)]
        for each in sums:
            builder.store(ir.Constant(vector, [0.0] * LANES), each)
        with cgutils.for_range_slice(builder, index(0), whole, index(width), index) as (start, _):
            for n, each in enumerate(sums):
                a, b = (
                    builder.load(
                        address(context, builder, kind, given, start, index(n * LANES)), align=4
                    )
                    for kind, given in zip(signature.args, arguments, strict=True)
                )
                builder.store(builder.fadd(builder.load(each), builder.fmul(a, b)), each)
        values = [builder.load(each) for each in sums]
        while len(values) > 1:
            values = [builder.fadd(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
        lanes = [builder.extract_element(values[0], lane(n)) for n in range(LANES)]
        while len(lanes) > 1:
            lanes = [builder.fadd(a, b) for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
        total = cgutils.alloca_once_value(builder, lanes[0])
        data = [
            cgutils.create_struct_proxy(kind)(context, builder, given).data
            for kind, given in zip(signature.args, arguments, strict=True)
        ]
        with cgutils.for_range_slice(builder, whole, size, index(1), index) as (start, _):
            a, b = (builder.load(builder.gep(pointer, [start])) for pointer in data)
            builder.store(builder.fadd(builder.load(total), builder.fmul(a, b)), total)
        return builder.load(total)

    return types.float32(x, y), generate


dot: Any = intrinsic(_generate_dot)


def num_blocks(size: int) -> int:
    """Return the number of blocks of so many columns."""
    return max(size // WIDTH, 1)


@_inline
def end_of(number, count, size):  # type: ignore[no-untyped-def]
    """Return where one of so many blocks ends; the last one has what is left over, too."""
    return size if number == count - 1 else (number + 1) * WIDTH


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
        start, stop = number * WIDTH, end_of(number, len(parts), d)
        for i in range(len(rows)):
            y = matrix[rows[i], start:stop]
            for k in range(which.shape[1]):
                parts[number, i, k] = dot(y, vectors[which[i, k], start:stop])


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
    blocks = num_blocks(vectors.shape[1])
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
