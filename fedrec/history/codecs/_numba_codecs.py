"""The inner loops of lossy codecs in one pass each, compiled by numba: bit for bit what NumPy does.

They leave Python's lock for a whole vector. NumPy takes a pass over memory for every operation, and
asks for the lock between them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fedrec.functional.kernels._numba_kernels import compile_all

__all__ = ["float16_decode", "float16_encode", "int8_decode", "int8_encode", "int8_maxima"]

_BLOCK = 64
_REBIAS = np.float32(2.0**112)

_Float32 = npt.NDArray[np.float32]


def _generate_bits(typing_context, value):  # type: ignore[no-untyped-def]
    """Return the bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


def _generate_number(typing_context, bits):  # type: ignore[no-untyped-def]
    """Return the float32 of these bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


_bits: Any = intrinsic(_generate_bits)
_number: Any = intrinsic(_generate_number)


def _float16_encode(vector, first, second, halves):  # type: ignore[no-untyped-def]
    for i in range(vector.size):
        value = vector[i] * first * second
        rounded = np.int32(_bits(value) + np.int32(0x1000))
        half = np.int32(np.int32(rounded >> np.int32(13)) & np.int32(0x7FFF))
        sign = np.int32(np.int32(_bits(value) >> np.int32(16)) & np.int32(0x8000))
        halves[i] = np.int16(np.int32(half | sign))


def _float16_decode(halves, scale, out):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        bits = np.int32(np.int32(halves[i]) << 13) & np.int32(-0x70000001)
        out[i] = _number(np.int32(bits)) * _REBIAS * scale


# Slices of a block, since a loop that does not begin at 0 is not vectorized.
def _int8_maxima(vector, out):  # type: ignore[no-untyped-def]
    for block in range(out.size):
        values = vector[block * _BLOCK : (block + 1) * _BLOCK]
        highest = np.int32(0)
        for i in range(values.size):
            highest = max(highest, _bits(values[i]) & np.int32(0x7FFFFFFF))
        out[block] = _number(np.int32(highest))


def _int8_encode(vector, inverses, codes):  # type: ignore[no-untyped-def]
    for block in range(inverses.size):
        values = vector[block * _BLOCK : (block + 1) * _BLOCK]
        numbers = codes[block * _BLOCK : (block + 1) * _BLOCK]
        inverse = inverses[block]
        for i in range(values.size):
            numbers[i] = np.int8(np.int32(np.rint(values[i] * inverse)))


def _int8_decode(codes, steps, out):  # type: ignore[no-untyped-def]
    for block in range(steps.size):
        numbers = codes[block * _BLOCK : (block + 1) * _BLOCK]
        values = out[block * _BLOCK : (block + 1) * _BLOCK]
        step = steps[block]
        for i in range(values.size):
            values[i] = np.float32(numbers[i]) * step


def _array(of: Any) -> Any:
    """Return the type of an array that is only read."""
    return types.Array(of, 1, "C", readonly=True)


@lru_cache(maxsize=1)
def _compiled() -> dict[str, Callable[..., None]]:
    """Compile everything, or load it from numba's cache."""
    read, number = _array(types.float32), types.float32
    floats, halves, codes = types.float32[::1], types.int16[::1], types.int8[::1]
    signatures: dict[Any, Any] = {
        _float16_encode: types.void(read, number, number, halves),
        _float16_decode: types.void(_array(types.int16), number, floats),
        _int8_maxima: types.void(read, floats),
        _int8_encode: types.void(read, read, codes),
        _int8_decode: types.void(_array(types.int8), read, floats),
    }
    return compile_all(signatures)


def float16_encode(
    vector: _Float32, first: np.float32, second: np.float32, halves: npt.NDArray[np.int16]
) -> None:
    """Write `vector * first * second`, in the exponents of float16, as halves.

    Shape:
        - `vector`, `halves`: $(d,)$.
    """
    _compiled()["_float16_encode"](vector, first, second, halves)


def float16_decode(halves: npt.NDArray[np.int16], scale: np.float32, out: _Float32) -> None:
    """Write halves times a scale.

    Shape:
        - `halves`, `out`: $(d,)$.
    """
    _compiled()["_float16_decode"](halves, scale, out)


def int8_maxima(vector: _Float32, out: _Float32) -> None:
    """Write the largest magnitude of every block of 64.

    Shape:
        - `vector`: $(d,)$.
        - `out`: $(b,)$.
    """
    _compiled()["_int8_maxima"](vector, out)


def int8_encode(vector: _Float32, inverses: _Float32, codes: npt.NDArray[np.int8]) -> None:
    """Write every block times its inverse step, to the nearest.

    Shape:
        - `vector`, `codes`: $(d,)$.
        - `inverses`: $(b,)$.
    """
    _compiled()["_int8_encode"](vector, inverses, codes)


def int8_decode(codes: npt.NDArray[np.int8], steps: _Float32, out: _Float32) -> None:
    """Write every block times its step.

    Shape:
        - `codes`, `out`: $(d,)$.
        - `steps`: $(b,)$.
    """
    _compiled()["_int8_decode"](codes, steps, out)
