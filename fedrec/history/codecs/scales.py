"""Helpers of the codecs that store scales."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["SCALE", "clip", "largest", "pieces", "read_scale"]

SCALE = struct.Struct("<f")
# Entries that are worked on at once: a megabyte, which stays in the processor's cache, and enough
# for a thread to do before it has to ask for the interpreter again.
_PIECE = 2**18
_MAX = float(np.finfo(np.float32).max)


def largest(vector: NDArray[np.float32]) -> float:
    """Return the largest absolute value."""
    return max(float(vector.max()), -float(vector.min()))


def pieces(size: int) -> Iterator[slice]:
    """Cut so many entries into pieces; all but the last have a multiple of 64."""
    for start in range(0, size, _PIECE):
        yield slice(start, min(start + _PIECE, size))


def read_scale(payload: memoryview, num_bytes: int) -> float:
    """Return the scale a payload begins with.

    Args:
        payload: A float32 scale, then other bytes.
        num_bytes: How long the payload must be.

    Raises:
        ValueError: If it has another length, or the scale is negative or not finite.
    """
    if len(payload) != num_bytes:
        raise ValueError(f"{len(payload)} bytes instead of {num_bytes}")
    scale: float = SCALE.unpack_from(payload)[0]
    if not 0 <= scale < math.inf:
        raise ValueError(f"a scale of {scale}")
    return scale


def clip(values: NDArray[np.float32]) -> None:
    """Replace what rounding took beyond the largest float32 by that, in place."""
    np.clip(values, -_MAX, _MAX, out=values)
