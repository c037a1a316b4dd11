"""FLTrust."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedrec.aggregators.base import AggregationContext, Aggregator
from fedrec.exceptions import AggregationError
from fedrec.functional.aggregation.trust import trust_scores
from fedrec.functional.distances import squared_norms
from fedrec.types import RoundContext

if TYPE_CHECKING:
    from fedrec.distributed.updates import ShardedUpdates

__all__ = ["FLTrust"]

_NO_TRUST = "found none of {} updates to point where the server's does"


class FLTrust(Aggregator):
    r"""Mean of the updates, weighted by how far they point where the server's own does.

    The server trains on its own clean data as the clients do on theirs (the same batch size, steps
    and learning rate), which gives $g_0$. With the scores
    $t_i = \max(0, \cos(g_i, g_0))$, see [`trust_scores`][fedrec.functional.trust_scores],

    $$\frac{1}{\sum_j t_j} \sum_i t_i \frac{\lVert g_0 \rVert}{\lVert g_i \rVert} g_i$$

    The federation needs `server_data` and at least one `LightningClient`; training at the server
    asks no client, so it is not in the ledger of a recovery. Client weights are ignored.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`. It is zero, with a `FedrecWarning`, if no
          client has a positive score.

    Raises:
        AggregationError: If `ctx` brings no update of the server.

    References:
        - Cao et al., FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping, NDSS
          2021.

    Examples:
        >>> FLTrust()
        FLTrust()
        >>> FLTrust.needs_server_update
        True
    """

    needs_server_update = True
    needs = "parts"

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Weigh by trust, and scale to the norm of the server's update."""
        server_update = self._server_update(ctx)
        factors = _factors(
            squared_norms(updates), trust_scores(updates, server_update), server_update
        )
        if factors is None:
            return self._no_effect(_NO_TRUST.format(len(updates)), updates)
        return factors.to(updates) @ updates

    def aggregate_parts(
        self, sent: ShardedUpdates, client_weights: Tensor, ctx: AggregationContext
    ) -> Tensor:
        """Measure norms and trust, then add up."""
        server_update = self._server_update(ctx)
        squares = sent.measured(lambda part: squared_norms(part.updates))
        trust = sent.measured(lambda part: trust_scores(part.updates, server_update))
        factors = _factors(squares, trust, server_update)
        if factors is None:
            return self._no_effect(_NO_TRUST.format(len(trust)), server_update[None])
        return sent.weighted_sum(factors)

    @staticmethod
    def _server_update(ctx: RoundContext | None) -> Tensor:
        server_update = ctx.server_update if isinstance(ctx, AggregationContext) else None
        if server_update is None:
            raise AggregationError(
                "FLTrust needs an update of the server. HINT: use it in a FederatedLoop, with "
                "`server_data=` of the federation, or pass an AggregationContext with it."
            )
        return server_update


def _factors(squares: Tensor, trust: Tensor, server_update: Tensor) -> Tensor | None:
    """Return what updates are multiplied with, given their squared norms and scores $(m,)$."""
    length = squared_norms(server_update[None]).to(squares.device)
    scale = (length / squares).sqrt()
    # An update of almost no length cannot be scaled up; dividing by 0 gives infinity or NaN.
    usable = scale < torch.finfo(server_update.dtype).max
    trust = torch.where(usable, trust, 0.0)
    total = trust.sum()
    if not bool(total > 0):
        return None
    return trust / total * torch.where(usable, scale, 0.0)
