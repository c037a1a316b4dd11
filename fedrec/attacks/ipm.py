"""Inner-product manipulation."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec._checks import check_float
from fedrec.attacks.base import Attack, AttackContext

__all__ = ["IPM"]


class IPM(Attack):
    r"""Untargeted attack: inner-product manipulation.

    All malicious clients send the mean of the benign updates, turned around and scaled, so that the
    aggregate has a negative inner product with the honest direction:

    $$\tilde g = -\frac{\epsilon}{|B|} \sum_{i \in B} g_i$$

    A small $\epsilon$ stays close to the benign updates and defeats rules that select by distance;
    a large one defeats the mean, whose direction turns at $\epsilon > |B| / f$ with $f$ attackers.

    Args:
        epsilon: $\epsilon > 0$.

    Raises:
        ConfigurationError: If `epsilon` is not positive.

    References:
        - Xie et al., Fall of Empires: Breaking Byzantine-Tolerant SGD by Inner Product
          Manipulation, UAI 2019.

    Examples:
        >>> honest = torch.tensor([[1.0], [3.0], [7.0]])
        >>> IPM(epsilon=0.5).craft(honest, torch.tensor([False, False, True]), None)
        tensor([[ 1.],
                [ 3.],
                [-1.]])
    """

    full_knowledge = True
    by_columns = True

    def __init__(self, *, epsilon: float = 0.5) -> None:
        self.epsilon = check_float("epsilon", epsilon, minimum=0.0, open_minimum=True)

    def craft(self, updates: Tensor, malicious: Tensor, ctx: AttackContext) -> Tensor:
        """Send the scaled opposite of the benign mean."""
        benign = (~malicious).to(updates)
        mean = benign @ updates / benign.sum().clamp(min=1)
        crafted = -self.epsilon * mean
        return torch.where(malicious[:, None], crafted, updates)
