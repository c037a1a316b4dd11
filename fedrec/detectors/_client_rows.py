"""A vector per client, remembered from round to round."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.types import CohortUpdates

__all__ = ["ClientRows"]


class ClientRows:
    """One row per client, zero until the client first takes part."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}
        self._values = torch.zeros(0, 0)

    def read(self, sent: CohortUpdates) -> tuple[Tensor, Tensor]:
        """Return the rows of some clients, and which of the clients are new.

        Args:
            sent: Updates of the round.

        Returns:
            Shapes $(m, d)$ and $(m,)$, bool, on the CPU.
        """
        new = torch.tensor([c not in self._index for c in sent.client_ids])
        rows = self._rows(sent)  # makes room for the new ones first
        return self._values[rows], new

    def write(self, sent: CohortUpdates, rows: Tensor) -> None:
        """Remember these rows, shape $(m, d)$, for clients."""
        numbers = self._rows(sent)
        self._values[numbers] = rows

    def _rows(self, sent: CohortUpdates) -> Tensor:
        for client in sent.client_ids:
            self._index.setdefault(client, len(self._index))
        d, missing = sent.updates.shape[1], len(self._index) - len(self._values)
        if missing:
            more = sent.updates.new_zeros(missing, d)
            self._values = torch.cat([self._values.to(more).reshape(-1, d), more])
        return torch.tensor([self._index[c] for c in sent.client_ids], device=self._values.device)
