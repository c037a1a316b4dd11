"""Nearest-neighbour mixing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fedrec.aggregators.base import AggregationContext, Aggregator
from fedrec.aggregators.byzantine import ByzantineAggregator
from fedrec.aggregators.shards import aggregate_shards
from fedrec.aggregators.wrapper import RuleWrapper
from fedrec.functional.aggregation.mixing import mixing_of, nearest_neighbor_mixing
from fedrec.functional.distances import distances_of
from fedrec.types import RoundContext

if TYPE_CHECKING:
    from fedrec.distributed.updates import ShardedUpdates

__all__ = ["NearestNeighborMixing"]


class NearestNeighborMixing(RuleWrapper, ByzantineAggregator):
    r"""Replaces every update by the mean of the $m - f$ nearest to it, then applies a rule.

    An update counts as nearest to itself. It makes rules that are robust for like clients robust
    for unlike ones, too. As in the paper, all clients count the same: the wrapped rule gets no
    client weights.

    Args:
        rule: The rule that aggregates the mixed updates.
        num_byzantine: Malicious clients at most: a count $f$, or a fraction of the cohort in
            [0, 0.5). $m \ge 2f + 1$.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If `num_byzantine` is out of range or `rule` is not an `Aggregator`.
        AggregationError: If there are too few clients for so many malicious ones.

    References:
        - Allouah et al., Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity,
          AISTATS 2023.

    Examples:
        >>> import torch
        >>> from fedrec.aggregators import Median
        >>> updates = torch.tensor([[0.0], [2.0], [900.0]])
        >>> NearestNeighborMixing(Median(), num_byzantine=1)(updates)
        tensor([1.])
    """

    needs = "parts"

    def __init__(self, rule: Aggregator, *, num_byzantine: int | float) -> None:
        RuleWrapper.__init__(self, rule)
        ByzantineAggregator.__init__(self, num_byzantine=num_byzantine)

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Mix, then aggregate."""
        m = len(updates)
        return self.rule(nearest_neighbor_mixing(updates, m - self.count(m)), None, ctx)

    def aggregate_parts(
        self, sent: ShardedUpdates, client_weights: Tensor, ctx: AggregationContext
    ) -> Tensor:
        """Find neighbours by inner products, and mix columns; then as the wrapped rule needs it."""
        m = len(sent.client_ids)
        mixing = mixing_of(distances_of(sent.gram()), m - self.count(m)).to(sent.part)
        places = sent.places.to(mixing.device)
        mixing = mixing[places][:, places]
        mixed = sent.rows_by_columns(lambda _, block: mixing @ block, sent.client_ids)
        return aggregate_shards(self.rule, mixed, client_weights.new_ones(m), ctx)
