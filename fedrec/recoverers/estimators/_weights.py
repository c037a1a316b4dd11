"""How much of what is predicted came true: the weights of anchored estimates."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["WINDOW", "regressed"]

#: Rounds whose changes decide together about the weights.
WINDOW = 3


def regressed(
    products: Tensor, found: Tensor, beta: float, gamma: float, *, history: bool, curvature: bool
) -> tuple[Tensor, float, float]:
    r"""Regress $\beta$ and $\gamma$ over this round and those before.

    Args:
        products: Of the last rounds, shape $(3, 4)$, float64: change with prediction, prediction
            with itself; rest of the change now with the rest of the recorded change, that with
            itself.
        found: Of this round, products of four vectors with each other, shape $(4, 4)$, float64: the
            change now, the recorded one, and what curvature predicts of both.
        beta: $\beta$ until now.
        gamma: $\gamma$ until now.
        history: Whether $\beta$ is regressed.
        curvature: Whether $\gamma$ is.

    Returns:
        What to call it with in the next round: products, $\beta$ and $\gamma$, both in [0, 1].
    """
    new = torch.zeros(4, dtype=torch.float64)
    if curvature:
        new[:2] = torch.stack([found[0, 2] + found[1, 3], found[2, 2] + found[3, 3]])
        explained, size = (products[1:, :2].sum(dim=0) + new[:2]).tolist()
        if size > 0:
            gamma = min(max(explained / size, 0.0), 1.0)
    if history:
        # Of what curvature leaves of the changes.
        left = torch.tensor([[1, 0, -gamma, 0], [0, 1, 0, -gamma]], dtype=torch.float64)
        new[2:] = (left @ found @ left.mT)[:, 1]
    products = torch.cat([products[1:], new[None]])
    explained, size = products[:, 2:].sum(dim=0).tolist()
    if size > 0:
        beta = min(max(explained / size, 0.0), 1.0)
    return products, beta, gamma
