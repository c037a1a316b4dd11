"""The mean of updates of bounded norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor

from fedrec._checks import check_bool, check_choice, check_float
from fedrec.aggregators.base import AggregationContext, Aggregator
from fedrec.functional.aggregation.clipping import clipped_shares, norm_clipping
from fedrec.functional.distances import squared_norms
from fedrec.types import RoundContext

if TYPE_CHECKING:
    from fedrec.distributed.updates import ShardedUpdates

__all__ = ["NormClipping"]


class NormClipping(Aggregator):
    r"""The weighted mean of the client updates, the long ones scaled down.

    $$\sum_{i=1}^m \frac{n_i}{\sum_k n_k} \min\left(1, \frac{M}{\lVert g_i \rVert}\right) g_i$$

    A client can move the result by its weight times $M$ at most.

    Args:
        max_norm: $M$, in the unit of the updates (mean gradients); `"median"` for the median of
            the norms of a round's updates.
        weighted: Weight clients by `client_weights` ($n_i$, their number of samples); `False` for
            the plain mean.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If `max_norm` is neither positive nor `"median"`, or `weighted` is not a
            bool.

    References:
        - Sun et al., Can You Really Backdoor Federated Learning?, 2019.

    Examples:
        >>> import torch
        >>> NormClipping(max_norm=5.0)(torch.tensor([[3.0, 4.0], [30.0, 40.0]]))
        tensor([3., 4.])
        >>> NormClipping()(torch.tensor([[1.0], [2.0], [90.0]]))
        tensor([1.6667])
    """

    needs = "parts"

    def __init__(
        self, *, max_norm: float | Literal["median"] = "median", weighted: bool = True
    ) -> None:
        if isinstance(max_norm, str):
            check_choice("max_norm", max_norm, ["median"])
        else:
            max_norm = check_float("max_norm", max_norm, minimum=0, open_minimum=True)
        self.max_norm = max_norm
        self.weighted = check_bool("weighted", weighted)

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Clip and average."""
        return norm_clipping(updates, self._bound, client_weights if self.weighted else None)

    def aggregate_parts(
        self, sent: ShardedUpdates, client_weights: Tensor, ctx: AggregationContext
    ) -> Tensor:
        """Measure norms, then average."""
        norms = sent.measured(lambda part: squared_norms(part.updates).sqrt())
        weights = client_weights if self.weighted else None
        return sent.weighted_sum(clipped_shares(norms, self._bound, weights))

    @property
    def _bound(self) -> float | None:
        return None if isinstance(self.max_norm, str) else self.max_norm
