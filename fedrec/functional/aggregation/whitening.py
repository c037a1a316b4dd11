"""One score out of several measures of how clients differ."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["whitened_scores"]


def whitened_scores(features: Tensor) -> Tensor:
    r"""Score clients by how far each is from all others, over several measures at once.

    With $x'_i = \sum_{j \ne i} \lvert x_i - x_j \rvert$, measure by measure, and $\Sigma$ the
    covariance of the $x'_i$ over the clients,

    $$\delta_i = \sqrt{x_i'^\top \Sigma^{-1} x'_i}$$

    so that the unit of a measure does not matter, nor that two measures say the same. A measure
    in which clients do not differ is left out; where $\Sigma$ has no inverse, it is the
    pseudo-inverse that counts.

    Args:
        features: $x$, shape $(m, p)$, finite.

    Returns:
        Shape $(m,)$, float64, on the CPU, at least 0.

    References:
        - Huang et al., Multi-metrics Adaptively Identifies Backdoors in Federated Learning, ICCV
          2023.

    Examples:
        >>> scores = whitened_scores(torch.tensor([[1.0], [2.0], [3.0], [9.0]]))
        >>> scores.round(decimals=4)
        tensor([1.9149, 1.5667, 1.5667, 3.6556], dtype=torch.float64)
    """
    x = features.detach().cpu().double()
    apart = (x[:, None] - x).abs().sum(dim=1)
    spread = apart.std(dim=0, correction=min(1, len(x) - 1))
    # In units of the spread no measure is lost to rounding; the score does not depend on units.
    apart = torch.where(spread > 0, apart / spread, 0.0)
    covariance = torch.atleast_2d(torch.cov(apart.T, correction=min(1, len(x) - 1)))
    inverse = torch.linalg.pinv(covariance, hermitian=True, rtol=1e-12)
    squares: Tensor = torch.linalg.vecdot(apart @ inverse, apart)
    return squares.clamp(min=0).sqrt()
