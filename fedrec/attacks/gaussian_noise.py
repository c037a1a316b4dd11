"""The Gaussian attack."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec._checks import check_bool, check_float
from fedrec.attacks._rows import generators
from fedrec.attacks.base import Attack, AttackContext

__all__ = ["GaussianNoise"]


class GaussianNoise(Attack):
    r"""Untargeted attack: malicious clients send Gaussian noise.

    $$\tilde g_i = \xi_i \quad\text{or}\quad g_i + \xi_i, \qquad
    \xi_i \sim \mathcal N(0, \sigma^2 I)$$

    Each attacker's noise is a function of the seed, the round and its own id.

    Args:
        std: $\sigma > 0$ of every coordinate.
        additive: Add the noise to the honest update instead of sending it alone.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent,
          NeurIPS 2017 ($\sigma = 200$).

    Examples:
        >>> GaussianNoise(std=0.1, additive=True)
        GaussianNoise(std=0.1, additive=True)
    """

    def __init__(self, *, std: float = 200.0, additive: bool = False) -> None:
        self.std = check_float("std", std, minimum=0.0, open_minimum=True)
        self.additive = check_bool("additive", additive)

    def craft(self, updates: Tensor, malicious: Tensor, ctx: AttackContext) -> Tensor:
        """Draw the noise of each attacker."""
        drawn = generators(malicious, ctx)
        noise = torch.empty(len(drawn), updates.shape[1])
        for row, generator in zip(noise, drawn, strict=True):
            row.normal_(std=self.std, generator=generator)
        crafted = updates.clone()
        noise = noise.to(updates)
        crafted[malicious] = crafted[malicious] + noise if self.additive else noise
        return crafted
