"""Which of some values, or points, are far from the others."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedrec.exceptions import ShapeError
from fedrec.functional.distances import gram_matrix
from fedrec.functional.kernels._columns import column_mean
from fedrec.random import torch_generator

__all__ = [
    "modified_z_scores",
    "principal_coordinates",
    "principal_projections",
    "robust_distances",
]

# Make a median, or a mean, absolute deviation an estimate of the standard deviation.
_MEDIAN_FACTOR = 0.6744897501960817
_MEAN_FACTOR = 0.7978845608028654

# The search for the smallest determinant: starts, and steps at most (a few are enough).
_STARTS, _MAX_STEPS = 200, 50
# On coordinates of variance 1.
_RIDGE = 1e-12


def modified_z_scores(values: Tensor) -> Tensor:
    r"""Measure how far each value is from the median, in robust standard deviations.

    $$z_i = 0.6745\, \frac{x_i - \tilde x}{\mathrm{median}_j |x_j - \tilde x|}$$

    If more than half of the values are equal, the mean absolute deviation takes the place of the
    median one ($0.7979$ for $0.6745$); if all are, every $z_i$ is 0.

    Args:
        values: Shape $(m,)$; those that are NaN are left out, and stay NaN.

    Returns:
        Shape $(m,)$, float64, on the CPU.

    References:
        - Iglewicz and Hoaglin, How to Detect and Handle Outliers, ASQC 1993.

    Examples:
        >>> modified_z_scores(torch.tensor([1.0, 2.0, 3.0, 4.0, 13.0])).round(decimals=4)
        tensor([-1.3490, -0.6745,  0.0000,  0.6745,  6.7449], dtype=torch.float64)
    """
    x = values.detach().cpu().double().numpy()
    there = ~np.isnan(x)
    if not there.any():
        return torch.from_numpy(x.copy())
    away = x - np.median(x[there])
    spread = np.median(np.abs(away[there])) / _MEDIAN_FACTOR
    if spread == 0:
        spread = np.abs(away[there]).mean() / _MEAN_FACTOR
    return torch.from_numpy(away / spread if spread > 0 else np.where(there, 0.0, np.nan))


def principal_coordinates(updates: Tensor, num_components: int) -> Tensor:
    r"""Project every update on the first principal components of the round.

    They come from the $m \times m$ matrix of inner products around the mean, whose eigenvectors,
    times the square roots of the eigenvalues, are the projections.

    Args:
        updates: Finite values, shape $(m, d)$.
        num_components: $k$, at most $m$.

    Returns:
        Shape $(m, k)$, float64, on the CPU; the sign of a column is arbitrary.

    Examples:
        >>> updates = torch.tensor([[0.0, 9.0], [4.0, 9.0], [5.0, 9.0]])
        >>> principal_coordinates(updates, 1).abs().round(decimals=4)
        tensor([[3.],
                [1.],
                [2.]], dtype=torch.float64)
    """
    return principal_projections(gram_matrix(updates, column_mean(updates)), num_components)


def principal_projections(gram: Tensor, num_components: int) -> Tensor:
    """Return what `principal_coordinates` does, given the inner products of the updates.

    Args:
        gram: Taken around the mean of the updates (`column_mean`), shape $(m, m)$.
        num_components: $k$, at most $m$.

    Returns:
        Shape $(m, k)$, float64, on the CPU; the sign of a column is arbitrary.
    """
    values, vectors = torch.linalg.eigh(gram.cpu().double())
    order = torch.arange(len(values) - 1, len(values) - 1 - num_components, -1)
    coordinates: Tensor = values[order].clamp(min=0).sqrt() * vectors[:, order]
    return coordinates


def robust_distances(points: Tensor, seed: int = 0) -> Tensor:
    r"""Compute Mahalanobis distances from minimum covariance determinant estimates.

    $$\sqrt{(x_i - \hat\mu)^\top \hat\Sigma^{-1} (x_i - \hat\mu)}$$

    with $\hat\mu$ and $\hat\Sigma$ the mean and covariance of those
    $h = \lfloor (m + k + 1) / 2 \rfloor$ points whose covariance has the smallest determinant, so
    that outliers, up to nearly half of the points, do not hide themselves. From 200 random starts
    of $k + 1$ points, the $h$ points nearest by the current estimates replace those they were made
    from, until they stay.

    Args:
        points: Shape $(m, k)$ with $m > 2k$.
        seed: Seed of the starts.

    Returns:
        Shape $(m,)$, float64, on the CPU.

    Raises:
        ShapeError: If there are too few points.

    References:
        - Rousseeuw and Van Driessen, A Fast Algorithm for the Minimum Covariance Determinant
          Estimator, Technometrics 1999.

    Examples:
        >>> points = torch.tensor([[0.0], [1.0], [2.0], [3.0], [40.0]])
        >>> robust_distances(points).argmax()
        tensor(4)
    """
    m, k = points.shape
    if m <= 2 * k:
        raise ShapeError(
            f"Expected more than 2 * {k} points in {k} dimensions, but got {m}. HINT: use fewer "
            "components, or let more clients take part."
        )
    x = points.detach().cpu().double()
    # Distances do not depend on units, but the arithmetic does. A direction without variance says
    # nothing, and would make covariances singular.
    deviation = x.std(dim=0, correction=0)
    x = ((x - x.mean(dim=0)) / deviation)[:, deviation > 0]
    if x.shape[1] == 0:
        return torch.zeros(m, dtype=torch.float64)
    k = x.shape[1]
    draws = torch_generator(seed, "covariance-determinant")
    chosen = torch.rand(_STARTS, m, generator=draws).argsort(dim=1)[:, : k + 1]
    size = (m + k + 1) // 2
    for _ in range(_MAX_STEPS):
        squares, _ = _squared_distances(x, chosen)
        nearest = squares.argsort(dim=1, stable=True)[:, :size].sort(dim=1).values
        if nearest.shape == chosen.shape and bool((nearest == chosen).all()):
            break
        chosen = nearest.unique(dim=0)
    squares, log_determinants = _squared_distances(x, chosen)
    return squares[log_determinants.argmin()].clamp(min=0).sqrt()


def _squared_distances(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return distances (starts, m) by the estimates from the chosen points; log determinants."""
    sample = x[chosen]
    means = sample.mean(dim=1, keepdim=True)
    centered = sample - means
    covariances = centered.mT @ centered / chosen.shape[1]
    # Points in a hyperplane: those outside of it are far away, at a distance that can be computed.
    covariances += _RIDGE * torch.eye(x.shape[1], dtype=x.dtype)
    factors = torch.linalg.cholesky(covariances)
    standardised = torch.linalg.solve_triangular(factors, (x - means).mT, upper=False)
    log_determinants = 2 * factors.diagonal(dim1=1, dim2=2).log().sum(dim=1)
    return standardised.square().sum(dim=1), log_determinants
