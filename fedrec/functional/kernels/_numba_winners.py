"""Convolutions followed by max-pooling, by the positions that win, compiled by numba.

Of all outputs of the convolution only the winners of a pooling window carry a gradient, and of
those a ReLU leaves about half. So nothing of the convolution's own size is kept, and the backward
passes go from winner to winner.

Images are channels last: a kernel's row is one run of numbers in memory, `kernel_width * channels`
of them. The sums over such runs are written as vectors, for LLVM would load and store each sum
again for each winner instead of keeping it in a register. Runs are cut into tiles of 96, 64, 32
and 16 numbers; what a tile reads or adds beyond its run is of no consequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from fedrec.functional.kernels._numba_kernels import FAST, compile_all

__all__ = ["compiled"]

_LANES = 16
_VECTOR = ir.VectorType(ir.FloatType(), _LANES)
# Numbers of a tile, and into how many sums each is added in turn: six vectors or so are in flight
# at a time, since a fused multiplication and addition takes four cycles and two begin in each.
_SUMS = {96: 1, 64: 1, 32: 3, 16: 4}
_WIDEST = max(_SUMS)

_Array = npt.NDArray[Any]


def _address(context: Any, builder: Any, kind: Any, array: Any, *offsets: Any) -> Any:
    pointer = cgutils.create_struct_proxy(kind)(context, builder, array).data
    for offset in offsets:
        pointer = builder.gep(pointer, [offset])
    return pointer


def _load(builder: Any, pointer: Any, lane: int) -> Any:
    place = builder.gep(pointer, [ir.IntType(64)(lane)])
    return builder.load(builder.bitcast(place, _VECTOR.as_pointer()), align=4)


def _store(builder: Any, value: Any, pointer: Any, lane: int) -> None:
    place = builder.gep(pointer, [ir.IntType(64)(lane)])
    builder.store(value, builder.bitcast(place, _VECTOR.as_pointer()), align=4)


def _splat(builder: Any, number: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
    return builder.shuffle_vector(first, undefined, zeros)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{_LANES}f32"
    )
    return builder.call(function, [a, b, c])


def _summing(width: int) -> Any:
    """Return `total[t:] += sum over j of factors[j] * x[start + places[j]:]` of so many numbers."""

    def add(typing_context, total, t, x, start, factors, places, count):  # type: ignore[no-untyped-def]
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            total, t, x, start, factors, places, count = arguments
            kinds = signature.args
            index = t.type
            into = _address(context, builder, kinds[0], total, t)
            source = _address(context, builder, kinds[2], x, start)
            all_factors = _address(context, builder, kinds[4], factors)
            all_places = _address(context, builder, kinds[5], places)
            lanes, turns = range(0, width, _LANES), _SUMS[width]
            sums = [[cgutils.alloca_once(builder, _VECTOR) for _ in lanes] for _ in range(turns)]
            for turn, own in enumerate(sums):
                for lane, place in zip(lanes, own, strict=True):
                    zero = ir.Constant(_VECTOR, [0.0] * _LANES)
                    builder.store(_load(builder, into, lane) if turn == 0 else zero, place)

            def one(j: Any, own: Sequence[Any]) -> None:
                factor = _splat(builder, builder.load(builder.gep(all_factors, [j])))
                run = builder.gep(source, [builder.load(builder.gep(all_places, [j]))])
                for lane, place in zip(lanes, own, strict=True):
                    value = _fma(builder, factor, _load(builder, run, lane), builder.load(place))
                    builder.store(value, place)

            whole = builder.mul(builder.sdiv(count, index(turns)), index(turns))
            zero, step = index(0), index(turns)
            with cgutils.for_range_slice(builder, zero, whole, step, index) as (j, _):
                for turn, own in enumerate(sums):
                    one(builder.add(j, index(turn)), own)
            if turns > 1:
                with cgutils.for_range_slice(builder, whole, count, index(1), index) as (j, _):
                    one(j, sums[0])
            for place, *others in zip(*sums, strict=True):
                for other in others:
                    both = builder.fadd(builder.load(place), builder.load(other))
                    builder.store(both, place)
            for lane, place in zip(lanes, sums[0], strict=True):
                _store(builder, builder.load(place), into, lane)
            return context.get_dummy_value()

        size = types.intp
        return types.void(total, size, x, size, factors, places, size), generate

    return intrinsic(add)


def _spreading(width: int) -> Any:
    """Return `total[start + places[j]:] += factors[j] * w[first:]` for all j, for so many."""

    def add(typing_context, total, start, w, first, factors, places, count):  # type: ignore[no-untyped-def]
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            total, start, w, first, factors, places, count = arguments
            kinds = signature.args
            into = _address(context, builder, kinds[0], total, start)
            source = _address(context, builder, kinds[2], w, first)
            all_factors = _address(context, builder, kinds[4], factors)
            all_places = _address(context, builder, kinds[5], places)
            lanes = range(0, width, _LANES)
            weights = [_load(builder, source, lane) for lane in lanes]
            with cgutils.for_range(builder, count) as loop:
                factor = _splat(builder, builder.load(builder.gep(all_factors, [loop.index])))
                run = builder.gep(into, [builder.load(builder.gep(all_places, [loop.index]))])
                for lane, weight in zip(lanes, weights, strict=True):
                    value = _fma(builder, factor, weight, _load(builder, run, lane))
                    _store(builder, value, run, lane)
            return context.get_dummy_value()

        size = types.intp
        return types.void(total, size, w, size, factors, places, size), generate

    return intrinsic(add)


_add_96, _add_64, _add_32, _add_16 = (_summing(width) for width in _SUMS)
_put_96, _put_64, _put_32, _put_16 = (_spreading(width) for width in _SUMS)
_inline: Any = register_jitable


@_inline
def _add(width, total, t, x, start, factors, places, count):  # type: ignore[no-untyped-def]
    if width == 96:
        _add_96(total, t, x, start, factors, places, count)
    elif width == 64:
        _add_64(total, t, x, start, factors, places, count)
    elif width == 32:
        _add_32(total, t, x, start, factors, places, count)
    else:
        _add_16(total, t, x, start, factors, places, count)


@_inline
def _put(width, total, start, w, first, factors, places, count):  # type: ignore[no-untyped-def]
    if width == 96:
        _put_96(total, start, w, first, factors, places, count)
    elif width == 64:
        _put_64(total, start, w, first, factors, places, count)
    elif width == 32:
        _put_32(total, start, w, first, factors, places, count)
    else:
        _put_16(total, start, w, first, factors, places, count)


@_inline
def _copy_padded(image, top, left, padded_row, into):  # type: ignore[no-untyped-def]
    """Copy an image of rows into one with a margin, whose margin is zero already."""
    height, row = image.shape
    for i in range(height):
        start = (top + i) * padded_row + left
        for j in range(row):
            into[start + j] = image[i, j]


@_inline
def _pool_rows(y, first, last, geometry, slope, before, out, codes):  # type: ignore[no-untyped-def]
    """Pool some rows of windows of one image; `y` has shape (height, width, channels or more)."""
    pool_height, pool_width, step_down, step_right, top, left, height, width = geometry
    channels = out.shape[2]
    which = np.empty(channels, np.int32)
    for i in range(first, last):
        for j in range(out.shape[1]):
            best, code = out[i, j], codes[i, j]
            begun = False
            for q in range(pool_height * pool_width):
                r = i * step_down - top + q // pool_width
                s = j * step_right - left + q % pool_width
                if r < 0 or r >= height or s < 0 or s >= width:
                    continue
                row = y[r, s]
                if not begun:
                    begun = True
                    for c in range(channels):
                        v = row[c]
                        if before:
                            v = v if v > 0 or v != v else v * slope
                        best[c] = v
                        which[c] = q
                else:
                    for c in range(channels):
                        v = row[c]
                        if before:
                            v = v if v > 0 or v != v else v * slope
                        # As torch: the first of equal values, and any that is not a number.
                        wins = v > best[c] or v != v
                        best[c] = v if wins else best[c]
                        which[c] = np.int32(q) if wins else which[c]
            for c in range(channels):
                v = best[c]
                low = v <= 0
                code[c] = which[c] + (128 if low else 0)
                if not before:
                    scaled = v * slope if slope != 0 else np.float32(0)
                    best[c] = scaled if low else v


def _pool(y, geometry, slope, before, out, codes, first, last):  # type: ignore[no-untyped-def]
    for a in range(first, last):
        _pool_rows(y[a], 0, out.shape[1], geometry, slope, before, out[a], codes[a])


def _convolve_and_pool(  # type: ignore[no-untyped-def]
    x, weight, bias, convolution, geometry, slope, before, tiles, out, codes, first, last
):
    kernel_height, kernel_row, step_down, step_right, top, left, padded_height, padded_row = (
        convolution
    )
    height, width = geometry[6:8]
    size = kernel_height * kernel_row
    padded = np.zeros(padded_height * padded_row + _WIDEST, np.float32)
    y = np.empty((height, width, len(bias)), np.float32)
    flat, flat_weight = y.reshape(-1), weight.reshape(-1)
    patch, places = np.empty(size, np.float32), np.arange(size) * len(bias)
    for a in range(first, last):
        _copy_padded(x[a], top, left, padded_row, padded)
        done = 0
        for i in range(out.shape[1]):
            # The rows that this row of windows sees and the one before does not.
            end = min(i * geometry[2] - geometry[4] + geometry[0], height)
            for r in range(done, end):
                for s in range(width):
                    start = r * step_down * padded_row + s * step_right
                    for k in range(kernel_height):
                        for e in range(kernel_row):
                            patch[k * kernel_row + e] = padded[start + k * padded_row + e]
                    place = (r * width + s) * len(bias)
                    for c in range(len(bias)):
                        flat[place + c] = bias[c]
                    for t in range(len(tiles)):
                        at = tiles[t, 0]
                        _add(tiles[t, 1], flat, place + at, flat_weight, at, patch, places, size)
            done = max(done, end)
            _pool_rows(y, i, i + 1, geometry, slope, before, out[a], codes[a])


@_inline
def _winners(g, codes, channel, origins, slope, factors, places):  # type: ignore[no-untyped-def]
    """List the gradients of one channel that are not zero, and where what they meet begins."""
    count = 0
    for position in range(len(g)):
        code = codes[position, channel]
        v = g[position, channel]
        v = v * slope if code >= 128 else v
        factors[count] = v
        places[count] = origins[position, code & 127]
        count += 1 if v != 0 else 0
    return count


def _weight_gradients(  # type: ignore[no-untyped-def]
    x, g, codes, origins, convolution, slope, tiles, weights, biases, first, last
):
    kernel_height, _, _, _, top, left, padded_height, padded_row = convolution
    channels, row = weights.shape[1], weights.shape[2] // kernel_height
    padded = np.zeros(padded_height * padded_row + _WIDEST, np.float32)
    factors, places = np.empty(len(origins), np.float32), np.empty(len(origins), np.int64)
    per_client = len(x) // len(weights)
    for client in range(first, last):
        total, total_bias = weights[client].reshape(-1), biases[client]
        total[:] = 0
        total_bias[:] = 0
        for a in range(client * per_client, (client + 1) * per_client):
            _copy_padded(x[a], top, left, padded_row, padded)
            for c in range(channels):
                count = _winners(g[a], codes[a], c, origins, slope, factors, places)
                part = 0.0
                for j in range(count):
                    part += factors[j]
                total_bias[c] += part
                for k in range(kernel_height):
                    into = (c * kernel_height + k) * row
                    for t in range(len(tiles)):
                        at = tiles[t, 0]
                        start = k * padded_row + at
                        _add(tiles[t, 1], total, into + at, padded, start, factors, places, count)


def _input_gradients(  # type: ignore[no-untyped-def]
    g, codes, origins, convolution, slope, tiles, weight, out, first, last
):
    kernel_height, _, _, _, top, left, padded_height, padded_row = convolution
    channels, row = weight.shape[0], weight.shape[1] // kernel_height
    padded = np.empty(padded_height * padded_row + _WIDEST, np.float32)
    factors, places = np.empty(len(origins), np.float32), np.empty(len(origins), np.int64)
    flat = weight.reshape(-1)
    for a in range(first, last):
        padded[:] = 0
        for c in range(channels):
            count = _winners(g[a], codes[a], c, origins, slope, factors, places)
            for k in range(kernel_height):
                for t in range(len(tiles)):
                    at = tiles[t, 0]
                    of_weight = (c * kernel_height + k) * row + at
                    start = k * padded_row + at
                    _put(tiles[t, 1], padded, start, flat, of_weight, factors, places, count)
        image = out[a]
        for i in range(image.shape[0]):
            start = (top + i) * padded_row + left
            for j in range(image.shape[1]):
                image[i, j] = padded[start + j]


@lru_cache(maxsize=1)
def compiled() -> dict[str, Callable[..., None]]:
    """Compile everything, or load it from numba's cache; return it by name."""
    eight = "UniTuple(int64, 8)"
    image, values, codes = "float32[:, :, ::1]", "float32[:, :, :, ::1]", "uint8[:, :, :, ::1]"
    listed = "float32[:, :, :], uint8[:, :, ::1], int64[:, ::1]"
    tiles, matrix, stack = "int64[:, ::1]", "float32[:, ::1]", "float32[:, :, ::1]"
    signatures: dict[Any, str] = {
        _pool: f"void({values}, {eight}, float32, boolean, {values}, {codes}, int64, int64)",
        _convolve_and_pool: (
            f"void({image}, {matrix}, float32[::1], {eight}, {eight}, float32, boolean, {tiles}, "
            f"{values}, {codes}, int64, int64)"
        ),
        _weight_gradients: (
            f"void({image}, {listed}, {eight}, float32, {tiles}, {stack}, float64[:, ::1], "
            "int64, int64)"
        ),
        _input_gradients: (
            f"void({listed}, {eight}, float32, {tiles}, {matrix}, {image}, int64, int64)"
        ),
    }
    return compile_all(signatures, FAST - {"reassoc"})
