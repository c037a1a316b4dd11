"""Weights that fall with the similarity of clients."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["foolsgold_weights"]

# A cosine this close to 1 is 1: an angle of less than 5e-5.
_ROUNDING = 1e-9


def foolsgold_weights(similarity: Tensor, confidence: float = 1.0) -> Tensor:
    r"""Give clients less weight, the more they are like another client.

    With $v_i = \max_{j \ne i} c_{ij}$ (at least 0), the likeness of a client to another that is
    more like others is reduced, $c_{ij} \leftarrow c_{ij} v_i / v_j$ where $v_j > v_i$. Then
    $\alpha_i = 1 - \max_{j \ne i} c_{ij}$ is divided by the largest, and

    $$\alpha_i \leftarrow \kappa \left(\ln \frac{\alpha_i}{1 - \alpha_i} + \frac12\right)$$

    clipped to [0, 1].

    Args:
        similarity: Cosines $c$ of what clients sent so far, shape $(m, m)$.
        confidence: $\kappa > 0$.

    Returns:
        Shape $(m,)$. All are zero if every client has a twin.

    References:
        - Fung et al., The Limitations of Federated Learning in Sybil Settings, RAID 2020.

    Examples:
        >>> same, other = [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]
        >>> foolsgold_weights(torch.tensor([same, same, other]))
        tensor([0., 0., 1.])
    """
    cosines = similarity.clone().fill_diagonal_(0)
    largest = cosines.amax(dim=1)
    pardoned = largest[None, :] > largest[:, None]
    cosines = torch.where(pardoned, cosines * largest[:, None] / largest[None, :], cosines)
    alpha = (1 - cosines.amax(dim=1)).clamp_(max=1)
    # What rounding leaves between twins must not become the largest of all.
    alpha = torch.where(alpha > _ROUNDING, alpha, 0.0)
    if not bool((alpha > 0).any()):
        return torch.zeros_like(alpha)
    return (confidence * (torch.logit(alpha / alpha.max()) + 0.5)).clamp_(0, 1)
