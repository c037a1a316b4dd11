"""The weighted mean of client updates."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["weighted_mean"]


def weighted_mean(updates: Tensor, weights: Tensor | None = None) -> Tensor:
    r"""Average client updates.

    $$\sum_{i=1}^m \frac{n_i}{\sum_k n_k} g_i$$

    Args:
        updates: Shape $(m, d)$.
        weights: $n_i \ge 0$ of any scale and with a positive sum, shape $(m,)$; `None` for equal
            ones. They are normalised in float64.

    Returns:
        Shape $(d,)$, dtype and device of `updates`.

    Examples:
        >>> weighted_mean(torch.tensor([[1.0], [4.0]]), torch.tensor([200, 100]))
        tensor([2.])
    """
    if weights is None:
        weights = torch.ones(len(updates), dtype=torch.float64)
    weights = weights.cpu().double()
    return (weights / weights.sum()).to(updates) @ updates
