"""The abstract codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Codec", "Encoded"]


class Encoded(NamedTuple):
    """A vector as bytes.

    Attributes:
        payload: Its bytes; they may share its memory.
        max_error: The most by which an entry that comes back may differ; 0 means exact.
    """

    payload: bytes | memoryview
    max_error: float = 0.0


class Codec(ABC):
    """Turns a float32 vector into bytes and back. It has no state: several threads use it at once.

    Vectors are finite and not empty. What comes back is finite, too, and a function of the bytes
    alone.

    Attributes:
        id: Number of the codec in a record header; never given to another codec. Those from 128
            to 255 are free for codecs that are not fedrec's.
        name: Name of the codec in a manifest.
        lossless: Whether every bit comes back.
    """

    id: ClassVar[int]
    name: ClassVar[str]
    lossless: ClassVar[bool] = False

    @abstractmethod
    def encode(self, vector: NDArray[np.float32]) -> Encoded:
        """Return the bytes of a contiguous vector, and how far off they may be.

        Shape:
            - `vector`: $(d,)$.
        """

    def encode_known(self, vector: NDArray[np.float32], largest: float) -> Encoded:
        """Do what `encode` does, given the largest magnitude, for codecs that need it.

        Shape:
            - `vector`: $(d,)$.
        """
        return self.encode(vector)

    @abstractmethod
    def decode(self, payload: memoryview, out: NDArray[np.float32]) -> None:
        """Write the vector that was encoded into a contiguous array.

        Shape:
            - `out`: $(d,)$.

        Raises:
            ValueError: If these bytes cannot be a vector of $d$ numbers. What they claim to be is
                checked before memory is taken for it.
        """
