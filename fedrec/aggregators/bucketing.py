"""Bucketing."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from fedrec._checks import check_int
from fedrec.aggregators.base import Aggregator
from fedrec.aggregators.wrapper import RuleWrapper
from fedrec.exceptions import ConfigurationError, expected
from fedrec.functional.aggregation.mixing import bucket_means
from fedrec.types import RoundContext

__all__ = ["Bucketing"]


class Bucketing(RuleWrapper):
    r"""Averages the updates of random buckets of clients, then applies a rule to the means.

    The rule gets $\lceil m / s \rceil$ rows, and its counts (`trim`, `num_byzantine`) are of rows:
    as many buckets can be spoilt as clients are malicious. Buckets are drawn anew for every round,
    as a function of (seed, round). The last one may be smaller, and is divided by its own size. As
    in the paper, all clients count the same: the wrapped rule gets no weights.

    Args:
        rule: The rule that aggregates the means; not one that knows clients by their ids.
        bucket_size: $s$, at least 1; 2 in the paper.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If `bucket_size` is less than 1, or `rule` cannot be used here.

    References:
        - Karimireddy et al., Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing,
          ICLR 2022.

    Examples:
        >>> from fedrec.aggregators import Median
        >>> Bucketing(Median(), bucket_size=3)(torch.tensor([[1.0], [2.0], [6.0]]))
        tensor([3.])
    """

    def __init__(self, rule: Aggregator, *, bucket_size: int = 2) -> None:
        super().__init__(rule)
        if rule.needs_client_ids:
            hint = "it has to know who sent a row, which a bucket hides."
            requirement = "a rule that works without client ids"
            raise ConfigurationError(expected("rule", requirement, rule, hint=hint))
        self.bucket_size = check_int("bucket_size", bucket_size, minimum=1)

    def num_buckets(self, num_clients: int) -> int:
        """Return the number of rows that the wrapped rule gets."""
        return math.ceil(num_clients / self.bucket_size)

    def check_cohort(self, num_clients: int) -> None:
        """Raise `AggregationError` if the wrapped rule cannot work with so many buckets."""
        self.rule.check_cohort(self.num_buckets(num_clients))

    def max_byzantine(self, num_clients: int) -> int | None:
        """As many as the wrapped rule withstands spoilt buckets."""
        return self.rule.max_byzantine(self.num_buckets(num_clients))

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Average within buckets, then aggregate."""
        order = torch.randperm(len(updates), generator=self.generator(ctx))
        means = bucket_means(updates, order, self.bucket_size)
        if ctx is not None:
            names = tuple(f"bucket-{i}" for i in range(len(means)))
            ctx = dataclasses.replace(ctx, client_ids=names)
        return self.rule(means, None, ctx)
