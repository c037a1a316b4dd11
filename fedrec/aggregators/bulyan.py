"""Bulyan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fedrec.aggregators.base import AggregationContext
from fedrec.aggregators.byzantine import ByzantineAggregator
from fedrec.functional.aggregation.krum import bulyan_selection
from fedrec.functional.aggregation.mean_around_median import mean_around_median
from fedrec.functional.distances import distances_of, pairwise_squared_distances
from fedrec.types import RoundContext

if TYPE_CHECKING:
    from fedrec.distributed.updates import ShardedUpdates

__all__ = ["Bulyan"]


class Bulyan(ByzantineAggregator):
    r"""Krum again and again, then the mean around the median of what it picked.

    First, $\theta = m - 2f$ updates are picked: each is Krum's choice among the $r$ that are left,
    with the sum over $\max(r - f - 2, 1)$ neighbours. Then every coordinate is the mean of the
    $\beta = \theta - 2f$ picked values nearest to their median. Distances are computed once.
    Client weights are ignored.

    Args:
        num_byzantine: Malicious clients at most: a count $f$, or a fraction $\beta$ of the cohort
            in [0, 0.5), then $f = \lfloor \beta m \rfloor$. A fraction keeps its meaning when
            clients are left out, as in a recovery; a count can become impossible.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If `num_byzantine` is negative, or a fraction of 0.5 or more.
        AggregationError: If $m < 4f + 3$.

    References:
        - El Mhamdi et al., The Hidden Vulnerability of Distributed Learning in Byzantium, ICML
          2018.

    Examples:
        >>> import torch
        >>> updates = torch.tensor([[0.0], [1.0], [2.0], [4.0], [5.0], [7.0], [50.0]])
        >>> Bulyan(num_byzantine=1)(updates)
        tensor([3.6667])
    """

    bound = (4, 3)
    needs = "parts"

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Pick updates, then average every coordinate around its median."""
        f = self.count(len(updates))
        distances = pairwise_squared_distances(updates).cpu()  # many small steps
        picked = bulyan_selection(distances, f).to(updates.device)
        return mean_around_median(updates, len(picked) - 2 * f, rows=picked)

    def aggregate_parts(
        self, sent: ShardedUpdates, client_weights: Tensor, ctx: AggregationContext
    ) -> Tensor:
        """Pick updates by their inner products, then average columns of those that were picked."""
        f = self.count(len(sent.client_ids))
        picked = bulyan_selection(distances_of(sent.gram()).cpu(), f).tolist()
        chosen = sent.select([sent.client_ids[i] for i in picked])
        return chosen.by_columns(lambda block: mean_around_median(block, len(block) - 2 * f))
