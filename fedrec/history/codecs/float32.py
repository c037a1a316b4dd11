"""The codec `float32`: numbers as they are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedrec.history.codecs.base import Codec, Encoded

__all__ = ["Float32Codec"]


class Float32Codec(Codec):
    """The numbers as they are, little-endian: exact, 4 bytes each, no copy.

    Examples:
        >>> bytes(Float32Codec().encode(np.array([1.0, -2.0], np.float32)).payload).hex()
        '0000803f000000c0'
    """

    id = 1
    name = "float32"
    lossless = True

    def encode(self, vector: NDArray[np.float32]) -> Encoded:
        """Return the bytes of a vector, which share its memory."""
        return Encoded(np.ascontiguousarray(vector, dtype="<f4").data.cast("B"))

    def decode(self, payload: memoryview, out: NDArray[np.float32]) -> None:
        """Write the vector that was encoded into `out`.

        Raises:
            ValueError: If these bytes cannot be a vector of that length.
        """
        if len(payload) != out.nbytes:
            raise ValueError(f"{len(payload)} bytes cannot be {out.size} float32 numbers")
        out[:] = np.frombuffer(payload, dtype="<f4")
