"""A little is enough."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec._checks import check_bool, check_float, is_integer
from fedrec.attacks._rows import counts, reference
from fedrec.attacks.base import Attack, AttackContext
from fedrec.exceptions import ConfigurationError, expected
from fedrec.functional.attack.alie import alie, alie_quantile

__all__ = ["ALIE"]


class ALIE(Attack):
    r"""Untargeted attack: a little is enough.

    All malicious clients send the mean of honest updates, shifted in every coordinate by $z$
    standard deviations: so little that there are benign clients farther out, which then look worse
    (see `fedrec.functional.attack.alie`).

    As in the paper the attackers estimate mean and standard deviation from what they would have
    sent themselves (one alone sends just that). With full knowledge they are those of the benign
    clients.

    Args:
        z: Standard deviations; `None` for the paper's quantile, a function of the clients in the
            round and how many of them are malicious.
        sign: Shift up (1) or down (-1).
        full_knowledge: Whether the attackers see the benign updates.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Baruch et al., A Little Is Enough: Circumventing Defenses For Distributed Learning,
          NeurIPS 2019.

    Examples:
        >>> ALIE(full_knowledge=True)
        ALIE(z=None, sign=-1, full_knowledge=True)
    """

    colludes = True
    by_columns = True

    def __init__(
        self, *, z: float | None = None, sign: int = -1, full_knowledge: bool = False
    ) -> None:
        self.z = None if z is None else check_float("z", z)
        if not is_integer(sign) or sign not in (-1, 1):
            raise ConfigurationError(expected("sign", "1 or -1", sign))
        self.sign = int(sign)
        self.full_knowledge = check_bool("full_knowledge", full_knowledge)

    def craft(self, updates: Tensor, malicious: Tensor, ctx: AttackContext) -> Tensor:
        """Send the shifted mean."""
        z = alie_quantile(*counts(malicious, ctx)) if self.z is None else self.z
        crafted = alie(reference(updates, malicious, self.full_knowledge), z, self.sign)
        return torch.where(malicious[:, None], crafted, updates)
