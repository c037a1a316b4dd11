"""The abstract client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from fedrec._checks import check_int
from fedrec.exceptions import ConfigurationError, expected
from fedrec.types import ClientUpdate, RoundContext

__all__ = ["Client"]


class Client(ABC):
    """A participant: given global weights, it returns its update.

    Subclass it to bring your own local training; use `LightningClient` for a LightningModule.

    Args:
        client_id: Unique name.
        num_samples: Size of the local data set before any poisoning, at least 1: the client's
            weight in weighted rules.

    Raises:
        ConfigurationError: If `client_id` is no text, or empty, or `num_samples` less than 1.

    Examples:
        >>> import torch
        >>> class Pull(Client):
        ...     "Its loss is half the squared distance to its own centre."
        ...     def __init__(self, client_id, centre):
        ...         super().__init__(client_id, num_samples=1)
        ...         self.centre = centre
        ...     def local_update(self, global_weights, ctx):
        ...         return ClientUpdate(update=global_weights - self.centre, num_samples=1)
        >>> Pull("a", torch.ones(2)).local_update(torch.zeros(2), None).update
        tensor([-1., -1.])
    """

    def __init__(self, client_id: str, *, num_samples: int) -> None:
        if not isinstance(client_id, str) or not client_id:
            raise ConfigurationError(expected("client_id", "text that is not empty", client_id))
        self.client_id = client_id
        self.num_samples = check_int("num_samples", num_samples, minimum=1)

    @abstractmethod
    def local_update(self, global_weights: Tensor, ctx: RoundContext) -> ClientUpdate:
        """Train locally from the global weights.

        Args:
            global_weights: Shape $(d,)$; must not be changed.
            ctx: The round. Draw random numbers only as functions of `ctx.seed`, `ctx.round` and
                the client's id, so that the client replays in recovery what it did in recording.

        Returns:
            The pseudo-gradient, shape $(d,)$, and the client's number of samples.
        """

    def training_args(self) -> dict[str, Any]:
        """Return the settings of local training by name, for the manifest of a recording.

        A recovery that replays batches has to train with the same settings.
        """
        return {}

    def num_local_steps(self, ctx: RoundContext) -> int:
        """Return how many optimiser steps `local_update` takes in this round (for the ledger)."""
        return 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.client_id!r}, num_samples={self.num_samples})"
