"""The coordinate-wise trimmed mean."""

from __future__ import annotations

from torch import Tensor

from fedrec.aggregators.base import Aggregator
from fedrec.aggregators.byzantine import check_count, count_of
from fedrec.functional.aggregation.order_statistics import check_trim, trimmed_mean
from fedrec.types import RoundContext

__all__ = ["TrimmedMean"]


class TrimmedMean(Aggregator):
    r"""Coordinate-wise trimmed mean.

    Drops the $k$ largest and the $k$ smallest values of every coordinate and averages the rest. As
    in the paper, all clients count the same: client weights are ignored.

    Args:
        trim: Entries removed at each end of every coordinate: a count $k$, or a fraction $\beta$ of
            the cohort in [0, 0.5), then $k = \lfloor \beta m \rfloor$, computed from the decimal
            number as written (`0.29` of 100 is 29). A fraction keeps its meaning when clients are
            left out, as in a recovery; a count can become impossible.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If `trim` is negative, or a fraction of 0.5 or more.
        AggregationError: If twice the trimmed count reaches m.

    References:
        - Yin et al., Byzantine-Robust Distributed Learning, ICML 2018.

    Examples:
        >>> import torch
        >>> TrimmedMean(trim=1)(torch.tensor([[1.0], [2.0], [9.0]]))
        tensor([2.])
        >>> TrimmedMean(trim=0.29).num_trim(100)
        29
    """

    needs = "columns"

    def __init__(self, *, trim: int | float) -> None:
        self.trim = check_count("trim", trim)

    def num_trim(self, num_clients: int) -> int:
        """Return how many entries are removed at each end for this many clients."""
        return count_of(self.trim, num_clients)

    def check_cohort(self, num_clients: int) -> None:
        """Raise `AggregationError` if nothing would be left."""
        check_trim(self.num_trim(num_clients), num_clients)

    def trims(self, num_clients: int) -> int:
        """As `num_trim`."""
        return self.num_trim(num_clients)

    def max_byzantine(self, num_clients: int) -> int:
        """As many as are trimmed at each end."""
        return self.num_trim(num_clients)

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Average every coordinate without its extremes."""
        return trimmed_mean(updates, self.num_trim(updates.shape[0]))
