"""Local training other than the recorded one: how much of it, and what it strives for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedrec.clients.step import training_step

__all__ = ["LocalObjective", "LocalWork"]


class LocalObjective:
    """Another objective of local training than the module's own, see `LocalWork`.

    As it stands it is the module's: override what is to differ. It must not remember anything, as
    one object may serve several clients.

    Examples:
        >>> class Ascent(LocalObjective):
        ...     "Trains to raise the loss."
        ...     def loss(self, module, batch, step):
        ...         return -super().loss(module, batch, step)
        >>> LocalWork(local_epochs=5, lr=0.01, objective=Ascent()).is_as_usual
        False
    """

    def loss(self, module: Any, batch: Any, step: int) -> Tensor | None:
        """Return what a local step minimises, a scalar; `None` skips the step.

        Args:
            module: The client's module, with the current parameters.
            batch: A mini-batch on the device.
            step: Local step, 0-based.
        """
        return training_step(module, batch, step)

    def gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients that the optimiser gets, by parameter name; as they are here."""
        return gradients

    def project(self, parameters: Mapping[str, Tensor]) -> None:
        """Change parameters in place after a step of the optimiser; here not at all.

        Args:
            parameters: float64 values by parameter name.
        """

    def is_done(self, module: Any, batch: Any) -> bool:
        """Whether to stop after this step, before the steps are up; here never.

        Args:
            module: The client's module, after the step.
            batch: The step's mini-batch.
        """
        return False


@dataclass(frozen=True)
class LocalWork:
    """Local training other than the recorded one, for one call of `RecoveryContext.exact`.

    What is `None` stays as the client has it.

    Args:
        local_steps: Mini-batch steps each client takes, at least 1.
        local_epochs: Passes over the data instead, at least 1.
        batch_size: Samples per batch, at least 1.
        lr: Learning rate of the module's optimizer, constant (its schedulers are left out); what
            was subtracted is divided by it.
        objective: What to strive for instead of the module's own loss.
    """

    local_steps: int | None = None
    local_epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    objective: LocalObjective | None = None

    @property
    def is_as_usual(self) -> bool:
        """Whether nothing differs but the number of local steps."""
        return self == LocalWork(self.local_steps)
