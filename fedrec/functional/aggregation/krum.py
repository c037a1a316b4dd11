"""Selection of client updates by the distances to their neighbours: Krum and Bulyan."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["bulyan_selection", "krum_scores", "lowest"]


def krum_scores(distances: Tensor, num_byzantine: int) -> Tensor:
    r"""Score every client by how far its nearest neighbours are.

    $$s_i = \sum_{j \in N_i} \lVert g_i - g_j \rVert^2$$

    with $N_i$ the $m - f - 2$ clients nearest to $i$, without $i$ itself.

    Args:
        distances: Squared distances, shape $(m, m)$, see `pairwise_squared_distances`.
        num_byzantine: $f$, with $m - f - 2 \ge 1$.

    Returns:
        Shape $(m,)$; the lower, the better.

    References:
        - Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent,
          NeurIPS 2017.

    Examples:
        >>> from fedrec.functional import pairwise_squared_distances
        >>> updates = torch.tensor([[0.0], [1.0], [3.0], [100.0]])
        >>> krum_scores(pairwise_squared_distances(updates), num_byzantine=0)
        tensor([1.0000e+01, 5.0000e+00, 1.3000e+01, 1.9210e+04], dtype=torch.float64)
    """
    others = distances.clone().fill_diagonal_(float("inf"))
    nearest = others.sort(dim=1).values[:, : len(distances) - num_byzantine - 2]
    return nearest.sum(dim=1)


def lowest(scores: Tensor, count: int) -> Tensor:
    """Return the clients with the lowest scores; of equal ones, those in earlier rows.

    Args:
        scores: Shape $(m,)$.
        count: How many.

    Returns:
        Row numbers in ascending order, shape $(count,)$.

    Examples:
        >>> lowest(torch.tensor([2.0, 1.0, 3.0, 2.0]), 2)
        tensor([0, 1])
    """
    return scores.argsort(stable=True)[:count].sort().values


def bulyan_selection(distances: Tensor, num_byzantine: int) -> Tensor:
    r"""Pick $\theta = m - 2f$ clients, one Krum after another.

    Each time, Krum's choice among the $r$ clients that are left is taken out, with the sum over
    $k = \max(r - f - 2, 1)$ neighbours among them. With $k = 1$ the two clients that are nearest to
    each other have the same score: then the client whose next neighbour is nearer is taken.
    Distances are sorted once.

    Args:
        distances: Squared distances, shape $(m, m)$.
        num_byzantine: $f$, with $m \ge 4f + 3$.

    Returns:
        Row numbers in ascending order, shape $(m - 2f,)$.

    References:
        - El Mhamdi et al., The Hidden Vulnerability of Distributed Learning in Byzantium, ICML
          2018.

    Examples:
        >>> from fedrec.functional import pairwise_squared_distances
        >>> updates = torch.tensor([[0.0], [1.0], [2.0], [4.0], [5.0], [7.0], [50.0]])
        >>> bulyan_selection(pairwise_squared_distances(updates), num_byzantine=1)
        tensor([1, 2, 3, 4, 5])
    """
    m, f = len(distances), num_byzantine
    others = distances.clone().fill_diagonal_(float("inf"))
    ordered, neighbours = others.sort(dim=1)
    left = torch.ones(m, dtype=torch.bool, device=distances.device)
    for remaining in range(m, 2 * f, -1):
        k = max(remaining - f - 2, 1)
        present = left[neighbours]
        rank = present.cumsum(dim=1)
        scores = ordered.where(present & (rank <= k), 0).sum(dim=1)
        following = ordered.where(present & (rank == k + 1), 0).sum(dim=1)
        candidates = left.nonzero().flatten()
        candidates = candidates[following[candidates].argsort(stable=True)]
        left[candidates[scores[candidates].argsort(stable=True)[0]]] = False
    return (~left).nonzero().flatten()
