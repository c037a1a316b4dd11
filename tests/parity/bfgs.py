"""Hessians by BFGS as whole matrices, update by update: what L-BFGS never writes down."""

from __future__ import annotations

import numpy as np


def dense_bfgs(pairs: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return the matrix that pairs of weight and gradient differences lead to, oldest first."""
    s, y = pairs[-1]
    b = (y @ s) / (s @ s) * np.eye(len(s))
    for s, y in pairs:
        bs = b @ s
        b = b - np.outer(bs, bs) / (s @ bs) + np.outer(y, y) / (y @ s)
    return b
