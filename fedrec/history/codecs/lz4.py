"""The codec `lz4`: lossless, fast."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedrec.history.codecs.base import Codec, Encoded
from fedrec.history.codecs.compression import lz4_compress, lz4_decompress
from fedrec.history.codecs.shuffle import shuffle, unshuffle

__all__ = ["Lz4Codec"]


class Lz4Codec(Codec):
    """Byte-shuffled and compressed with lz4: exact, fast."""

    id = 2
    name = "lz4"
    lossless = True

    def encode(self, vector: NDArray[np.float32]) -> Encoded:
        """Return the compressed bytes of a vector."""
        return Encoded(lz4_compress(shuffle(vector).data.cast("B")))

    def decode(self, payload: memoryview, out: NDArray[np.float32]) -> None:
        """Write the vector that was encoded into `out`.

        Raises:
            ValueError: If these bytes cannot be a vector of that length.
        """
        unshuffle(lz4_decompress(payload, out.nbytes), out)
