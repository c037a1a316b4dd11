"""Local training that differs from the recorded one: in its amount, or in its objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedrec.clients.step import training_step

__all__ = ["LocalObjective", "LocalWork"]


class LocalObjective:
    """An objective of local training in place of the module's own, see `LocalWork`.

    This base class has the module's own objective: override the methods that are to differ. An
    objective must keep no state, as one object may serve several clients.

    Examples:
        >>> class Ascent(LocalObjective):
        ...     "Trains to raise the loss."
        ...     def loss(self, module, batch, step):
        ...         return -super().loss(module, batch, step)
        >>> LocalWork(local_epochs=5, lr=0.01, objective=Ascent()).is_as_usual
        False
    """

    def loss(self, module: Any, batch: Any, step: int) -> Tensor | None:
        """Return the loss that a local step minimises, a scalar; `None` skips the step.

        Args:
            module: The client's module, with the current parameters.
            batch: A mini-batch on the device.
            step: Index of the batch in its pass over the data, from 0.
        """
        return training_step(module, batch, step)

    def gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients that the optimiser gets, by parameter name; here unchanged."""
        return gradients

    def project(self, parameters: Mapping[str, Tensor]) -> None:
        """Change parameters in place after a step of the optimiser; here not at all.

        Args:
            parameters: float64 values by parameter name.
        """

    def is_done(self, module: Any, batch: Any) -> bool:
        """Whether to end local training after this step; here never.

        Args:
            module: The client's module, after the step.
            batch: The step's mini-batch.
        """
        return False


@dataclass(frozen=True)
class LocalWork:
    """Settings of local training for one call of `RecoveryContext.exact`, in place of the recorded.

    A setting that is `None` is the client's own.

    Args:
        local_steps: Mini-batch steps each client takes, at least 1.
        local_epochs: Passes over the data instead of `local_steps`, at least 1.
        batch_size: Samples per batch, at least 1.
        lr: Constant learning rate of the module's optimiser (its schedulers are left out). Updates
            are divided by it.
        objective: Objective in place of the module's own loss.
    """

    local_steps: int | None = None
    local_epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    objective: LocalObjective | None = None

    @property
    def is_as_usual(self) -> bool:
        """Whether only `local_steps` may be set."""
        return self == LocalWork(self.local_steps)
