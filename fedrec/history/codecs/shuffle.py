"""Bytes of the same significance side by side: what makes floats compressible."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["shuffle", "unshuffle"]


def shuffle(vector: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return first the lowest byte of every number, last the highest.

    Shape:
        - `vector`: $(d,)$.
        - Output: $(4, d)$.
    """
    numbers = vector.view(np.uint8)
    planes = np.empty((4, vector.size), np.uint8)
    for k in range(4):
        planes[k] = numbers[k::4]
    return planes


def unshuffle(planes: bytes, out: NDArray[np.float32]) -> None:
    """Undo `shuffle`, into an array of as many bytes."""
    numbers = out.view(np.uint8)
    for k in range(4):
        numbers[k::4] = np.frombuffer(planes, np.uint8, out.size, offset=k * out.size)
