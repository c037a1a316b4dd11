"""Server momentum."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedrec._checks import check_float
from fedrec.aggregators.base import Aggregator
from fedrec.aggregators.wrapper import ServerStep
from fedrec.types import RoundContext

__all__ = ["FedAvgM"]


class FedAvgM(ServerStep):
    r"""Server momentum on what a rule returns.

    $$v \leftarrow \beta v + A, \qquad w \leftarrow w - \eta v$$

    $A$ is the aggregate of the wrapped rule, FedAvg in the paper, and $\eta$ the server's learning
    rate. The rule remembers $v$, which begins at zero.

    Args:
        rule: The rule whose result is the pseudo-gradient.
        momentum: $\beta$ in [0, 1).

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If `momentum` is out of range or `rule` is not an `Aggregator`.

    References:
        - Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual
          Classification, 2019.

    Examples:
        >>> import torch
        >>> from fedrec.aggregators import FedAvg
        >>> rule = FedAvgM(FedAvg(), momentum=0.5)
        >>> updates = torch.tensor([[1.0], [3.0]])
        >>> rule(updates), rule(updates)
        (tensor([2.]), tensor([3.]))
    """

    def __init__(self, rule: Aggregator, *, momentum: float = 0.9) -> None:
        super().__init__(rule)
        self.momentum = check_float("momentum", momentum, minimum=0, maximum=1, open_maximum=True)
        self._velocity: Tensor | None = None

    def step(self, aggregate: Tensor, ctx: RoundContext | None = None) -> Tensor:
        """Add the aggregate to the decayed sum of those before."""
        velocity = aggregate
        if self._velocity is not None:
            velocity = velocity + self.momentum * self._velocity.to(aggregate)
        self._velocity = velocity
        return velocity.clone()

    def state_dict(self) -> dict[str, Any]:
        """Return $v$, shape $(d,)$, or `None` before the first round; and the wrapped rule's."""
        return {**super().state_dict(), "velocity": self._velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over $v$, and the wrapped rule's memory."""
        super().load_state_dict(state)
        self._velocity = state["velocity"]
