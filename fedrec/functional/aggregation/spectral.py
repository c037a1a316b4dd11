"""Outliers along the directions of largest variance: DnC and CAF."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.functional.aggregation.order_statistics import coordinate_median
from fedrec.functional.distances import gram_matrix
from fedrec.functional.kernels._columns import column_mean, mean_around

__all__ = [
    "caf_shares",
    "covariance_bound_agnostic_filter",
    "spectral_scores",
    "top_projections",
]

# Squared projections that differ by less than this fraction of them are equal.
_TIE = 1e-9


def spectral_scores(updates: Tensor) -> Tensor:
    r"""Score every client by its squared projection on the top right singular direction.

    $$s_i = \langle g_i - \mu, v \rangle^2$$

    with $\mu$ the mean and $v$ the direction of the largest variance around it. The $m \times m$
    matrix of inner products has the same singular values, and its top eigenvector the projections.

    Args:
        updates: Finite values, shape $(m, d)$.

    Returns:
        Shape $(m,)$, float64, on the CPU.

    References:
        - Shejwalkar and Houmansadr, Manipulating the Byzantine: Optimizing Model Poisoning Attacks
          and Defenses for Federated Learning, NDSS 2021.

    Examples:
        >>> updates = torch.tensor([[1.0, 5.0], [-1.0, 5.0], [3.0, 5.0], [-3.0, 5.0]])
        >>> spectral_scores(updates).round(decimals=6)
        tensor([1., 1., 9., 9.], dtype=torch.float64)
    """
    return top_projections(gram_matrix(updates, column_mean(updates)))


def top_projections(gram: Tensor) -> Tensor:
    """Return what `spectral_scores` does, given the inner products of the updates.

    Args:
        gram: Taken around the mean of the updates (`column_mean`), shape $(m, m)$.

    Returns:
        Shape $(m,)$, float64, on the CPU.
    """
    values, vectors = torch.linalg.eigh(gram.cpu().double())
    scores: Tensor = values[-1].clamp(min=0) * vectors[:, -1].square()
    return scores


def caf_shares(gram: Tensor, num_byzantine: int) -> Tensor:
    r"""Find the weights whose weighted covariance has the smallest largest eigenvalue.

    Starting at $c_i = 1$, with $\mu_c$ and $\Sigma_c$ the mean and the covariance of the points
    weighted by $c$, and $v$ the top eigenvector of $\Sigma_c$:

    $$c_i \leftarrow c_i \left(1 - \frac{\tau_i}{\max_{c_j > 0} \tau_j}\right), \qquad
    \tau_i = \langle v, x_i - \mu_c \rangle^2$$

    as long as $\sum_i c_i > m - 2f$. Every pass takes out at least one client, with all clients
    equal to it. Of the weights $c$ of all passes, those with the smallest largest eigenvalue count.

    Args:
        gram: Inner products of the points, shape $(m, m)$, float64, see `gram_matrix`; best around
            a point in the middle of them.
        num_byzantine: $f$, less than $m / 2$.

    Returns:
        $c_i / \sum_j c_j$, shape $(m,)$.

    Examples:
        >>> caf_shares(gram_matrix(torch.tensor([[0.0], [1.0], [2.0], [90.0]])), num_byzantine=1)
        tensor([0.3296, 0.3334, 0.3371, 0.0000], dtype=torch.float64)
    """
    m = len(gram)
    weights = torch.ones(m, dtype=gram.dtype)
    smallest, best = float("inf"), weights / m
    while True:
        shares = weights / weights.sum()
        products = gram @ shares
        centered = gram - products[:, None] - products + shares @ products
        roots = shares.sqrt()
        values, vectors = torch.linalg.eigh(roots[:, None] * centered * roots)
        if values[-1] < smallest:
            smallest, best = float(values[-1]), shares
        # Along the top eigenvector of the covariance, times the square root of its eigenvalue.
        projections = (centered @ (roots * vectors[:, -1])).square()
        largest = projections[weights > 0].max()
        if largest <= 0:  # all that are left are equal
            return best
        # Equal points go together. Otherwise what rounding leaves of a weight would count as the
        # farthest point again.
        left = 1 - projections / largest
        weights = weights * torch.where(left > _TIE, left, 0.0)
        if weights.sum() <= m - 2 * num_byzantine:
            return best


def covariance_bound_agnostic_filter(updates: Tensor, num_byzantine: int) -> Tensor:
    r"""Average client updates, weighted so that their largest variance is small.

    Args:
        updates: Finite values, shape $(m, d)$.
        num_byzantine: $f$, less than $m / 2$.

    Returns:
        Shape $(d,)$, dtype and device of `updates`.

    References:
        - Allouah et al., Towards Trustworthy Federated Learning with Untrusted Participants, ICML
          2025, Algorithm 2.

    Examples:
        >>> covariance_bound_agnostic_filter(torch.tensor([[0.0], [1.0], [2.0], [90.0]]), 1)
        tensor([1.0075])
    """
    center = coordinate_median(updates)
    gram = gram_matrix(updates, center).cpu().double()
    return mean_around(updates, caf_shares(gram, num_byzantine), center)
