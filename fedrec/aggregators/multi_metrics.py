"""Multi-Metrics."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedrec._checks import check_float
from fedrec.aggregators.base import Aggregator
from fedrec.aggregators.byzantine import count_of
from fedrec.functional.aggregation.krum import lowest
from fedrec.functional.aggregation.means import weighted_mean
from fedrec.functional.aggregation.whitening import whitened_scores
from fedrec.functional.distances import squared_norms
from fedrec.functional.kernels._columns import inner_products, wide_blocks
from fedrec.types import RoundContext

__all__ = ["MultiMetrics"]


class MultiMetrics(Aggregator):
    r"""Averages the clients that differ least from the others, by three measures weighed together.

    With the client's local model $w_i = w_t - \eta_{\text{local}}\, g_i$, the measures are

    $$x_i = \left( \lVert w_i - w_t \rVert_1, \; \lVert w_i - w_t \rVert_2, \; \cos(w_t, w_i)
    \right)$$

    Their differences between clients are summed up and whitened
    ([`whitened_scores`][fedrec.functional.whitened_scores]), and of $m$ clients the
    $\lfloor p\, m \rfloor$ with the lowest scores (at least one) are averaged, by client weights.

    This is the paper. The authors' code takes other measures, of pairs of clients: the distance
    $\lVert w_i - w_j \rVert_1$, the difference of the norms of two models, and the squared cosine
    distance of two models.

    Args:
        local_lr: $\eta_{\text{local}} > 0$, by which an update makes a local model.
        fraction: $p$ in (0, 1].

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - `client_weights`: $(m,)$, non-negative; `None` means uniform.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If an argument is out of range.
        AggregationError: If there is no `ctx`, which has the global weights.

    References:
        - Huang et al., Multi-metrics Adaptively Identifies Backdoors in Federated Learning, ICCV
          2023.

    Examples:
        >>> MultiMetrics(local_lr=0.1)
        MultiMetrics(local_lr=0.1, fraction=0.3)
    """

    def __init__(self, *, local_lr: float, fraction: float = 0.3) -> None:
        self.local_lr = check_float("local_lr", local_lr, minimum=0, open_minimum=True)
        self.fraction = check_float("fraction", fraction, minimum=0, maximum=1, open_minimum=True)

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Average the clients with the lowest scores."""
        start = self._global_weights(ctx).to(updates)
        m = len(updates)
        count = max(1, count_of(self.fraction, m))
        chosen = lowest(whitened_scores(self._measures(updates, start)), count)
        weights = torch.zeros(m, dtype=torch.float64)
        weights[chosen] = 1.0 if client_weights is None else client_weights.cpu().double()[chosen]
        if not bool(weights.sum() > 0):
            weights[chosen] = 1.0
        return weighted_mean(updates, weights)

    def _measures(self, updates: Tensor, start: Tensor) -> Tensor:
        """Return the three measures of every client, shape (m, 3)."""
        manhattan = torch.stack([block.abs().sum(dim=1) for block in wide_blocks(updates)]).sum(0)
        squares = squared_norms(updates)
        square = float(squared_norms(start[None]))
        product = square - self.local_lr * inner_products(updates, start)
        length = (2 * product - square + self.local_lr**2 * squares).clamp(min=0).sqrt()
        lengths = math.sqrt(square) * length
        cosines = torch.where(lengths > 0, product / lengths, 0.0)
        return torch.stack([manhattan, squares.sqrt(), cosines], dim=1)
