"""The mean around the median."""

from __future__ import annotations

from torch import Tensor

from fedrec.aggregators.byzantine import ByzantineAggregator
from fedrec.functional.aggregation.mean_around_median import mean_around_median
from fedrec.types import RoundContext

__all__ = ["MeanAroundMedian"]


class MeanAroundMedian(ByzantineAggregator):
    r"""The mean of the $m - f$ values of every coordinate that are nearest to its median (MeaMed).

    If a value below and a value above the median are equally near, and only one of them fits into
    the $m - f$, each counts half. Client weights are ignored.

    Args:
        num_byzantine: Malicious clients at most: a count $f$, or a fraction $\beta$ of the cohort
            in [0, 0.5), then $f = \lfloor \beta m \rfloor$. A fraction keeps its meaning when
            clients are left out, as in a recovery; a count can become impossible.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If `num_byzantine` is negative, or a fraction of 0.5 or more.
        AggregationError: If $m < 2f + 1$.

    References:
        - Xie et al., Generalized Byzantine-tolerant SGD, 2018.

    Examples:
        >>> import torch
        >>> MeanAroundMedian(num_byzantine=1)(torch.tensor([[1.0], [3.0], [4.0], [5.0], [90.0]]))
        tensor([3.2500])
    """

    needs = "columns"
    bound = (2, 1)

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Average every coordinate around its median."""
        return mean_around_median(updates, len(updates) - self.count(len(updates)))
