"""Adaptive robust clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fedrec.aggregators.base import AggregationContext, Aggregator
from fedrec.aggregators.byzantine import ByzantineAggregator
from fedrec.aggregators.shards import aggregate_shards
from fedrec.aggregators.wrapper import RuleWrapper
from fedrec.functional.aggregation.clipping import adaptive_clipping, factors_of_longest
from fedrec.functional.distances import squared_norms
from fedrec.types import RoundContext, rows_of

if TYPE_CHECKING:
    from fedrec.distributed.updates import ShardedUpdates

__all__ = ["ARC"]


class ARC(RuleWrapper, ByzantineAggregator):
    r"""Adaptive robust clipping: clips the longest updates, then applies a rule.

    The $k = \lfloor 2 \frac{f}{m} (m - f) \rfloor$ longest updates are scaled down to the norm of
    the longest of the others. There is no radius to choose, and a robust rule stays robust.

    Args:
        rule: The rule that aggregates the clipped updates.
        num_byzantine: Malicious clients at most: a count $f$, or a fraction of the cohort in
            [0, 0.5). $m \ge 2f + 1$.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If `num_byzantine` is out of range or `rule` is not an `Aggregator`.
        AggregationError: If there are too few clients for so many malicious ones.

    References:
        - Allouah et al., Adaptive Gradient Clipping for Robust Federated Learning, ICLR 2025.

    Examples:
        >>> import torch
        >>> from fedrec.aggregators import FedAvg
        >>> ARC(FedAvg(), num_byzantine=1)(torch.tensor([[1.0], [2.0], [9.0]]))
        tensor([1.6667])
    """

    needs = "parts"

    def __init__(self, rule: Aggregator, *, num_byzantine: int | float) -> None:
        RuleWrapper.__init__(self, rule)
        ByzantineAggregator.__init__(self, num_byzantine=num_byzantine)

    def num_clipped(self, num_clients: int) -> int:
        """Return how many updates are clipped; in integers, since floats may round down."""
        f = self.count(num_clients)
        return 2 * f * (num_clients - f) // num_clients

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Clip, then aggregate."""
        clipped = adaptive_clipping(updates, self.num_clipped(len(updates)))
        return self.rule(clipped, client_weights, ctx)

    def aggregate_parts(
        self, sent: ShardedUpdates, client_weights: Tensor, ctx: AggregationContext
    ) -> Tensor:
        """Clip updates where they are, then aggregate as the wrapped rule needs it."""
        norms = sent.measured(lambda part: squared_norms(part.updates).sqrt())
        factors = factors_of_longest(norms, self.num_clipped(len(norms)))
        own = rows_of([(sent.client_ids, factors)], sent.own_ids).to(sent.part)
        clipped = sent.with_rows([sent.part * own[:, None]])
        return aggregate_shards(self.rule, clipped, client_weights, ctx)
