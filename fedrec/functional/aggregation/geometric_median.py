"""The geometric median of client updates."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedrec.functional.aggregation.order_statistics import coordinate_median
from fedrec.functional.distances import gram_matrix
from fedrec.functional.kernels._columns import mean_around

__all__ = ["geometric_median", "median_shares", "weiszfeld"]

# Half of the points are the middle itself, which then is the result: nothing is to be divided by 0.
_TINY = 1e-150


def weiszfeld(
    gram: Tensor,
    weights: Tensor,
    *,
    smoothing: float = 1e-6,
    tolerance: float = 1e-8,
    max_iterations: int = 1000,
) -> Tensor:
    r"""Write the geometric median as a weighted mean of the points.

    Every iterate $z = \sum_i a_i x_i$ of Weiszfeld's algorithm is such a mean, so that inner
    products are all it needs to know of the points:

    $$a_i \propto \frac{\alpha_i}{\max(\nu, \lVert x_i - z \rVert)}, \qquad
    \lVert x_i - z \rVert^2 = K_{ii} - 2 (K a)_i + a^\top K a$$

    Args:
        gram: Inner products $K$ of the points, taken around a point in the middle of them, shape
            $(m, m)$, see `gram_matrix`.
        weights: $\alpha_i$, non-negative with sum 1, shape $(m,)$. They are the first $a_i$.
        smoothing: $\nu$ as a fraction of the points' median distance from that middle, so that it
            is as good for points close together: no distance counts as shorter.
        tolerance: The iteration that changes no $a_i$ by more than this, relative to $a_i$, is the
            last.
        max_iterations: Iterations at most.

    Returns:
        The last $a_i$, shape $(m,)$.

    Examples:
        >>> corners = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        >>> weiszfeld(gram_matrix(corners), torch.full((4,), 0.25, dtype=torch.float64))
        tensor([0.2500, 0.2500, 0.2500, 0.2500], dtype=torch.float64)
    """
    shares = weights
    middle = float(gram.diagonal().clamp(min=0).median())
    shortest = max(smoothing * math.sqrt(middle), _TINY)
    for _ in range(max_iterations):
        products = gram @ shares
        squares = gram.diagonal() - 2 * products + shares @ products
        distances = squares.clamp_(min=0).sqrt_()
        nearness = weights / distances.clamp_(min=shortest)
        before, shares = shares, nearness / nearness.sum()
        if ((shares - before).abs() <= tolerance * shares).all():
            break
    return shares


def geometric_median(
    updates: Tensor,
    weights: Tensor | None = None,
    *,
    smoothing: float = 1e-6,
    tolerance: float = 1e-8,
    max_iterations: int = 1000,
) -> Tensor:
    r"""Find the point with the smallest weighted sum of distances to the clients' updates.

    $$\operatorname*{argmin}_z \sum_{i=1}^m \alpha_i \lVert g_i - z \rVert$$

    The updates are read three times, for the coordinate-wise median as a point in the middle, their
    inner products around it, and the result; iterations cost $m^2$ operations, in float64.

    Args:
        updates: Finite values, shape $(m, d)$.
        weights: $\alpha_i \ge 0$ of any scale and with a positive sum, shape $(m,)$; `None` for
            equal ones.
        smoothing: See `weiszfeld`.
        tolerance: See `weiszfeld`.
        max_iterations: Iterations at most.

    Returns:
        Shape $(d,)$, dtype and device of `updates`.

    References:
        - Weiszfeld, Sur le point pour lequel la somme des distances de n points donnés est
          minimum, 1937.
        - Pillutla et al., Robust Aggregation for Federated Learning, IEEE TSP 2022.

    Examples:
        >>> geometric_median(torch.tensor([[0.0], [1.0], [100.0]]))
        tensor([1.])
    """
    center = coordinate_median(updates)
    shares = median_shares(
        gram_matrix(updates, center),
        weights,
        smoothing=smoothing,
        tolerance=tolerance,
        max_iterations=max_iterations,
    )
    return mean_around(updates, shares, center)


def median_shares(
    gram: Tensor,
    weights: Tensor | None = None,
    *,
    smoothing: float = 1e-6,
    tolerance: float = 1e-8,
    max_iterations: int = 1000,
) -> Tensor:
    """Return the share of each point in the geometric median.

    Args:
        gram: See `weiszfeld`.
        weights: See `geometric_median`.
        smoothing: See `weiszfeld`.
        tolerance: See `weiszfeld`.
        max_iterations: Iterations at most.

    Returns:
        Shape $(m,)$, float64, on the CPU.
    """
    if weights is None:
        weights = torch.ones(len(gram))
    weights = weights.cpu().double()
    return weiszfeld(
        gram.cpu().double(),
        weights / weights.sum(),
        smoothing=smoothing,
        tolerance=tolerance,
        max_iterations=max_iterations,
    )
