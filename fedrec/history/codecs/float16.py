"""The codec `float16`: half the bytes."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fedrec.history.codecs.base import Codec, Encoded
from fedrec.history.codecs.compiled import compiled
from fedrec.history.codecs.scales import SCALE, clip, largest, pieces, read_scale

__all__ = ["Float16Codec"]

# Times 2 to the minus 112, numbers have the exponents in float32 that they have in float16 (those
# of denormal numbers, too): 13 bits less, and it is a float16.
_REBIAS = 112


class Float16Codec(Codec):
    r"""Float16 with one scale for the vector: 2 bytes each.

    The scale is the power of two that takes the largest entry into $[2^{14}, 2^{15})$. Scaling is
    exact then, rounding is to the nearest, and what has been decoded once is encoded without any
    further loss. Plain float16 would lose small updates: it ends at $6 \cdot 10^{-8}$.

    An entry is off by at most $2^{-11}$ of itself or $2^{-39}$ of the largest entry, whichever is
    more.

    Examples:
        >>> payload, max_error = Float16Codec().encode(np.array([3e-9, 1e-12], np.float32))
        >>> len(payload), max_error < 3e-9 * 2**-11
        (8, True)
    """

    id = 4
    name = "float16"

    def encode(self, vector: NDArray[np.float32]) -> Encoded:
        """Return scale and halves, and half a step of the largest entry."""
        return Float16Codec._encode(vector, largest(vector))

    def encode_known(self, vector: NDArray[np.float32], largest: float) -> Encoded:
        """Return the same, of a vector whose largest magnitude is known."""
        if type(self).encode is not Float16Codec.encode:  # a subclass does something else
            return self.encode(vector)
        return Float16Codec._encode(vector, largest)

    @staticmethod
    def _encode(vector: NDArray[np.float32], largest: float) -> Encoded:
        mantissa, exponent = math.frexp(largest)
        if mantissa >= 1 - 2**-12:  # it will be rounded up to the next power of two
            exponent += 1
        exponent = max(exponent - 15, -126)
        payload = np.empty(SCALE.size + 2 * vector.size, np.uint8)
        SCALE.pack_into(payload.data, 0, 2.0**exponent)
        halves = payload[SCALE.size :].view("<u2")
        far = max(exponent - 14, 0)  # what is not in the first factor, to keep that a float32
        first, second = np.float32(2.0 ** (far - exponent - _REBIAS)), np.float32(2.0**-far)
        max_error = 2.0 ** (exponent + 3)
        if (kernels := compiled()) is not None:
            kernels.float16_encode(vector, first, second, halves.view(np.int16))
            return Encoded(payload.data, max_error)
        for piece in pieces(vector.size):
            values = vector[piece] * first
            if far:
                values *= second
            bits = values.view(np.uint32)
            bits += np.uint32(0x1000)  # to the nearest
            bits >>= np.uint32(13)
            np.copyto(halves[piece], bits, casting="unsafe")  # the sign is lost
            halves[piece] |= vector[piece].view(np.uint16)[1::2] & np.uint16(0x8000)
        return Encoded(payload.data, max_error)

    def decode(self, payload: memoryview, out: NDArray[np.float32]) -> None:
        """Write the vector that was encoded into `out`.

        Raises:
            ValueError: If these bytes cannot be a vector of that length.
        """
        scale = read_scale(payload, SCALE.size + 2 * out.size)
        halves = np.frombuffer(payload, "<i2", offset=SCALE.size)
        kernels = compiled()
        if kernels is not None and halves.flags.aligned:
            kernels.float16_decode(halves, np.float32(scale), out)
        for piece in pieces(out.size) if kernels is None or not halves.flags.aligned else ():
            values = out[piece]
            bits = values.view(np.int32)
            bits[:] = halves[piece]  # the sign fills the upper half
            bits <<= 13
            bits &= -0x70000001  # and stays in the first bit alone
            values *= np.float32(2.0**_REBIAS)
            with np.errstate(over="ignore"):
                values *= np.float32(scale)
        if scale >= 2.0**112:
            clip(out)
