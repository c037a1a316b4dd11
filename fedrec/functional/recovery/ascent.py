"""Projected gradient ascent around a model without the target's share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["distance_to_random_models", "project_onto_ball", "reference_weights"]


def reference_weights(global_weights: Tensor, models: Tensor, shares: Tensor) -> Tensor:
    r"""Take the last models of some clients out of the global one.

    $$w_{\mathrm{ref}} = \frac{w - \sum_i p_i w_i}{1 - \sum_i p_i}$$

    With the share $p = 1/N$ and one client, this is $(N w - w_i) / (N - 1)$.

    Args:
        global_weights: $w$, shape $(d,)$.
        models: $w_i$, shape $(c, d)$.
        shares: $p_i$, shape $(c,)$, positive, with a sum below 1.

    Returns:
        $w_{\mathrm{ref}}$, shape $(d,)$.

    References:
        - Halimi et al., Federated Unlearning: How to Efficiently Erase a Client in FL?, arXiv
          2207.05521, 2022.

    Examples:
        >>> global_weights, model = torch.tensor([2.0, 0.0]), torch.tensor([[5.0, 3.0]])
        >>> reference_weights(global_weights, model, torch.tensor([0.25]))
        tensor([ 1., -1.])
    """
    p = shares.double()
    rest = global_weights.double() - p @ models.double()
    return (rest / (1 - p.sum())).to(global_weights)


def distance_to_random_models(
    weights: Tensor, initial_weights: Tensor, sizes: Sequence[int]
) -> float:
    r"""Return the mean squared distance of a model to models that are as random as the first one.

    A random model has the entries of the initial one, in random order within every parameter. The
    mean over all orders is exact: over parameters $j$ of $k_j$ entries with sums $s_j$ and $s^0_j$,

    $$\lVert w \rVert^2 + \lVert w_0 \rVert^2 - 2 \sum_j \frac{s_j s^0_j}{k_j}$$

    Args:
        weights: $w$, shape $(d,)$.
        initial_weights: $w_0$, shape $(d,)$.
        sizes: Number of entries of every parameter, in order; they sum to $d$.

    Examples:
        >>> distance_to_random_models(torch.tensor([3.0, 0.0]), torch.tensor([1.0, -1.0]), [2])
        11.0
    """
    w, start = weights.double(), initial_weights.double()
    total = w.square().sum() + start.square().sum()
    for a, b in zip(w.split(list(sizes)), start.split(list(sizes)), strict=True):
        total -= 2 * a.sum() * b.sum() / len(a)
    return float(total)


def project_onto_ball(weights: Tensor, centre: Tensor, radius: float) -> Tensor:
    r"""Return the nearest point in the ball of this $\ell_2$ radius.

    Args:
        weights: Shape $(d,)$.
        centre: Shape $(d,)$.
        radius: Above 0.

    Returns:
        Shape $(d,)$; `weights` themselves if they are in it.

    Examples:
        >>> project_onto_ball(torch.tensor([4.0, 0.0]), torch.tensor([1.0, 0.0]), radius=2.0)
        tensor([3., 0.])
    """
    moved = weights - centre
    distance = torch.linalg.vector_norm(moved)
    return weights if bool(distance <= radius) else centre + moved * (radius / distance)
