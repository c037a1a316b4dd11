"""Clipping client updates: to a norm, to a radius around a centre, to another update's norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedrec.functional.aggregation.order_statistics import coordinate_median
from fedrec.functional.distances import squared_norms

__all__ = [
    "adaptive_clipping",
    "centered_clipping",
    "clip_factors",
    "clipped_shares",
    "factors_of_longest",
    "moved_centre",
    "norm_clipping",
]


def clip_factors(norms: Tensor, bound: Tensor | float) -> Tensor:
    r"""Return what vectors of these norms are multiplied with so that none exceeds a bound.

    $$\min\left(1, \frac{M}{\lVert g_i \rVert}\right)$$

    Args:
        norms: Shape $(m,)$.
        bound: $M$.

    Returns:
        Shape $(m,)$; 1 for a vector of norm 0.

    Examples:
        >>> clip_factors(torch.tensor([0.0, 5.0, 10.0]), bound=5.0)
        tensor([1.0000, 1.0000, 0.5000])
    """
    return torch.where(norms > bound, bound / norms, 1.0)


def norm_clipping(
    updates: Tensor, max_norm: float | None = None, weights: Tensor | None = None
) -> Tensor:
    r"""Average client updates, those that are longer than a bound scaled down to it.

    $$\sum_{i=1}^m \frac{n_i}{\sum_k n_k} \min\left(1, \frac{M}{\lVert g_i \rVert}\right) g_i$$

    Args:
        updates: Finite values, shape $(m, d)$.
        max_norm: $M$; `None` for the median of the norms.
        weights: $n_i \ge 0$ of any scale and with a positive sum, shape $(m,)$; `None` for equal
            ones.

    Returns:
        Shape $(d,)$, dtype and device of `updates`.

    References:
        - Sun et al., Can You Really Backdoor Federated Learning?, 2019.

    Examples:
        >>> norm_clipping(torch.tensor([[3.0, 4.0], [30.0, 40.0]]), max_norm=5.0)
        tensor([3., 4.])
    """
    norms = squared_norms(updates).sqrt().cpu()
    return clipped_shares(norms, max_norm, weights).to(updates) @ updates


def clipped_shares(
    norms: Tensor, max_norm: float | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return what `norm_clipping` multiplies each update with.

    Args:
        norms: Of the updates, shape $(m,)$, on the CPU.
        max_norm: See `norm_clipping`.
        weights: See `norm_clipping`.

    Returns:
        Shape $(m,)$, float64.
    """
    bound = coordinate_median(norms[:, None]) if max_norm is None else max_norm
    if weights is None:
        weights = torch.ones(len(norms))
    weights = weights.cpu().double()
    return weights / weights.sum() * clip_factors(norms, bound)


def centered_clipping(updates: Tensor, centre: Tensor, tau: float, iterations: int = 1) -> Tensor:
    r"""Average client updates, each clipped to a radius around a centre, which then moves there.

    $$v \leftarrow v + \frac1m \sum_{i=1}^m (g_i - v) \min\left(1,
    \frac{\tau}{\lVert g_i - v \rVert}\right)$$

    Args:
        updates: Shape $(m, d)$.
        centre: $v$ to start from, shape $(d,)$.
        tau: Radius $\tau > 0$.
        iterations: How often the centre moves.

    Returns:
        The last centre, shape $(d,)$, dtype and device of `updates`.

    References:
        - Karimireddy et al., Learning from History for Byzantine Robust Optimization, ICML 2021.

    Examples:
        >>> centered_clipping(torch.tensor([[1.0], [100.0]]), torch.zeros(1), tau=3.0)
        tensor([2.])
    """
    return moved_centre(
        centre,
        tau,
        iterations,
        distances=lambda centre: squared_norms(updates, centre).sqrt(),
        weighted_sum=lambda factors: factors.to(updates) @ updates,
    )


def moved_centre(
    centre: Tensor,
    tau: float,
    iterations: int,
    *,
    distances: Callable[[Tensor], Tensor],
    weighted_sum: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return what `centered_clipping` does, of updates that may be anywhere.

    Args:
        centre: See `centered_clipping`.
        tau: See `centered_clipping`.
        iterations: See `centered_clipping`.
        distances: Of the updates from a centre, shape $(m,)$.
        weighted_sum: Of the updates, with these factors, shape $(d,)$.
    """
    for _ in range(iterations):
        scale = clip_factors(distances(centre), tau)
        # Differences are not scaled one by one: in float32 they may overflow.
        centre = (1 - scale.mean()).to(centre) * centre + weighted_sum(scale / len(scale))
    return centre


def adaptive_clipping(updates: Tensor, num_clipped: int) -> Tensor:
    r"""Clip the longest updates to the norm of the longest that is not clipped.

    Args:
        updates: Shape $(m, d)$.
        num_clipped: How many, less than $m$.

    Returns:
        Shape $(m, d)$: a new tensor.

    References:
        - Allouah et al., Adaptive Gradient Clipping for Robust Federated Learning, ICLR 2025.

    Examples:
        >>> adaptive_clipping(torch.tensor([[1.0], [-8.0], [2.0]]), num_clipped=1)
        tensor([[ 1.],
                [-2.],
                [ 2.]])
    """
    factors = factors_of_longest(squared_norms(updates).sqrt(), num_clipped)
    return updates * factors.to(updates)[:, None]


def factors_of_longest(norms: Tensor, num_clipped: int) -> Tensor:
    """Return what `adaptive_clipping` multiplies each update with, given their norms $(m,)$."""
    return clip_factors(norms, norms.sort(descending=True).values[num_clipped])
