"""The adaptive server optimiser FedAdam."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from fedrec._checks import check_float
from fedrec.aggregators.base import Aggregator
from fedrec.aggregators.wrapper import ServerStep
from fedrec.functional.aggregation.server_optimizers import adaptive_server_step
from fedrec.functional.kernels._columns import wide_dtype
from fedrec.types import RoundContext

__all__ = ["FedAdam"]


class FedAdam(ServerStep):
    r"""The server's Adam on what a rule returns, as in the paper: without bias correction.

    $$m \leftarrow \beta_1 m + (1 - \beta_1) A, \qquad
    v \leftarrow \beta_2 v + (1 - \beta_2) A^2, \qquad
    w \leftarrow w - \eta \frac{m}{\sqrt v + \tau}$$

    $A$ is the aggregate of the wrapped rule, FedAvg in the paper, and $\eta$ the server's learning
    rate. The rule remembers $m$, which begins at 0, and $v$, which begins at $\tau^2$.
    `torch.optim.Adam` corrects for the bias of both; `ServerOptimizer(rule, "Adam")` is that one.

    Args:
        rule: The rule whose result is the pseudo-gradient.
        beta1: Decay $\beta_1$ of the momentum, in [0, 1).
        beta2: Decay $\beta_2$ of the variance, in [0, 1).
        tau: Degree of adaptivity $\tau > 0$: entries of $A$ far below are hardly scaled up. It is
            in the unit of the updates. In the paper these are differences of weights, so its
            $\tau$ divided by the clients' learning rate is the same here.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If an argument is out of range or `rule` is not an `Aggregator`.

    References:
        - Reddi et al., Adaptive Federated Optimization, ICLR 2021.

    Examples:
        >>> from fedrec.aggregators import FedAvg
        >>> rule = FedAdam(FedAvg(), beta1=0.5, beta2=0.0, tau=1.0)
        >>> rule(torch.tensor([[3.0], [3.0]]))
        tensor([0.3750])
    """

    _yogi: ClassVar[bool] = False

    def __init__(
        self, rule: Aggregator, *, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3
    ) -> None:
        super().__init__(rule)
        self.beta1 = check_float("beta1", beta1, minimum=0, maximum=1, open_maximum=True)
        self.beta2 = check_float("beta2", beta2, minimum=0, maximum=1, open_maximum=True)
        self.tau = check_float("tau", tau, minimum=0, open_minimum=True)
        self._momentum: Tensor | None = None
        self._variance: Tensor | None = None

    def step(self, aggregate: Tensor, ctx: RoundContext | None = None) -> Tensor:
        """Return the step that the aggregate leads to."""
        momentum, variance = self._momentum, self._variance
        if momentum is None or variance is None:
            momentum = torch.zeros_like(aggregate)
            variance = torch.full_like(aggregate, self.tau**2, dtype=wide_dtype(aggregate.device))
        step, self._momentum, self._variance = adaptive_server_step(
            aggregate,
            momentum,
            variance,
            beta1=self.beta1,
            beta2=self.beta2,
            tau=self.tau,
            yogi=self._yogi,
        )
        return step

    def state_dict(self) -> dict[str, Any]:
        """Return $m$ and $v$, shape $(d,)$ each, or `None`; and the wrapped rule's memory."""
        own = {"momentum": self._momentum, "variance": self._variance}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over $m$ and $v$, and the wrapped rule's memory."""
        super().load_state_dict(state)
        self._momentum, self._variance = state["momentum"], state["variance"]
