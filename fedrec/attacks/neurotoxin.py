"""Neurotoxin."""

from __future__ import annotations

from torch import Tensor

from fedrec._checks import check_float
from fedrec.attacks._rows import replaced
from fedrec.attacks.base import Attack, AttackContext
from fedrec.attacks.wrapper import AttackWrapper
from fedrec.functional.attack.neurotoxin import outside_top

__all__ = ["Neurotoxin"]


class Neurotoxin(AttackWrapper):
    r"""An attack in the coordinates that benign clients hardly change, so that it lasts.

    The aggregate of the round before shows which coordinates benign clients move most. Malicious
    updates are projected onto the others (`fedrec.functional.outside_top`), so that later honest
    updates do not undo them. In the first round there is no such aggregate, and nothing is changed.

    The paper projects in every local step. For one step of SGD that is the same; of several steps
    it is their sum that is projected here.

    Args:
        attack: What is projected, most often a `BackdoorAttack`.
        top_fraction: Fraction of the coordinates that is left alone, in [0, 1).

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Zhang et al., Neurotoxin: Durable Backdoors in Federated Learning, ICML 2022.

    Examples:
        >>> from fedrec.attacks import BackdoorAttack
        >>> Neurotoxin(BackdoorAttack(scale=5.0), top_fraction=0.05).top_fraction
        0.05
    """

    def __init__(self, attack: Attack, *, top_fraction: float = 0.05) -> None:
        super().__init__(attack)
        self.top_fraction = check_float(
            "top_fraction", top_fraction, minimum=0.0, maximum=1.0, open_maximum=True
        )

    def craft(self, updates: Tensor, malicious: Tensor, ctx: AttackContext) -> Tensor:
        """Project what the wrapped attack sends."""
        crafted = self.attack.craft(updates, malicious, ctx)
        if ctx.last_aggregate is None:
            return crafted
        count = round(self.top_fraction * updates.shape[1])
        projected = outside_top(crafted[malicious], ctx.last_aggregate, count)
        return replaced(updates, malicious, projected, crafted)
