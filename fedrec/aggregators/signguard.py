"""SignGuard."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec._checks import check_float
from fedrec.aggregators.base import Aggregator
from fedrec.aggregators.byzantine import count_of
from fedrec.functional.aggregation.clipping import clip_factors
from fedrec.functional.aggregation.clustering import largest_mode
from fedrec.functional.aggregation.order_statistics import coordinate_median
from fedrec.functional.distances import squared_norms
from fedrec.types import RoundContext

__all__ = ["SignGuard"]


class SignGuard(Aggregator):
    r"""Mean of the updates whose norm is ordinary and whose signs are like most others'.

    With $M$ the median of the norms, a client is trusted if $L \le \lVert g_i \rVert / M \le R$,
    and if it is in the largest cluster (mean shift) of the clients by their shares of positive,
    zero and negative entries among randomly chosen coordinates. The result is the mean of
    $\min(1, M / \lVert g_i \rVert) g_i$ over the trusted clients. This is the plain variant of the
    paper, without the similarity feature. Client weights are ignored.

    Args:
        lower: $L$ in [0, 1].
        upper: $R \ge 1$.
        coordinate_fraction: Share of the coordinates whose signs are counted, in (0, 1], drawn anew
            for every round as a function of (seed, round).

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`. It is zero, with a `FedrecWarning`, if the
          two filters leave nobody.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Xu et al., Byzantine-robust Federated Learning through Collaborative Malicious Gradient
          Filtering, ICDCS 2022.

    Examples:
        >>> updates = torch.tensor([[3.0, 4.0], [4.0, 3.0], [-3.0, -4.0], [300.0, 400.0]])
        >>> SignGuard(coordinate_fraction=1.0)(updates)
        tensor([3.5000, 3.5000])
    """

    def __init__(
        self, *, lower: float = 0.1, upper: float = 3.0, coordinate_fraction: float = 0.1
    ) -> None:
        self.lower = check_float("lower", lower, minimum=0, maximum=1)
        self.upper = check_float("upper", upper, minimum=1)
        self.coordinate_fraction = check_float(
            "coordinate_fraction", coordinate_fraction, minimum=0, maximum=1, open_minimum=True
        )

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Average the trusted clients."""
        norms = squared_norms(updates).sqrt().cpu()
        median = coordinate_median(norms[:, None])
        trusted = (norms >= self.lower * median) & (norms <= self.upper * median)
        trusted &= largest_mode(self._sign_shares(updates, ctx))
        if not bool(trusted.any()):
            return self._no_effect(f"trusts none of {len(updates)} updates", updates)
        shares = trusted.double() / trusted.sum() * clip_factors(norms, median)
        return shares.to(updates) @ updates

    def _sign_shares(self, updates: Tensor, ctx: RoundContext | None) -> Tensor:
        """Return the shares of positive, zero and negative entries, shape (m, 3)."""
        d = updates.shape[1]
        count = max(1, count_of(self.coordinate_fraction, d))
        if count < d:
            drawn = torch.randperm(d, generator=self.generator(ctx))[:count]
            updates = updates[:, drawn.sort().values.to(updates.device)]
        positive, negative = (updates > 0).sum(dim=1), (updates < 0).sum(dim=1)
        return torch.stack([positive, count - positive - negative, negative], dim=1) / count
