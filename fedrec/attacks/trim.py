"""The Trim attack."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec._checks import check_float
from fedrec.attacks.base import Attack
from fedrec.functional.trim import trim_attack
from fedrec.random import torch_generator
from fedrec.types import AttackContext

__all__ = ["TrimAttack"]


class TrimAttack(Attack):
    r"""Untargeted attack against the trimmed mean, effective against other rules too.

    In every coordinate, malicious clients send a value just beyond the benign extreme that lies
    against the direction in which the honest updates would go: the smallest honest value divided or
    multiplied by a factor, or the largest (see `fedrec.functional.trim`). The factor is
    drawn from $U[1, b_{\max}]$ for every coordinate, attacker and round. Full knowledge: direction
    and extremes are over all clients' honest updates, the attackers' own included.

    Each attacker's draws depend on its own id and the round alone, so it sends the same whoever
    else is still there, given the same honest updates.

    Args:
        b_max: Largest factor beyond the benign extreme, at least 1.

    Raises:
        ConfigurationError: If `b_max` is below 1.

    References:
        - Fang et al., Local Model Poisoning Attacks to Byzantine-Robust Federated Learning,
          USENIX Security 2020.

    Examples:
        >>> TrimAttack()
        TrimAttack(b_max=2.0)
    """

    full_knowledge = True

    def __init__(self, b_max: float = 2.0) -> None:
        self.b_max = check_float("b_max", b_max, minimum=1.0)

    def craft(self, updates: Tensor, malicious: Tensor, ctx: AttackContext) -> Tensor:
        """Send values just beyond the benign extremes."""
        attackers = [ctx.client_ids[i] for i in malicious.nonzero().flatten().tolist()]
        if not attackers:
            return updates
        draws = torch.empty(len(attackers), updates.shape[1])
        for row, client_id in zip(draws, attackers, strict=True):
            row.uniform_(generator=torch_generator(ctx.seed, ctx.purpose, ctx.round, client_id))
        return trim_attack(updates, malicious, draws, self.b_max)
