"""The codec `zstd`: lossless, smaller."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedrec.history.codecs.base import Codec, Encoded
from fedrec.history.codecs.compression import zstd_compress, zstd_decompress
from fedrec.history.codecs.shuffle import shuffle, unshuffle

__all__ = ["ZstdCodec"]


class ZstdCodec(Codec):
    """Byte-shuffled and compressed with zstd: exact, smaller, slower."""

    id = 3
    name = "zstd"
    lossless = True

    def encode(self, vector: NDArray[np.float32]) -> Encoded:
        """Return the compressed bytes of a vector."""
        return Encoded(zstd_compress(shuffle(vector).data.cast("B")))

    def decode(self, payload: memoryview, out: NDArray[np.float32]) -> None:
        """Write the vector that was encoded into `out`.

        Raises:
            ValueError: If these bytes cannot be a vector of that length.
        """
        unshuffle(zstd_decompress(payload, out.nbytes), out)
