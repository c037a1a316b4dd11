"""Any optimiser of torch at the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedrec._checks import check_choice
from fedrec.aggregators.base import Aggregator
from fedrec.aggregators.wrapper import ServerStep
from fedrec.exceptions import AggregationError, ConfigurationError, expected
from fedrec.types import RoundContext

__all__ = ["ServerOptimizer"]

# Those whose step is proportional to the learning rate, and needs nothing but a gradient.
_OPTIMIZERS = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "SGD",
)


class ServerOptimizer(ServerStep):
    r"""An optimiser of torch at the server, on what a rule returns.

    The aggregate of the wrapped rule is the gradient that the optimiser gets; what it subtracts
    from the global weights is the result. The optimiser's learning rate is the server's: it works
    with 1 here, and the server then multiplies by `server_lr`. It remembers what the optimiser
    keeps from step to step.

    Args:
        rule: The rule whose result is the gradient.
        optimizer: A class of `torch.optim`: `"Adadelta"`, `"Adagrad"`, `"Adam"`, `"AdamW"`,
            `"Adamax"`, `"NAdam"`, `"RAdam"`, `"RMSprop"` or `"SGD"`.
        optimizer_args: Further arguments of the class, `lr` excepted.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If the optimiser is none of these, or does not take the arguments.
        AggregationError: If it decays weights, but there is no context to take them from.

    References:
        - Reddi et al., Adaptive Federated Optimization, ICLR 2021.

    Examples:
        >>> from fedrec.aggregators import Median
        >>> rule = ServerOptimizer(Median(), optimizer="SGD", optimizer_args={"momentum": 0.5})
        >>> updates = torch.tensor([[1.0], [2.0], [9.0]])
        >>> rule(updates), rule(updates)
        (tensor([2.]), tensor([3.]))
    """

    def __init__(
        self,
        rule: Aggregator,
        *,
        optimizer: str = "SGD",
        optimizer_args: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(rule)
        self.optimizer = check_choice("optimizer", optimizer, _OPTIMIZERS)
        self.optimizer_args = None if optimizer_args is None else dict(optimizer_args)
        if "lr" in (optimizer_args or {}):
            hint = "the learning rate is `server_lr`."
            requirement = "arguments without `lr`"
            raise ConfigurationError(
                expected("optimizer_args", requirement, self.optimizer_args, hint=hint)
            )
        try:
            self._make(torch.zeros(1))
        except (TypeError, ValueError) as error:
            requirement = f"arguments of torch.optim.{optimizer}"
            raise ConfigurationError(
                expected("optimizer_args", requirement, self.optimizer_args, hint=f"{error}.")
            ) from error
        self._state: dict[str, Any] = {}

    def _make(self, parameter: Tensor) -> torch.optim.Optimizer:
        cls = getattr(torch.optim, self.optimizer)
        made: torch.optim.Optimizer = cls([parameter], lr=1.0, **(self.optimizer_args or {}))
        return made

    def step(self, aggregate: Tensor, ctx: RoundContext | None = None) -> Tensor:
        """Return what the optimiser subtracts for this aggregate."""
        gradient = aggregate.double()
        parameter = torch.zeros_like(gradient)
        optimizer = self._make(parameter)
        # Unless weights decay, a step is the same from everywhere, and at zero loses no digits.
        if optimizer.defaults["weight_decay"]:
            if ctx is None:
                raise AggregationError(
                    f"{self.optimizer} decays the global weights, but there is no `ctx`. "
                    'HINT: pass `ctx=`, or `optimizer_args={"weight_decay": 0}`.'
                )
            parameter.copy_(ctx.global_weights)
        before = parameter.clone()
        optimizer.state[parameter].update(
            # Counters belong on the CPU.
            (name, value.to(parameter.device if value.ndim else "cpu"))
            for name, value in self._state.items()
            if value is not None
        )
        parameter.grad = gradient
        optimizer.step()
        self._state = dict(optimizer.state[parameter])
        return (before - parameter).to(aggregate.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return what the optimiser keeps, by its own names; and the wrapped rule's memory."""
        return {**super().state_dict(), "optimizer": dict(self._state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what the optimiser keeps, and the wrapped rule's memory."""
        super().load_state_dict(state)
        # Optimisers change what they keep in place.
        self._state = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in state["optimizer"].items()
        }
