"""The middle mean on a CPU: a selection network over blocks of columns, compiled by numba.

Loads, stores, minima and maxima are written as vectors of 8 columns. Left to itself, LLVM makes
masked stores of "store the smaller one", which take ten times as long on some processors.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from fedrec.functional.kernels._threads import share
from fedrec.functional.kernels.selection_network import (
    GROUP,
    SORT_GROUP,
    Comparator,
    selection_network,
)

__all__ = [
    "FAST",
    "LANES",
    "WIDTH",
    "address",
    "compile_all",
    "middle_mean",
    "middle_mean_blocks",
    "tables",
]

_log = logging.getLogger(__name__)

#: Columns of a block. 100 rows of them fit the second-level cache twice, and a row is long enough
#: for the memory to stream.
WIDTH = 192

#: Sums may be reordered and multiplications fused with additions; NaN and infinity go their ways.
FAST = frozenset({"reassoc", "contract"})

#: Columns of a vector.
LANES = 8
_LINE = 16  # float32 values of a cache line
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_DOUBLES = ir.VectorType(ir.DoubleType(), LANES)

_Float32 = npt.NDArray[np.float32]

_inline: Any = register_jitable


def address(context: Any, builder: Any, kind: Any, array: Any, *offsets: Any) -> Any:
    """Return where a vector starts, counted in values from the start of the array."""
    pointer = cgutils.create_struct_proxy(kind)(context, builder, array).data
    for offset in offsets:
        pointer = builder.gep(pointer, [offset])
    return builder.bitcast(pointer, _FLOATS.as_pointer())


def _extremum(builder: Any, name: str, a: Any, b: Any) -> Any:
    # Values are finite, and which zero is which does not matter: one instruction each.
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_FLOATS, [_FLOATS, _FLOATS]), f"llvm.{name}.v{LANES}f32"
    )
    return builder.call(function, [a, b], fastmath=("nnan", "nsz"))


def _network(num_rows: int, comparators: Sequence[Comparator]) -> Any:
    """Return a function that takes rows through a fixed network, in registers.

    Row r is read at `source[start + r * stride]` and written at `target[start + r * stride]`.
    """

    def network(  # type: ignore[no-untyped-def]
        typing_context, source, start, stride, target, target_start, target_stride
    ):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            source, start, stride, target, target_start, target_stride = arguments
            index = start.type

            def place(row: int, column: Any) -> tuple[Any, Any]:
                return tuple(
                    address(
                        context, builder, kind, array, first, builder.mul(step, index(row)), column
                    )
                    for kind, array, first, step in (
                        (signature.args[0], source, start, stride),
                        (signature.args[3], target, target_start, target_stride),
                    )
                )

            def body(column: Any) -> None:
                places = [place(row, column) for row in range(num_rows)]
                values = [builder.load(read, align=4) for read, _ in places]
                for i, j in comparators:
                    a, b = values[i], values[j]
                    values[i] = _extremum(builder, "minnum", a, b)
                    values[j] = _extremum(builder, "maxnum", a, b)
                for value, (_, write) in zip(values, places, strict=True):
                    builder.store(value, write, align=4)

            if num_rows <= 2:
                for column in range(0, WIDTH, LANES):
                    body(index(column))
            else:
                with cgutils.for_range_slice(
                    builder, index(0), index(WIDTH), index(LANES), index
                ) as (column, _):
                    body(column)
            return context.get_dummy_value()

        integer = types.intp
        return types.void(source, integer, integer, target, integer, integer), generate

    return intrinsic(network)


_copy = _network(1, [])
_compare = _network(2, [(0, 1)])
_sort_group = _network(GROUP, SORT_GROUP)


def _generate_prefetch(typing_context, source, start):  # type: ignore[no-untyped-def]
    """Ask for a row of a block, so that it is in the second-level cache when its turn comes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, start = arguments
        flag, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag]),
            "llvm.prefetch.p0",
        )
        for column in range(0, WIDTH, _LINE):
            place = address(context, builder, signature.args[0], source, start, start.type(column))
            read, second_level, data = flag(0), flag(2), flag(1)
            builder.call(function, [builder.bitcast(place, pointer), read, second_level, data])
        return context.get_dummy_value()

    return types.void(source, types.intp), generate


