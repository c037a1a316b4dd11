"""The Trim attack."""

from __future__ import annotations

from torch import Tensor

from fedrec._checks import check_bool, check_float
from fedrec.attacks._rows import uniform_rows
from fedrec.attacks.base import Attack, AttackContext
from fedrec.functional.attack.trim import trim_attack, trim_attack_partial

__all__ = ["TrimAttack"]


class TrimAttack(Attack):
    r"""Untargeted attack against the trimmed mean, effective against other rules too.

    In every coordinate, malicious clients send a value just beyond the benign extreme that lies
    against the direction in which the honest updates would go: the smallest honest value divided or
    multiplied by a factor, or the largest (see `fedrec.functional.attack.trim`). The factor is
    drawn from $U[1, b_{\max}]$ for every coordinate, attacker and round. Full knowledge: direction
    and extremes are over all clients' honest updates, the attackers' own included.

    With partial knowledge the attackers know their own honest updates alone. They take the
    direction from their mean, and draw values between 3 and 4 standard deviations away from it.

    Each attacker's draws depend on its own id and the round alone, so it sends the same, whichever
    other clients are left, given the same honest updates.

    Args:
        b_max: Largest factor beyond the benign extreme, at least 1; not used with partial
            knowledge.
        full_knowledge: Whether the attackers see the benign updates.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Fang et al., Local Model Poisoning Attacks to Byzantine-Robust Federated Learning,
          USENIX Security 2020.

    Examples:
        >>> TrimAttack()
        TrimAttack(b_max=2.0, full_knowledge=True)
    """

    full_knowledge = True
    colludes = True
    by_columns = True

    def __init__(self, *, b_max: float = 2.0, full_knowledge: bool = True) -> None:
        self.b_max = check_float("b_max", b_max, minimum=1.0)
        self.full_knowledge = check_bool("full_knowledge", full_knowledge)

    def craft(self, updates: Tensor, malicious: Tensor, ctx: AttackContext) -> Tensor:
        """Send values just beyond the benign extremes."""
        if not bool(malicious.any()):
            return updates
        draws = uniform_rows(malicious, ctx, updates.shape[1])
        if self.full_knowledge:
            return trim_attack(updates, malicious, draws, self.b_max)
        crafted = updates.clone()
        crafted[malicious] = trim_attack_partial(updates[malicious], draws)
        return crafted
