"""The Min-Max attack."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec._checks import check_bool, check_choice
from fedrec.attacks._rows import reference
from fedrec.attacks.base import Attack, AttackContext
from fedrec.functional.attack.min_max import PERTURBATIONS, min_max, perturbation

__all__ = ["MinMax"]


class MinMax(Attack):
    r"""Untargeted attack: Min-Max.

    All malicious clients send the same update, as far from the mean of the benign ones along a
    direction as it can be while it is no farther from any benign update than the two benign updates
    that are farthest apart are from each other:

    $$\max_i \lVert \tilde g - g_i \rVert \le \max_{i,j} \lVert g_i - g_j \rVert$$

    The largest step is computed in closed form, not searched (`fedrec.functional.perturbation`).

    Args:
        perturbation: The direction: `"std"`, against the standard deviation of every coordinate;
            `"unit"`, against the mean; `"sign"`, against the mean's signs.
        full_knowledge: Whether the attackers see the benign updates. If not, what they would have
            sent themselves takes their place.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Shejwalkar and Houmansadr, Manipulating the Byzantine: Optimizing Model Poisoning Attacks
          and Defenses for Federated Learning, NDSS 2021.

    Examples:
        >>> honest = torch.tensor([[1.0], [3.0], [7.0]])
        >>> attack = MinMax(perturbation="sign")
        >>> attack.craft(honest, torch.tensor([False, False, True]), None)
        tensor([[1.],
                [3.],
                [1.]])
    """

    colludes = True

    def __init__(self, *, perturbation: str = "std", full_knowledge: bool = True) -> None:
        self.perturbation = check_choice("perturbation", perturbation, PERTURBATIONS)
        self.full_knowledge = check_bool("full_knowledge", full_knowledge)

    def craft(self, updates: Tensor, malicious: Tensor, ctx: AttackContext) -> Tensor:
        """Send the farthest update that stays within the bound."""
        rows = reference(updates, malicious, self.full_knowledge)
        crafted = min_max(rows, perturbation(rows, self.perturbation))
        return torch.where(malicious[:, None], crafted, updates)
