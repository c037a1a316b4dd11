"""Reductions of client updates, a block of columns at a time that stays in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = [
    "column_mean",
    "inner_products",
    "mean_around",
    "standard_deviation",
    "wide_blocks",
    "wide_dtype",
]

# Columns widened to float64 at a time: 100 rows of them take 3 MB.
_COLUMNS = 4096


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return what sums are made in on a device: float64, or float32 where there is none."""
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


def wide_blocks(updates: Tensor, center: Tensor | None = None) -> Iterator[Tensor]:
    """Yield the columns of updates, shape $(m, d)$, less a center $(d,)$, widened, a block each."""
    wide = wide_dtype(updates.device)
    for columns in _blocks(updates):
        block = updates[:, columns].to(wide)
        yield block if center is None else block - center[columns].to(wide)


def _blocks(updates: Tensor) -> Iterator[slice]:
    for start in range(0, updates.shape[1], _COLUMNS):
        yield slice(start, start + _COLUMNS)


def inner_products(updates: Tensor, vector: Tensor, center: Tensor | None = None) -> Tensor:
    r"""Compute $(g_i - c)^\top v$ for every row, $c$ the center or zero.

    Args:
        updates: Shape $(m, d)$.
        vector: $v$, shape $(d,)$.
        center: $c$, shape $(d,)$.

    Returns:
        Shape $(m,)$, float64 (float32 on a device without).
    """
    total = torch.zeros(len(updates), dtype=wide_dtype(updates.device), device=updates.device)
    for block, part in zip(wide_blocks(updates, center), wide_blocks(vector[None]), strict=True):
        total += block @ part[0]
    return total


def mean_around(updates: Tensor, shares: Tensor, center: Tensor) -> Tensor:
    r"""Compute $c + \sum_i a_i (g_i - c)$: far from the origin, the differences keep their digits.

    Args:
        updates: Shape $(m, d)$.
        shares: $a_i$ with sum 1, shape $(m,)$.
        center: $c$, shape $(d,)$.

    Returns:
        Shape $(d,)$, dtype and device of `updates`.
    """
    wide = shares.to(updates.device, wide_dtype(updates.device))
    parts = [wide @ block for block in wide_blocks(updates, center)]
    return (center + torch.cat(parts)).to(updates)


def standard_deviation(updates: Tensor, mean: Tensor, correction: int = 0) -> Tensor:
    """Compute the standard deviation of every coordinate.

    Several times as fast as `torch.std` along the rows. Squares are in float64, so that none
    overflows or vanishes.

    Args:
        updates: Shape $(m, d)$.
        mean: Their mean, shape $(d,)$.
        correction: The sum of squares is divided by m less this, but by 1 at least.

    Returns:
        Shape $(d,)$.
    """
    parts = [block.square_().sum(dim=0) for block in wide_blocks(updates, mean)]
    return (torch.cat(parts) / max(1, len(updates) - correction)).sqrt().to(mean)


def column_mean(updates: Tensor) -> Tensor:
    """Compute the mean of updates, shape $(m, d)$, in float64 where there is that."""
    return updates.mean(dim=0, dtype=wide_dtype(updates.device))