def _generate_mean(typing_context, source, rows, target, start):  # type: ignore[no-untyped-def]
    """Write the mean of the rows that start at `rows`, summed in float64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, rows, target, start = arguments
        index = start.type
        rows = cgutils.create_struct_proxy(signature.args[1])(context, builder, rows)
        count = cgutils.unpack_tuple(builder, rows.shape, 1)[0]
        divisor = builder.sitofp(count, ir.DoubleType())
        lanes = ir.Constant(_DOUBLES, ir.Undefined)
        for lane in range(LANES):
            lanes = builder.insert_element(lanes, divisor, ir.IntType(32)(lane))
        total = cgutils.alloca_once(builder, _DOUBLES)
        with cgutils.for_range_slice(builder, index(0), index(WIDTH), index(LANES), index) as (
            column,
            _,
        ):
            builder.store(ir.Constant(_DOUBLES, [0.0] * LANES), total)
            with cgutils.for_range(builder, count) as loop:
                row = builder.load(builder.gep(rows.data, [loop.index]))
                place = address(context, builder, signature.args[0], source, row, column)
                value = builder.fpext(builder.load(place, align=4), _DOUBLES)
                builder.store(builder.fadd(builder.load(total), value), total)
            mean = builder.fptrunc(builder.fdiv(builder.load(total), lanes), _FLOATS)
            place = address(context, builder, signature.args[2], target, start, column)
            builder.store(mean, place, align=4)
        return context.get_dummy_value()

    return types.void(source, rows, target, types.intp), generate


_prefetch: Any = intrinsic(_generate_prefetch)
_mean: Any = intrinsic(_generate_mean)


@_inline
def middle_mean_blocks(  # type: ignore[no-untyped-def]
    values, num_rows, num_columns, network, kept, first_block, last_block, out
):
    """Reduce blocks of columns; what is read next is asked for while the network runs."""
    block = np.empty(num_rows * WIDTH, np.float32)
    grouped = num_rows // GROUP * GROUP
    for number in range(first_block, last_block):
        # The last block overlaps the one before: the same values are written twice.
        start = min(number * WIDTH, num_columns - WIDTH)
        following = min(start + WIDTH, num_columns - WIDTH)
        for row in range(0, grouped, GROUP):
            _sort_group(values, row * num_columns + start, num_columns, block, row * WIDTH, WIDTH)
        for row in range(grouped, num_rows):
            _copy(values, row * num_columns + start, 0, block, row * WIDTH, 0)
        for row in range(num_rows):
            _prefetch(values, row * num_columns + following)
            for step in range(len(network) * row // num_rows, len(network) * (row + 1) // num_rows):
                smaller, larger = network[step, 0] * WIDTH, network[step, 1] * WIDTH
                _compare(block, smaller, larger - smaller, block, smaller, larger - smaller)
        _mean(block, kept, out, start)


def compile_kernel(
    function: Callable[..., None], signature: str, fastmath: Collection[str] = ()
) -> Callable[..., None]:
    """Compile a function that leaves Python's lock, or load it from numba's cache."""
    options: Any = {"nogil": True, "fastmath": set(fastmath)}
    compiled: Any
    # numba names the file of its cache by this, and looks at the function's own file alone.
    function.__qualname__ = f"{function.__name__}_{_digest()}"
    try:
        compiled = numba.njit(signature, cache=True, **options)(function)
        is_new = bool(compiled.stats.cache_misses)
    except (OSError, RuntimeError):  # nowhere to write, or a full disk
        compiled, is_new = numba.njit(signature, **options)(function), True
    if is_new:
        _say_once()
    kernel: Callable[..., None] = compiled
    return kernel


@lru_cache(maxsize=1)
def _digest() -> str:
    """Return a digest of all kernels: constants and functions of others are compiled into one."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


@lru_cache(maxsize=1)
def _say_once() -> None:
    _log.info("Compiling for this processor, once, in a few seconds.")


def compile_all(
    signatures: Mapping[Any, Any], fastmath: Collection[str] = ()
) -> dict[str, Callable[..., None]]:
    """Compile functions with these signatures; return them by name."""
    return {f.__name__: compile_kernel(f, s, fastmath) for f, s in signatures.items()}


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., None]:
    signature = (
        "void(float32[::1], int64, int64, int64[:, ::1], int64[::1], int64, int64, float32[::1])"
    )
    return compile_kernel(middle_mean_blocks, signature)


@lru_cache(maxsize=64)
def tables(num_rows: int, num_trim: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the network of `middle_mean_blocks`, and which of its rows are kept."""
    network, kept = selection_network(num_rows, num_trim)
    return (
        np.array(network, dtype=np.int64).reshape(-1, 2),
        np.array(kept, dtype=np.int64) * WIDTH,
    )


def middle_mean(values: _Float32, num_trim: int, out: _Float32, num_threads: int) -> None:
    """Average every column without its `num_trim` smallest and largest values.

    Args:
        values: C-contiguous, shape (m, d), d at least `WIDTH`.
        num_trim: Entries removed at each end, k, with 2k < m.
        out: Shape (d,).
        num_threads: Threads to share the columns; the result does not depend on it.
    """
    rows, columns = values.shape
    network, kept = tables(rows, num_trim)
    compiled = _compiled()
    flat = values.reshape(-1)

    blocks = -(-columns // WIDTH)
    share(
        lambda part: compiled(flat, rows, columns, network, kept, *part, out), blocks, num_threads
    )
