"""The sign-flip attack."""

from __future__ import annotations

from torch import Tensor

from fedrec._checks import check_float
from fedrec.attacks._rows import replaced
from fedrec.attacks.base import Attack, AttackContext

__all__ = ["SignFlip"]


class SignFlip(Attack):
    r"""Untargeted attack: malicious clients send the opposite of what they computed.

    $$\tilde g_i = -\lambda\, g_i$$

    It needs no knowledge of anybody else.

    Args:
        scale: $\lambda > 0$.

    Raises:
        ConfigurationError: If `scale` is not positive.

    References:
        - Li et al., RSA: Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning
          from Heterogeneous Datasets, AAAI 2019.

    Examples:
        >>> import torch
        >>> attack = SignFlip(scale=2.0)
        >>> attack.craft(torch.ones(2, 1), torch.tensor([True, False]), None)
        tensor([[-2.],
                [ 1.]])
    """

    def __init__(self, *, scale: float = 1.0) -> None:
        self.scale = check_float("scale", scale, minimum=0.0, open_minimum=True)

    def craft(self, updates: Tensor, malicious: Tensor, ctx: AttackContext) -> Tensor:
        """Turn the malicious updates around."""
        return replaced(updates, malicious, -self.scale * updates[malicious], updates)
