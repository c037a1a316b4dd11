"""What local training strives for, where that is not what the module says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedrec.clients.local import training_step

__all__ = ["LocalObjective"]


class LocalObjective:
    """Another objective of local training than the module's own, see `LocalWork`.

    As it stands it is the module's: override what is to differ. It must not remember anything, as
    one object may serve several clients.

    Examples:
        >>> class Ascent(LocalObjective):
        ...     "Trains to raise the loss."
        ...     def loss(self, module, batch, step):
        ...         return -super().loss(module, batch, step)
        >>> from fedrec.types import LocalWork
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
