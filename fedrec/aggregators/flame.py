"""FLAME."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedrec._checks import check_float
from fedrec.aggregators.base import AggregationContext, Aggregator
from fedrec.functional.aggregation.clipping import clip_factors
from fedrec.functional.aggregation.clustering import majority_cluster
from fedrec.functional.aggregation.order_statistics import coordinate_median
from fedrec.functional.cosine import cosine_similarities, cosines_of
from fedrec.functional.distances import squared_norms
from fedrec.types import RoundContext

if TYPE_CHECKING:
    from fedrec.distributed.updates import ShardedUpdates

__all__ = ["FLAME"]


class FLAME(Aggregator):
    r"""Filters by direction, clips to the median norm, averages, and adds noise.

    Clients are clustered by the cosine distances of their updates, and the one cluster of more than
    half of them is admitted (HDBSCAN, see
    [`majority_cluster`][fedrec.functional.majority_cluster]). With $S$ the median of the norms of
    all updates,

    $$\frac{1}{\lvert \mathcal A \rvert} \sum_{i \in \mathcal A}
    \min\left(1, \frac{S}{\lVert g_i \rVert}\right) g_i + \mathcal N(0, (\lambda S)^2 I)$$

    The noise is a function of (seed, round). Client weights are ignored. The paper takes cosines of
    local models; those of updates are taken here, since models share most of their direction, the
    global weights.

    Args:
        noise_factor: $\lambda \ge 0$, 0.001 in the paper's image experiments; 0 adds no noise.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If `noise_factor` is negative.

    References:
        - Nguyen et al., FLAME: Taming Backdoors in Federated Learning, USENIX Security 2022.

    Examples:
        >>> updates = torch.tensor([[3.0, 0.0], [5.0, 0.0], [0.0, -9.0]])
        >>> FLAME(noise_factor=0.0)(updates)
        tensor([4., 0.])
    """

    needs = "parts"

    def __init__(self, *, noise_factor: float = 0.001) -> None:
        self.noise_factor = check_float("noise_factor", noise_factor, minimum=0)

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Average the clients in the majority's cluster."""
        norms = squared_norms(updates).sqrt().cpu()
        shares, bound = _shares(norms, cosine_similarities(updates))
        return self._blurred(shares.to(updates) @ updates, bound, ctx)

    def aggregate_parts(
        self, sent: ShardedUpdates, client_weights: Tensor, ctx: AggregationContext
    ) -> Tensor:
        """Find the cluster by inner products, then average."""
        norms = sent.measured(lambda part: squared_norms(part.updates).sqrt())
        shares, bound = _shares(norms, cosines_of(sent.gram()))
        return self._blurred(sent.weighted_sum(shares), bound, ctx)

    def _blurred(self, mean: Tensor, bound: Tensor, ctx: RoundContext | None) -> Tensor:
        """Add noise whose size is a fraction of the bound."""
        if self.noise_factor == 0:
            return mean
        noise = torch.randn(mean.shape, generator=self.generator(ctx), dtype=torch.float32)
        return mean + (self.noise_factor * bound).to(mean) * noise.to(mean)


def _shares(norms: Tensor, cosines: Tensor) -> tuple[Tensor, Tensor]:
    """Return what updates are multiplied with, shape $(m,)$; and the bound of their norms."""
    bound = coordinate_median(norms[:, None])
    admitted = majority_cluster(1 - cosines).double()
    return admitted / admitted.sum() * clip_factors(norms, bound), bound
