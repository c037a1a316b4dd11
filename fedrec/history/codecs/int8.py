"""The codec `int8`: a quarter of the bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedrec.history.codecs.base import Codec, Encoded
from fedrec.history.codecs.compiled import compiled
from fedrec.history.codecs.scales import clip, pieces

__all__ = ["BLOCK", "MOST", "Int8Codec", "expand", "num_blocks"]

BLOCK = 64
#: Numbers times a step that is smaller are finite.
MOST = 2.0**120
# A step that is smaller has no float32 inverse worth the name.
_SMALLEST = np.float32(2.0**-126)


class Int8Codec(Codec):
    r"""Whole numbers from -127 to 127, in blocks of 64 with a step each: 1.03 bytes each.

    A block's step is its largest absolute value over 127, as a bfloat16 (to the nearest), so that
    a multiple of it is a float32 without rounding, and what has been decoded once is encoded
    without any further loss. An entry is off by at most half a step, or $2^{-127}$.

    Examples:
        >>> vector = np.array([127.0, 1.4, -0.4, 0.0], np.float32)
        >>> payload, max_error = Int8Codec().encode(vector)
        >>> Int8Codec().decode(payload, vector)
        >>> vector.tolist(), round(max_error, 3)
        ([127.0, 1.0, 0.0, 0.0], 0.5)
    """

    id = 5
    name = "int8"

    def encode(self, vector: NDArray[np.float32]) -> Encoded:
        """Return the steps of the blocks, then the numbers, and half of the largest step."""
        rounded = _to_bfloat16(np.maximum(self.steps(vector), _SMALLEST))
        steps = _from_bfloat16(rounded)
        payload = np.empty(rounded.nbytes + vector.size, np.uint8)
        payload[: rounded.nbytes] = rounded.view(np.uint8)
        codes = payload[rounded.nbytes :].view(np.int8)
        inverses = 1 / steps
        kernels = compiled()
        if kernels is not None:
            kernels.int8_encode(vector, inverses, codes)
        for piece in pieces(vector.size) if kernels is None else ():
            blocks, flat = _blocks(vector[piece])
            flat[:] = vector[piece]
            blocks *= inverses[piece.start // BLOCK :][: len(blocks), None]
            np.rint(flat, out=flat)
            np.copyto(codes[piece], flat, casting="unsafe")
        # A little more than half, since a product may be rounded to half a step.
        return Encoded(payload.data, 0.5001 * float(steps.max()))

    def decode(self, payload: memoryview, out: NDArray[np.float32]) -> None:
        """Write the vector that was encoded into `out`.

        Raises:
            ValueError: If these bytes cannot be a vector of that length.
        """
        expand(*self.parts(payload, out.size), out)

    def parts(self, payload: memoryview, size: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        """Return the numbers, and the steps of their blocks.

        Args:
            payload: What `encode` returned.
            size: $d$.

        Raises:
            ValueError: If these bytes cannot be a vector of that length.
        """
        num_bytes = 2 * num_blocks(size)
        if len(payload) != num_bytes + size:
            raise ValueError(f"{len(payload)} bytes instead of {num_bytes + size}")
        steps = _from_bfloat16(np.frombuffer(payload, "<u2", num_blocks(size)))
        if not (steps.max() < np.inf and steps.min() >= 0):
            raise ValueError("a step that is negative or not finite")
        return np.frombuffer(payload, np.int8, offset=num_bytes), steps

    def steps(self, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the step each block needs, shape $(b,)$."""
        top = np.empty(num_blocks(vector.size), np.float32)
        kernels = compiled()
        if kernels is not None:
            kernels.int8_maxima(vector, top)
        for piece in pieces(vector.size) if kernels is None else ():
            blocks, flat = _blocks(vector[piece])
            np.abs(vector[piece], out=flat)
            blocks.max(axis=1, out=top[piece.start // BLOCK :][: len(blocks)])
        top /= np.float32(127)
        return top


def expand(codes: NDArray[np.int8], steps: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Write numbers times the steps of their blocks.

    Shape:
        - `codes`, `out`: $(d,)$.
        - `steps`: $(b,)$.
    """
    whole = out.size // BLOCK * BLOCK
    if (kernels := compiled()) is not None:
        kernels.int8_decode(codes, steps, out)
    else:
        out[:] = codes
        with np.errstate(over="ignore"):
            out[:whole].reshape(-1, BLOCK)[:] *= steps[: whole // BLOCK, None]
            out[whole:] *= steps[-1]
    if steps.max() >= MOST:
        clip(out)


def num_blocks(size: int) -> int:
    """Return the number of blocks that so many entries take."""
    return -(-size // BLOCK)


def _blocks(values: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return room for the values in rows of 64, filled up with zeros, and a flat view of it."""
    blocks = np.empty((num_blocks(values.size), BLOCK), np.float32)
    flat = blocks.reshape(-1)
    flat[values.size :] = 0
    return blocks, flat[: values.size]


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the upper halves of positive numbers, to the nearest."""
    bits = values.view(np.uint32)
    bits = bits + (0x7FFF + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (bits >> np.uint32(16)).astype("<u2")


def _from_bfloat16(halves: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
