"""Buffers of the model that are averaged over the clients asked in a round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedrec.exceptions import ConfigurationError
from fedrec.federation import Federation
from fedrec.types import CohortUpdates

__all__ = ["AveragedBuffers"]


class AveragedBuffers:
    """The values of the averaged buffers of a federation's module, from round to round.

    Args:
        federation: The federation; its layout names the averaged buffers.
        device: Device of the tensors.

    Attributes:
        values: Shape $(b,)$, or `None` if no buffers are averaged.
    """

    def __init__(self, federation: Federation, device: torch.device) -> None:
        self.values: Tensor | None = None
        self._federation = federation
        self._device = device
        self._sent: tuple[tuple[Tensor, Tensor], ...] = ()

    def select(self, names: Iterable[str] | Mapping[str, Mapping[str, Any]]) -> None:
        """Choose the averaged buffers; their first values are those of the module.

        Args:
            names: Names of the buffers, or the `buffers` of a manifest.

        Raises:
            ConfigurationError: If the module does not have these buffers, or the federation
                refuses them.
        """
        layout, module = self._federation.layout, self._federation.module
        names = names if isinstance(names, Mapping) else list(names)
        if names and self._federation.buffers == "refuse":
            raise ConfigurationError(
                f"Training changes buffers of {type(module).__name__}, which are "
                f"not part of a client update: {', '.join(f'`{name}`' for name in names)}. HINT: "
                'keep them as they are in training, or pass `buffers="average"` to average them '
                "over the clients asked in a round."
            )
        layout.select_buffers(module, names)
        self.values = layout.buffers(module) if names else None

    def add(self, sent: CohortUpdates) -> None:
        """Add clients' buffers to the mean at the end of the round."""
        if sent.buffers is not None and self.values is not None:
            self._sent = (*self._sent, (sent.num_samples, sent.buffers))

    def end_round(self) -> None:
        """Average the buffers that were sent in this round, weighted by samples.

        A value that no client changed keeps its bits.
        """
        if self._sent and self.values is not None:
            weights = torch.cat([w for w, _ in self._sent]).double()
            values = torch.cat([b for _, b in self._sent]).cpu()
            before = self.values.cpu()
            mean = self._federation.layout.round_buffers(
                (weights / weights.sum()) @ values.double()
            )
            unchanged = (values == before).all(dim=0)
            self.values = torch.where(unchanged, before, mean).to(self._device)
            self._sent = ()
