"""How a vector of float32 numbers becomes bytes in a history, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["CODECS", "Codec", "Float32Codec"]


class Codec(ABC):
    """Turns a float32 vector into bytes and back. It has no state.

    Attributes:
        id: Number of the codec in a record header, 1 to 255; never given to another codec.
        name: Name of the codec in a manifest.
    """

    id: ClassVar[int]
    name: ClassVar[str]

    @abstractmethod
    def encode(self, vector: NDArray[np.float32]) -> memoryview:
        """Return the bytes of a vector, shape $(d,)$; they may share its memory."""

    @abstractmethod
    def decode(self, payload: memoryview, out: NDArray[np.float32]) -> None:
        """Write the vector that was encoded into `out`, shape $(d,)$.

        Raises:
            ValueError: If these bytes cannot be a vector of $d$ numbers.
        """


class Float32Codec(Codec):
    """The numbers as they are, little-endian: exact, 4 bytes each."""

    id = 1
    name = "float32"

    def encode(self, vector: NDArray[np.float32]) -> memoryview:
        """Return the bytes of a vector, shape $(d,)$; they may share its memory."""
        return np.ascontiguousarray(vector, dtype="<f4").data.cast("B")

    def decode(self, payload: memoryview, out: NDArray[np.float32]) -> None:
        """Write the vector that was encoded into `out`, shape $(d,)$.

        Raises:
            ValueError: If these bytes cannot be a vector of $d$ numbers.
        """
        if len(payload) != out.nbytes:
            raise ValueError(f"{len(payload)} bytes cannot be {out.size} float32 numbers")
        out[:] = np.frombuffer(payload, dtype="<f4")


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Float32Codec(),)}
"""Every codec by name."""
