"""The Krum attack."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec._checks import check_bool, check_float
from fedrec.attacks._rows import reference
from fedrec.attacks.base import Attack, AttackContext
from fedrec.functional.attack.krum_attack import krum_attack, krum_attack_partial

__all__ = ["KrumAttack"]


class KrumAttack(Attack):
    r"""Untargeted attack against Krum, effective against other rules that select by distance too.

    All malicious clients send the same update: as far against the honest direction as it can be
    while Krum still picks it, since it supports itself (see `fedrec.functional.krum_attack`).

    Args:
        full_knowledge: Whether the attackers see the benign updates. If not, what they would have
            sent themselves takes their place.
        threshold: Smallest step $\lambda > 0$ per coordinate to try, in units of an update.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Fang et al., Local Model Poisoning Attacks to Byzantine-Robust Federated Learning,
          USENIX Security 2020.

    Examples:
        >>> KrumAttack()
        KrumAttack(full_knowledge=True, threshold=1e-05)
    """

    colludes = True

    def __init__(self, *, full_knowledge: bool = True, threshold: float = 1e-5) -> None:
        self.full_knowledge = check_bool("full_knowledge", full_knowledge)
        self.threshold = check_float("threshold", threshold, minimum=0.0, open_minimum=True)

    def craft(self, updates: Tensor, malicious: Tensor, ctx: AttackContext) -> Tensor:
        """Send the farthest update that Krum picks."""
        if self.full_knowledge:
            crafted = krum_attack(updates, malicious, self.threshold)
        else:
            own = reference(updates, malicious, full_knowledge=False)
            crafted = krum_attack_partial(own, self.threshold)
        return torch.where(malicious[:, None], crafted, updates)
