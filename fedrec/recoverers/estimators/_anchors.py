"""What estimates that start from a client's last exact update have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedrec._checks import check_fraction
from fedrec.recoverers.estimators.base import Estimator
from fedrec.types import RoundRecord

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView

__all__ = ["WINDOW", "Anchored", "picking"]

# Rounds whose changes decide together about the weights.
WINDOW = 3


class Anchored(Estimator):
    r"""Keeps anchors, and regresses $\beta$ and $\gamma$; a subclass calls `_begin` at its end."""

    assumes_gradients = True

    def __init__(
        self, gain: float | str, history_weight: float | str, curvature_weight: float | str
    ) -> None:
        self.gain = check_fraction("gain", gain, ("spacing",), positive=True)
        self.history_weight = check_fraction("history_weight", history_weight, ("pooled",))
        self.curvature_weight = check_fraction("curvature_weight", curvature_weight, ("pooled",))
        self._rows: dict[str, int] = {}

    def _begin(self) -> None:
        """Forget what was observed."""
        given = (self.history_weight, self.curvature_weight)
        self._beta, self._gamma = (1.0 if isinstance(w, str) else w for w in given)
        # Of the last rounds: change with prediction, prediction with itself; rest of the change
        # now with the rest of the recorded change, that with itself.
        self._products = torch.zeros(WINDOW, 4, dtype=torch.float64)
        self._round = torch.full((len(self._rows),), -1, dtype=torch.int64)
        self._models: dict[int, tuple[Tensor, Tensor]] = {}
        self._anchors = self._exact = self._recorded = torch.empty(0)
        self._without_history: Tensor | None = None

    def _allocate(self, weights: Tensor) -> None:
        """Make room on the device of the weights."""
        c, d = len(self._rows), weights.numel()
        self._anchors, self._exact, self._recorded = (weights.new_zeros(c, d) for _ in range(3))

    def start(self, history: HistoryView, rounds: range) -> None:
        """Forget all that was observed."""
        self._rows = {c: i for i, c in enumerate(history.remaining)}
        self._begin()

    def _moved_to(self, record: RoundRecord, global_weights: Tensor, rows: Tensor) -> None:
        """Note that the anchors of these rows are of this round, and keep its models."""
        self._round[rows] = record.round
        self._models[record.round] = global_weights.clone(), record.global_weights.clone()
        self._models = {t: self._models[t] for t in _distinct(self._round.tolist())}
        self._without_history = None

    def _regress(self, found: Tensor) -> None:
        r"""Regress the weights that are `"pooled"` over this round and those before.

        Args:
            found: Of this round, products of four vectors with each other, shape $(4, 4)$, float64:
                the change now, the recorded one, and what curvature predicts of both.
        """
        products = torch.zeros(4, dtype=torch.float64)
        if self.curvature_weight == "pooled":
            products[:2] = torch.stack([found[0, 2] + found[1, 3], found[2, 2] + found[3, 3]])
            explained, size = (self._products[1:, :2].sum(dim=0) + products[:2]).tolist()
            if size > 0:
                self._gamma = min(max(explained / size, 0.0), 1.0)
        if self.history_weight == "pooled":
            # Of what curvature leaves of the changes.
            left = torch.tensor(
                [[1, 0, -self._gamma, 0], [0, 1, 0, -self._gamma]], dtype=torch.float64
            )
            products[2:] = (left @ found @ left.mT)[:, 1]
        self._products = torch.cat([self._products[1:], products[None]])
        explained, size = self._products[:, 2:].sum(dim=0).tolist()
        if size > 0:
            self._beta = min(max(explained / size, 0.0), 1.0)

    def _origins(self) -> Tensor:
        """Return the anchors without beta times what was recorded then."""
        if self._without_history is None:
            self._without_history = torch.sub(self._anchors, self._recorded, alpha=self._beta)
        return self._without_history

    def _known_rounds(self, rows: Tensor) -> tuple[list[int], Tensor]:
        """Return the rounds of anchors, and which of them is whose, any for a client without."""
        rounds = self._round[rows].tolist()
        known = _distinct(rounds)
        place = {t: i for i, t in enumerate(known)}
        return known, torch.tensor([place.get(t, 0) for t in rounds], dtype=torch.int64)

    def _rows_of(self, record: RoundRecord) -> Tensor:
        return torch.tensor([self._rows[c] for c in record.client_ids], dtype=torch.int64)


def _distinct(rounds: list[int]) -> list[int]:
    """Return each of these rounds once, in order, without those that stand for none."""
    return sorted(t for t in set(rounds) if t >= 0)


def picking(rows: Tensor, device: torch.device) -> slice | Tensor:
    """Return what picks these rows: without a copy where they follow each other."""
    if len(rows) and bool((rows.diff() == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows.to(device)
