"""PoisonedFL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedrec._checks import check_float, check_int
from fedrec.attacks.base import Attack, AttackContext
from fedrec.functional.attack.poisonedfl import consistent_update, is_aligned
from fedrec.random import torch_generator

__all__ = ["PoisonedFL"]


class PoisonedFL(Attack):
    r"""Untargeted attack: push the weights into one random direction, round after round.

    All malicious clients send the same update, whose signs $s$ are drawn once, and whose sizes are
    those of what benign clients must have sent, since a part of the last aggregate is known to be
    the attackers' own (see `fedrec.functional.consistent_update`). Its length is $c$ times that of
    the last aggregate. Every `period` rounds the attackers test whether the weights have moved
    along $s$ since the last test (`fedrec.functional.is_aligned`). If they have not, a defense
    filters what is sent, and $c$ is lowered by the factor `decay`, but not below `min_scale`.

    It takes neither data nor knowledge of other clients, so it is for fake clients that the
    attacker injects (`Federation.from_data(..., fake_clients=...)`), though any malicious client
    can do it. In the first round, in which there is no aggregate yet, zeros are sent, as in the
    authors' code. That code tests the movement over one round less than `period`, and takes a
    weight that did not move by its own sign; here it is not aligned.

    Args:
        scale: $c > 0$ to begin with.
        decay: Factor on $c$ after a failed test, in (0, 1].
        period: Rounds from one test to the next, at least 1.
        min_scale: $c$ is not lowered below this, at least 0.
        significance: Level of the test, in (0, 1).

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Xie et al., Model Poisoning Attacks to Federated Learning via Multi-Round Consistency,
          CVPR 2025.

    Examples:
        >>> PoisonedFL(scale=4.0).period
        50
    """

    def __init__(
        self,
        *,
        scale: float = 8.0,
        decay: float = 0.7,
        period: int = 50,
        min_scale: float = 0.5,
        significance: float = 0.01,
    ) -> None:
        self.scale = check_float("scale", scale, minimum=0, open_minimum=True)
        self.decay = check_float("decay", decay, minimum=0, maximum=1, open_minimum=True)
        self.period: int = check_int("period", period, minimum=1)
        self.min_scale = check_float("min_scale", min_scale, minimum=0)
        self.significance = check_float(
            "significance", significance, minimum=0, maximum=1, open_minimum=True, open_maximum=True
        )
        self.reset(())

    def reset(self, malicious: Sequence[str]) -> None:
        """Forget what was sent, and begin with the first scale."""
        self._factor = self.scale
        self._round = self._tested = -1
        self._weights: Tensor | None = None
        self._sent: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, what was sent last, and the weights at the last test."""
        return {
            "factor": self._factor,
            "round": self._round,
            "tested": self._tested,
            "weights": self._weights,
            "sent": self._sent,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._factor = float(state["factor"])
        self._round, self._tested = int(state["round"]), int(state["tested"])
        self._weights, self._sent = state["weights"], state["sent"]

    def craft(self, updates: Tensor, malicious: Tensor, ctx: AttackContext) -> Tensor:
        """Send the round's update, the same for all who are asked."""
        if not bool(malicious.any()):
            return updates
        # A recovery may ask in several portions: what a round sends is decided once.
        if ctx.round != self._round or self._sent is None:
            self._sent = self._next(updates, ctx)
            self._round = ctx.round
        return torch.where(malicious[:, None], self._sent.to(updates), updates)

    def _next(self, updates: Tensor, ctx: AttackContext) -> Tensor:
        generator = torch_generator(ctx.seed, ctx.purpose)
        drawn = torch.randint(0, 2, (updates.shape[1],), generator=generator)
        signs = (2 * drawn - 1).to(updates)
        if self._weights is None:
            self._weights, self._tested = ctx.global_weights.clone(), ctx.round
        elif ctx.round - self._tested >= self.period:
            moved = ctx.global_weights - self._weights.to(ctx.global_weights)
            lowered = self.decay * self._factor
            if lowered >= self.min_scale and not is_aligned(moved, signs, self.significance):
                self._factor = lowered
            self._weights, self._tested = ctx.global_weights.clone(), ctx.round
        if ctx.last_aggregate is None:
            return torch.zeros_like(updates[0])
        return consistent_update(ctx.last_aggregate.to(updates), self._sent, signs, self._factor)
