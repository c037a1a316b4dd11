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
_CODE = ir.IntType(32)
# Numbers of a tile, and into how many sums each is added in turn: six vectors or so are in flight
# at a time, since a fused multiplication and addition takes four cycles and two begin in each.
_SUMS = {96: 1, 64: 1, 32: 3, 16: 4}
_WIDEST = max(_SUMS)
# Outputs of a convolution that are computed beside each other, so that a weight is read for all.
_POSITIONS = 6
# Entries of a patch that meet a gradient at a time.
_TAPS = 9
# Added to the number of a window's entry where the winner is not positive.
_LOW = 128

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
    undefined = ir.Constant(ir.VectorType(number.type, _LANES), ir.Undefined)
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


def _generate_convolution(  # type: ignore[no-untyped-def]
    typing_context, y, place, step, weight, column, num_columns, bias, x, start, shift, places, size
):
    """Compute 16 channels of `_POSITIONS` outputs of a convolution that lie beside each other."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        y, place, step, weight, column, num_columns, bias, x, start, shift, places, size = arguments
        kinds = signature.args
        index = place.type
        into = _address(context, builder, kinds[0], y, place, column)
        weights = _address(context, builder, kinds[3], weight, column)
        source = _address(context, builder, kinds[7], x, start)
        all_places = _address(context, builder, kinds[10], places)
        sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(_POSITIONS)]
        first = _load(builder, _address(context, builder, kinds[6], bias, column), 0)
        for total in sums:
            builder.store(first, total)
        with cgutils.for_range(builder, size) as loop:
            value = _load(builder, builder.gep(weights, [builder.mul(loop.index, num_columns)]), 0)
            entry = builder.gep(source, [builder.load(builder.gep(all_places, [loop.index]))])
            for position, total in enumerate(sums):
                number = builder.gep(entry, [builder.mul(shift, index(position))])
                factor = _splat(builder, builder.load(number))
                builder.store(_fma(builder, factor, value, builder.load(total)), total)
        for position, total in enumerate(sums):
            row = builder.gep(into, [builder.mul(step, index(position))])
            _store(builder, builder.load(total), row, 0)
        return context.get_dummy_value()

    n = types.intp
    return types.void(y, n, n, weight, n, n, bias, x, n, n, places, n), generate


def _generate_best(  # type: ignore[no-untyped-def]
    typing_context, y, starts, entries, count, column, first_slope, last_slope, best, code
):
    """Find the largest of some rows in 16 columns, and which it is."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        y, starts, entries, count, column, first_slope, last_slope, best, code = arguments
        kinds = signature.args
        source = _address(context, builder, kinds[0], y, column)
        all_starts = _address(context, builder, kinds[1], starts)
        all_entries = _address(context, builder, kinds[2], entries)
        zero, numbers = ir.Constant(_VECTOR, [0.0] * _LANES), ir.VectorType(_CODE, _LANES)

        def sloped(value: Any, slope: Any) -> tuple[Any, Any]:
            """Multiply what is not positive; say where that is."""
            low = builder.fcmp_ordered("<=", value, zero)
            is_zero = _splat(builder, builder.fcmp_ordered("==", slope, slope.type(0)))
            scaled = builder.fmul(value, _splat(builder, slope))
            scaled = builder.select(is_zero, zero, scaled)  # also where it is infinite
            return builder.select(low, scaled, value), low

        def read(k: Any) -> tuple[Any, Any]:
            row = builder.gep(source, [builder.load(builder.gep(all_starts, [k]))])
            value, _ = sloped(_load(builder, row, 0), first_slope)
            return value, _splat(builder, builder.load(builder.gep(all_entries, [k])))

        largest, which = (cgutils.alloca_once(builder, kind) for kind in (_VECTOR, numbers))
        for value, place in zip(read(count.type(0)), (largest, which), strict=True):
            builder.store(value, place)
        one = count.type(1)
        with cgutils.for_range_slice(builder, one, count, one, count.type) as (k, _):
            value, entry = read(k)
            before = builder.load(largest)
            # As torch: the first of equal values, and any that is not a number.
            wins = builder.fcmp_ordered(">", value, before)
            wins = builder.or_(wins, builder.fcmp_unordered("uno", value, value))
            builder.store(builder.select(wins, value, before), largest)
            builder.store(builder.select(wins, entry, builder.load(which)), which)
        value, low = sloped(builder.load(largest), last_slope)
        into = _address(context, builder, kinds[7], best, column)
        _store(builder, value, into, 0)
        flags = builder.select(
            low, ir.Constant(numbers, [_LOW] * _LANES), ir.Constant(numbers, [0] * _LANES)
        )
        bytes_ = ir.VectorType(ir.IntType(8), _LANES)
        codes = builder.trunc(builder.add(builder.load(which), flags), bytes_)
        place = _address(context, builder, kinds[8], code, column)
        builder.store(codes, builder.bitcast(place, bytes_.as_pointer()), align=1)
        return context.get_dummy_value()

    n = types.intp
    return types.void(y, starts, entries, n, n, first_slope, last_slope, best, code), generate


