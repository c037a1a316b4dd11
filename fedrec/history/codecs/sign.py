"""The codec `sign`: a thirtieth of the bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedrec.history.codecs.base import Codec, Encoded
from fedrec.history.codecs.scales import SCALE, largest, read_scale

__all__ = ["SignCodec"]


class SignCodec(Codec):
    """The direction alone: one bit an entry, and their mean absolute value.

    Every entry comes back with that absolute value, zeros too. For comparison with methods that
    store no more than signs; the error is about as large as the update.

    Examples:
        >>> vector = np.array([1.0, -5.0, 0.0], np.float32)
        >>> payload, max_error = SignCodec().encode(vector)
        >>> SignCodec().decode(payload, vector)
        >>> len(payload), vector.tolist(), round(max_error, 3)
        (5, [2.0, -2.0, 2.0], 3.0)
    """

    id = 7
    name = "sign"

    def encode(self, vector: NDArray[np.float32]) -> Encoded:
        """Return the mean absolute value, then the signs, and the largest difference to it."""
        mean = float(np.float32(np.abs(vector).mean(dtype=np.float64)))
        payload = SCALE.pack(mean) + np.packbits(vector < 0).tobytes()
        return Encoded(payload, max(largest(vector) - mean, mean))

    def decode(self, payload: memoryview, out: NDArray[np.float32]) -> None:
        """Write signs times the mean absolute value into `out`.

        Raises:
            ValueError: If these bytes cannot be a vector of that length.
        """
        mean = read_scale(payload, SCALE.size + -(-out.size // 8))
        negative = np.frombuffer(payload, np.uint8, offset=SCALE.size)
        bits = out.view(np.uint32)
        bits[:] = np.unpackbits(negative, count=out.size)
        bits <<= np.uint32(31)
        bits |= np.float32(mean).view(np.uint32)
