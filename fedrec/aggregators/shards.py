"""Aggregating updates that are spread over processes, without gathering them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch import Tensor

from fedrec.aggregators.base import AggregationContext, Aggregator
from fedrec.aggregators.wrapper import ServerStep, needs_of

if TYPE_CHECKING:
    from fedrec.distributed.updates import ShardedUpdates

__all__ = ["aggregate_shards"]


def aggregate_shards(
    rule: Aggregator, sent: ShardedUpdates, weights: Tensor, ctx: AggregationContext
) -> Tensor:
    """Aggregate finite updates by a rule, giving it what `needs_of` says.

    Args:
        rule: The rule.
        sent: The updates.
        weights: Of the clients, shape $(m,)$, non-negative, with a positive sum.
        ctx: The round.

    Returns:
        Shape $(d,)$, the same in all processes.
    """
    rule.check_cohort(len(sent.client_ids))
    if isinstance(rule, ServerStep):
        return rule.step(aggregate_shards(rule.rule, sent, weights, ctx), ctx)
    needs = needs_of(rule)
    if needs == "parts":
        return rule.aggregate_parts(sent, weights, ctx)
    if needs == "sums":
        coefficients = rule.coefficients(weights)
        assert coefficients is not None
        return sent.weighted_sum(coefficients)
    if needs == "gram":
        return sent.weighted_sum(rule.gram_coefficients(sent.gram(rule.gram_center), weights))
    ids = tuple(sent.client_ids[i] for i in sent.places.tolist())
    ordered = weights[sent.places.to(weights.device)]

    def aggregate(block: Tensor) -> Tensor:
        return rule(block, ordered, dataclasses.replace(ctx, client_ids=ids, checked=block))

    return sent.by_columns(aggregate)
