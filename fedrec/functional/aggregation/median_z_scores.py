"""How far clients are from the median client."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["median_z_scores"]


def median_z_scores(values: Tensor) -> Tensor:
    r"""Measure how far each value is from the median, in standard deviations.

    $$\frac{\lvert x_i - \operatorname{med}_j x_j \rvert}{\sigma}$$

    with $\sigma$ the standard deviation of all values around their mean (divided by $m$).

    Args:
        values: Shape $(m,)$, finite.

    Returns:
        Shape $(m,)$, float64, on the CPU; zeros if all values are equal.

    References:
        - Xu et al., Achieving Byzantine-Resilient Federated Learning via Layer-Adaptive Sparsified
          Model Aggregation, WACV 2025.

    Examples:
        >>> median_z_scores(torch.tensor([1.0, 1.0, 1.0, 5.0])).round(decimals=4)
        tensor([0.0000, 0.0000, 0.0000, 2.3094], dtype=torch.float64)
    """
    x = values.detach().cpu().double()
    away = (x - x.quantile(0.5)).abs()
    spread = x.std(correction=0)
    return torch.where(away > 0, away / spread, 0.0)
