"""The Mimic attack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedrec._checks import check_int
from fedrec.attacks.base import Attack, AttackContext
from fedrec.functional.attack.mimic import mimic_direction
from fedrec.random import torch_generator

__all__ = ["Mimic"]


class Mimic(Attack):
    r"""Untargeted attack: copy one benign client, so that its data count too much.

    What they send is a benign update, but where clients have different data, the aggregate follows
    the client that is copied. In the first rounds the attackers follow the direction $z$ in
    which benign updates differ most (`fedrec.functional.mimic_direction`), and copy the client that
    is farthest along it, $\operatorname{argmax}_i z^\top g_i$. From then on they copy the client
    chosen last, or, in a round without that client, the client that is farthest along.

    Args:
        warmup_rounds: Rounds in which the attackers look for the client to copy, at least 1.

    Raises:
        ConfigurationError: If `warmup_rounds` is below 1.

    References:
        - Karimireddy et al., Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing,
          ICLR 2022.

    Examples:
        >>> Mimic(warmup_rounds=5)
        Mimic(warmup_rounds=5)
    """

    full_knowledge = True

    def __init__(self, *, warmup_rounds: int = 20) -> None:
        self.warmup_rounds: int = check_int("warmup_rounds", warmup_rounds, minimum=1)
        self.reset(())

    def reset(self, malicious: Sequence[str]) -> None:
        """Forget which client to copy."""
        self._num_seen = 0
        self._last_round = -1
        self._target = ""
        self._mean: Tensor | None = None
        self._direction: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return which client to copy, and the direction by which it is chosen."""
        return {
            "num_seen": self._num_seen,
            "last_round": self._last_round,
            "target": self._target,
            "mean": self._mean,
            "direction": self._direction,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._num_seen, self._last_round = int(state["num_seen"]), int(state["last_round"])
        self._target = str(state["target"])
        self._mean, self._direction = state["mean"], state["direction"]

    def craft(self, updates: Tensor, malicious: Tensor, ctx: AttackContext) -> Tensor:
        """Copy a benign client."""
        rows = (~malicious).nonzero().flatten().tolist()
        if not rows or len(rows) == len(updates):
            return updates
        ids = [ctx.client_ids[row] for row in rows]
        looking = self._num_seen < self.warmup_rounds and ctx.round > self._last_round
        if looking or self._direction is None or self._target not in ids:
            benign = updates[~malicious]
            direction = self._direction
            if direction is None:
                generator = torch_generator(ctx.seed, ctx.purpose)
                direction = torch.randn(updates.shape[1], generator=generator).to(updates)
            if looking:
                self._mean, direction = mimic_direction(
                    benign, direction, self._mean, self._num_seen
                )
                self._direction = direction
                self._num_seen += 1
                self._last_round = ctx.round
            chosen = ids[int((benign @ direction).argmax())]
            if looking:
                self._target = chosen
        else:
            chosen = self._target
        copied = updates[rows[ids.index(chosen)]]
        return torch.where(malicious[:, None], copied, updates)
