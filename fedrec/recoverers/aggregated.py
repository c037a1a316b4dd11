"""Updates that were aggregated while they were computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from torch import Tensor

from fedrec.types import CohortUpdates, LazyUpdates

__all__ = ["AggregatedUpdates"]


class AggregatedUpdates(LazyUpdates):
    """Updates of which the aggregation rule has seen every column, and that were not kept.

    `updates` computes them again when it is first asked for.

    Args:
        aggregate: What the rule makes of them, shape $(d,)$.
        compute: Returns the updates, shape $(m, d)$.
        like: Has everything else.
    """

    def __init__(
        self, aggregate: Tensor, compute: Callable[[], Tensor], like: CohortUpdates
    ) -> None:
        super().__init__(like)
        self.__dict__.update(aggregate=aggregate, _compute=compute)

    aggregate: Tensor

    @cached_property
    def updates(self) -> Tensor:
        """The updates, shape $(m, d)$."""
        computed: Tensor = self.__dict__["_compute"]()
        return computed
