"""The coordinate-wise median."""

from __future__ import annotations

from torch import Tensor

from fedrec.aggregators.base import Aggregator
from fedrec.functional.aggregation.order_statistics import coordinate_median
from fedrec.types import RoundContext

__all__ = ["Median"]


class Median(Aggregator):
    r"""Coordinate-wise median.

    For an even number of clients, the mean of the two middle values. As in the paper, all clients
    count the same: client weights are ignored.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    References:
        - Yin et al., Byzantine-Robust Distributed Learning, ICML 2018.

    Examples:
        >>> import torch
        >>> Median()(torch.tensor([[1.0], [2.0], [4.0], [100.0]]))
        tensor([3.])
    """

    needs = "columns"

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Take the median of every coordinate."""
        return coordinate_median(updates)

    def trims(self, num_clients: int) -> int:
        """All but the middle value, or the two middle ones."""
        return (num_clients - 1) // 2

    def max_byzantine(self, num_clients: int) -> int:
        """Any minority: both middle values are then bounded by benign ones on either side."""
        return (num_clients - 1) // 2