def _generate_products(  # type: ignore[no-untyped-def]
    typing_context, sums, start, g, codes, channel, channels, origins, x, places, first, slope
):
    """Add up the products of 16 channels' gradients and `_TAPS` numbers of a patch in an image.

    The sums of the gradients themselves follow those of the products.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, start, g, codes, channel, channels, origins, x, places, first, slope = arguments
        kinds = signature.args
        index = start.type
        into = _address(context, builder, kinds[0], sums, start)
        gradients = _address(context, builder, kinds[2], g, channel)
        all_codes = _address(context, builder, kinds[3], codes, channel)
        kind = cgutils.create_struct_proxy(kinds[6])(context, builder, origins)
        positions, size = cgutils.unpack_tuple(builder, kind.shape, 2)
        source = _address(context, builder, kinds[7], x)
        all_places = _address(context, builder, kinds[8], places, first)
        zero, numbers = ir.Constant(_VECTOR, [0.0] * _LANES), ir.VectorType(_CODE, _LANES)
        bytes_ = ir.VectorType(ir.IntType(8), _LANES)
        lows = ir.Constant(numbers, [_LOW] * _LANES)
        slopes = _splat(builder, slope)
        taps = [builder.load(builder.gep(all_places, [index(t)])) for t in range(_TAPS)]
        totals = [cgutils.alloca_once(builder, _VECTOR) for _ in range(_TAPS + 1)]
        for t, total in enumerate(totals):
            builder.store(_load(builder, into, t * _LANES), total)
        with cgutils.for_range(builder, positions) as loop:
            at = builder.mul(loop.index, channels)
            value = _load(builder, builder.gep(gradients, [at]), 0)
            place = builder.bitcast(builder.gep(all_codes, [at]), bytes_.as_pointer())
            code = builder.zext(builder.load(place, align=1), numbers)
            low = builder.icmp_unsigned(">=", code, lows)
            value = builder.select(low, builder.fmul(value, slopes), value)
            code = builder.select(low, builder.sub(code, lows), code)
            builder.store(builder.fadd(builder.load(totals[-1]), value), totals[-1])
            row = builder.gep(kind.data, [builder.mul(loop.index, size)])
            with cgutils.for_range(builder, size) as inner:
                entry = builder.trunc(inner.index, _CODE)
                wins = builder.icmp_unsigned("==", code, _splat(builder, entry))
                share = builder.select(wins, value, zero)
                patch = builder.gep(source, [builder.load(builder.gep(row, [inner.index]))])
                for tap, total in zip(taps, totals, strict=False):
                    number = _splat(builder, builder.load(builder.gep(patch, [tap])))
                    builder.store(_fma(builder, number, share, builder.load(total)), total)
        for t, total in enumerate(totals):
            _store(builder, builder.load(total), into, t * _LANES)
        return context.get_dummy_value()

    n = types.intp
    return (
        types.void(sums, n, g, codes, n, n, origins, x, places, n, slope),
        generate,
    )


_add_products: Any = intrinsic(_generate_products)
_find_best: Any = intrinsic(_generate_best)
_convolve: Any = intrinsic(_generate_convolution)
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
def _pool_row(y, i, geometry, slope, before, out, codes):  # type: ignore[no-untyped-def]
    """Pool a row of windows of one image; `y` has shape (height, width, channels or more)."""
    pool_height, pool_width, step_down, step_right, top, left, height, width = geometry
    channels = out.shape[2]
    flat, row = y.reshape(-1), y.shape[1]
    starts = np.empty(pool_height * pool_width, np.int64)
    entries = np.empty(pool_height * pool_width, np.int32)
    some_values, some_codes = np.empty(_LANES, np.float32), np.empty(_LANES, np.uint8)
    first_slope = slope if before else np.float32(1)
    last_slope = np.float32(1) if before else slope
    for j in range(out.shape[1]):
        count = 0
        for q in range(pool_height * pool_width):
            r = i * step_down - top + q // pool_width
            s = j * step_right - left + q % pool_width
            if 0 <= r < height and 0 <= s < width:
                starts[count] = (r * row + s) * y.shape[2]
                entries[count] = q
                count += 1
        best, code = out[i, j], codes[i, j]
        # A vector of its own for few channels, of which some are none.
        few = channels < _LANES
        for c in range(0, channels, _LANES):
            c = 0 if few else min(c, channels - _LANES)  # the last two may overlap
            _find_best(
                flat, starts, entries, count, c, first_slope, last_slope,
                some_values if few else best, some_codes if few else code,
            )  # fmt: skip
        if few:
            for c in range(channels):
                best[c], code[c] = some_values[c], some_codes[c]


def _pool(y, geometry, slope, before, out, codes, first, last):  # type: ignore[no-untyped-def]
    for a in range(first, last):
        for i in range(out.shape[1]):
            _pool_row(y[a], i, geometry, slope, before, out[a], codes[a])


def _convolve_and_pool(  # type: ignore[no-untyped-def]
    x, weight, bias, convolution, geometry, slope, before, out, codes, first, last
):
    kernel_height, kernel_row, step_down, step_right, top, left, padded_height, padded_row = (
        convolution
    )
    height, width = geometry[6:8]
    columns = len(bias)
    groups = -(-width // _POSITIONS)
    padded = np.zeros(padded_height * padded_row + _POSITIONS * step_right, np.float32)
    y = np.empty((height, groups * _POSITIONS, columns), np.float32)
    flat, flat_weight = y.reshape(-1), weight.reshape(-1)
    places = np.empty(kernel_height * kernel_row, np.int64)
    for t in range(len(places)):
        places[t] = t // kernel_row * padded_row + t % kernel_row
    for a in range(first, last):
        _copy_padded(x[a], top, left, padded_row, padded)
        done = 0
        for i in range(out.shape[1]):
            # The rows that this row of windows sees and the one before does not.
            end = min(i * geometry[2] - geometry[4] + geometry[0], height)
            for r in range(done, end):
                for s in range(0, groups * _POSITIONS, _POSITIONS):
                    start = r * step_down * padded_row + s * step_right
                    place = (r * groups * _POSITIONS + s) * columns
                    for c in range(0, columns, _LANES):
                        _convolve(
                            flat, place, columns, flat_weight, c, columns, bias, padded, start,
                            step_right, places, len(places),
                        )  # fmt: skip
            done = max(done, end)
            _pool_row(y, i, geometry, slope, before, out[a], codes[a])


@_inline
def _winners(g, codes, channel, order, origins, slope, factors, places):  # type: ignore[no-untyped-def]
    """List the gradients of one channel that are not zero, and where what they meet begins."""
    count = 0
    for position in order:
        code = codes[position, channel]
        v = g[position, channel]
        v = v * slope if code >= _LOW else v
        factors[count] = v
        places[count] = origins[position, code & (_LOW - 1)]
        count += 1 if v != 0 else 0
    return count


def _weight_gradients(  # type: ignore[no-untyped-def]
    x, g, codes, order, origins, convolution, slope, tiles, weights, biases, first, last
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
                count = _winners(g[a], codes[a], c, order, origins, slope, factors, places)
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


def _small_weight_gradients(  # type: ignore[no-untyped-def]
    x, g, codes, origins, convolution, slope, weights, biases, first, last
):
    """The same for small kernels: all entries of a window, for 16 channels or more at once."""
    _, kernel_row, _, _, top, left, padded_height, padded_row = convolution
    channels, size = weights.shape[1:]
    padded = np.zeros(padded_height * padded_row, np.float32)
    groups, tiles = -(-size // _TAPS), -(-channels // _LANES)
    places = np.empty(groups * _TAPS, np.int64)
    for t in range(len(places)):
        entry = min(t, size - 1)
        places[t] = entry // kernel_row * padded_row + entry % kernel_row
    sums = np.empty((groups, tiles, _TAPS + 1, _LANES), np.float32)
    flat = sums.reshape(-1)
    per_client = len(x) // len(weights)
    for client in range(first, last):
        flat[:] = 0
        total, total_bias = weights[client], biases[client]
        total_bias[:] = 0
        for a in range(client * per_client, (client + 1) * per_client):
            _copy_padded(x[a], top, left, padded_row, padded)
            gradients, of_image = g[a].reshape(-1), codes[a].reshape(-1)
            for group in range(groups):
                for tile in range(tiles):
                    c = min(tile * _LANES, channels - _LANES)  # the last two may overlap
                    start = (group * tiles + tile) * (_TAPS + 1) * _LANES
                    _add_products(
                        flat, start, gradients, of_image, c, channels, origins, padded,
                        places, group * _TAPS, slope,
                    )  # fmt: skip
            for c in range(channels):
                tile = c // _LANES
                lane = c - min(tile * _LANES, channels - _LANES)
                total_bias[c] += sums[0, tile, _TAPS, lane]
            sums[:, :, _TAPS] = 0
        for c in range(channels):
            tile = c // _LANES
            lane = c - min(tile * _LANES, channels - _LANES)
            for t in range(size):
                total[c, t] = sums[t // _TAPS, tile, t % _TAPS, lane]


def _input_gradients(  # type: ignore[no-untyped-def]
    g, codes, order, origins, convolution, slope, tiles, weight, out, first, last
):
    kernel_height, _, _, _, top, left, padded_height, padded_row = convolution
    channels, row = weight.shape[0], weight.shape[1] // kernel_height
    padded = np.empty(padded_height * padded_row + _WIDEST, np.float32)
    factors, places = np.empty(len(origins), np.float32), np.empty(len(origins), np.int64)
    flat = weight.reshape(-1)
    for a in range(first, last):
        padded[:] = 0
        for c in range(channels):
            count = _winners(g[a], codes[a], c, order, origins, slope, factors, places)
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
    listed = "float32[:, :, :], uint8[:, :, ::1], int64[::1], int64[:, ::1]"
    tiles, matrix, stack = "int64[:, ::1]", "float32[:, ::1]", "float32[:, :, ::1]"
    signatures: dict[Any, str] = {
        _pool: f"void({values}, {eight}, float32, boolean, {values}, {codes}, int64, int64)",
        _convolve_and_pool: (
            f"void({image}, {matrix}, float32[::1], {eight}, {eight}, float32, boolean, "
            f"{values}, {codes}, int64, int64)"
        ),
        _weight_gradients: (
            f"void({image}, {listed}, {eight}, float32, {tiles}, {stack}, float64[:, ::1], "
            "int64, int64)"
        ),
        _small_weight_gradients: (
            f"void({image}, {image}, uint8[:, :, ::1], int64[:, ::1], {eight}, float32, "
            f"{stack}, float64[:, ::1], int64, int64)"
        ),
        _input_gradients: (
            f"void({listed}, {eight}, float32, {tiles}, {matrix}, {image}, int64, int64)"
        ),
    }
    return compile_all(signatures, FAST - {"reassoc"})
