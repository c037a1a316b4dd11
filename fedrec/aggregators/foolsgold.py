"""FoolsGold."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from fedrec._checks import check_float
from fedrec.aggregators.base import Aggregator
from fedrec.exceptions import FedrecWarning
from fedrec.functional.aggregation.foolsgold import foolsgold_weights
from fedrec.functional.cosine import cosine_similarities
from fedrec.types import RoundContext

__all__ = ["FoolsGold"]


class FoolsGold(Aggregator):
    r"""Sum of the updates, those of clients that have been alike so far weighted down.

    Sybils pull into one direction round after round, while benign clients with different data do
    not. The rule remembers the sum of what each client sent, compares these sums by their cosines,
    and weighs every client between 0 (it has a twin) and 1, see
    [`foolsgold_weights`][fedrec.functional.foolsgold_weights]. As in the paper, the weighted sum is
    not divided by the number of clients, so the server's learning rate has to be that much smaller
    than for a mean; all parameters count as indicative features; client weights are ignored.

    Args:
        confidence: $\kappa > 0$: how fast a weight goes to 0 or 1 as similarity changes.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`. It is zero, with a `FedrecWarning`, if
          every client has a twin.

    Raises:
        ConfigurationError: If `confidence` is not positive.

    References:
        - Fung et al., The Limitations of Federated Learning in Sybil Settings, RAID 2020.

    Examples:
        >>> FoolsGold()(torch.tensor([[4.0, 4.0], [4.0, 4.0], [3.0, -3.0]]))
        tensor([ 3., -3.])
    """

    needs_client_ids = True

    def __init__(self, *, confidence: float = 1.0) -> None:
        self.confidence = check_float("confidence", confidence, minimum=0, open_minimum=True)
        self._rows: dict[str, int] = {}
        self._sums: Tensor | None = None

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Remember the updates, then add them up; without `ctx`, rows are always the same ones."""
        ids = ctx.client_ids if ctx is not None else tuple(map(str, range(len(updates))))
        weights = foolsgold_weights(
            cosine_similarities(self._remember(ids, updates)), self.confidence
        )
        if not bool((weights > 0).any()):
            warnings.warn(
                f"FoolsGold found a twin of each of {len(ids)} clients, so this round has no "
                "effect.",
                FedrecWarning,
                stacklevel=3,
            )
        return weights.to(updates) @ updates

    def _remember(self, ids: tuple[str, ...], updates: Tensor) -> Tensor:
        """Return the sums of what these clients sent, this round included."""
        new = [client_id for client_id in ids if client_id not in self._rows]
        self._rows.update({c: len(self._rows) + i for i, c in enumerate(new)})
        zeros = updates.new_zeros(len(new), updates.shape[1])
        sums = zeros if self._sums is None else self._sums.to(updates)
        self._sums = torch.cat([sums, zeros]) if new and self._sums is not None else sums
        rows = torch.tensor([self._rows[client_id] for client_id in ids], device=updates.device)
        self._sums.index_add_(0, rows, updates)
        # Of a sum that overflows, the direction is not lost.
        limit = torch.finfo(updates.dtype).max
        return self._sums[rows].clamp_(-limit, limit)

    def state_dict(self) -> dict[str, Any]:
        """Return the clients seen so far, and the sums of their updates, one row each."""
        return {"client_ids": list(self._rows), "sums": self._sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the sums."""
        self._rows = {client_id: row for row, client_id in enumerate(state["client_ids"])}
        self._sums = None if state["sums"] is None else state["sums"].clone()
