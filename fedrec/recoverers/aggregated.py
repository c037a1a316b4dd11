"""Updates that were aggregated while they were computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cached_property
from typing import Any

from torch import Tensor

from fedrec.types import CohortUpdates

__all__ = ["AggregatedUpdates"]


class AggregatedUpdates(CohortUpdates):
    """Updates of which the aggregation rule has seen every column, and that were not kept.

    `updates` computes them again when it is first asked for. What `dataclasses.replace` makes of it
    is plain `CohortUpdates`.

    Args:
        aggregate: What the rule makes of them, shape $(d,)$.
        compute: Returns the updates, shape $(m, d)$.
        like: Has everything else.
    """

    def __new__(cls, *given: Any, **named: Any) -> CohortUpdates:  # type: ignore[misc]
        """Make one; but for `dataclasses.replace`, which gives names, the plain kind."""
        return CohortUpdates(**named) if named else super().__new__(cls)

    def __init__(
        self, aggregate: Tensor, compute: Callable[[], Tensor], like: CohortUpdates
    ) -> None:
        known = {f.name: getattr(like, f.name) for f in fields(like) if f.name != "updates"}
        # The base class is frozen.
        self.__dict__.update(known, aggregate=aggregate, _compute=compute)

    aggregate: Tensor

    @cached_property
    def updates(self) -> Tensor:
        """The updates, shape $(m, d)$."""
        computed: Tensor = self.__dict__["_compute"]()
        return computed
