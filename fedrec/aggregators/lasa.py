"""LASA."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from fedrec._checks import check_float
from fedrec.aggregators.base import Aggregator
from fedrec.functional.aggregation.clipping import clip_factors
from fedrec.functional.aggregation.median_z_scores import median_z_scores
from fedrec.functional.aggregation.order_statistics import coordinate_median
from fedrec.functional.aggregation.sparsification import keep_largest, positive_purity
from fedrec.functional.distances import squared_norms
from fedrec.types import RoundContext

__all__ = ["LASA"]


class LASA(Aggregator):
    r"""Averages layer by layer over the clients whose layer has an ordinary length and direction.

    Layer-adaptive sparsified aggregation. Updates are clipped to their median norm, and all but
    their largest entries are set to zero. Then every layer $\ell$ (a parameter of the model) is
    averaged for itself, over

    $$\mathcal A_\ell = \left\{ i : z(\lVert g_{i,\ell} \rVert) \le \lambda_n \wedge
    z(\rho_{i,\ell}) \le \lambda_s \right\}$$

    with the share $\rho$ of positive entries among those left
    ([`positive_purity`][fedrec.functional.positive_purity]) and
    [`median_z_scores`][fedrec.functional.median_z_scores] $z$. A layer for which nobody is left is
    averaged over all. Client weights are ignored.

    As in the paper, entries are compared over the whole update; the authors' code does not
    sparsify biases, and takes the lower of the two middle norms for an even number of clients. In
    that code, too, the updates that are averaged are the clipped and sparsified ones. Without a
    `ctx`, which knows the layers, there is one layer.

    Args:
        sparsity: Share of an update's entries that are set to zero, in [0, 1).
        norm_radius: $\lambda_n > 0$, in standard deviations (the paper's experiments have 1 and 2).
        sign_radius: $\lambda_s > 0$, in standard deviations.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Xu et al., Achieving Byzantine-Resilient Federated Learning via Layer-Adaptive Sparsified
          Model Aggregation, WACV 2025.

    Examples:
        >>> updates = torch.tensor([[3.0, 4.0], [4.0, 3.0], [4.0, 3.0], [-5.0, -0.1]])
        >>> LASA(sparsity=0.0)(updates)
        tensor([3.6667, 3.3333])
    """

    def __init__(
        self, *, sparsity: float = 0.3, norm_radius: float = 1.0, sign_radius: float = 1.0
    ) -> None:
        self.sparsity = check_float("sparsity", sparsity, minimum=0, maximum=1, open_maximum=True)
        self.norm_radius = check_float("norm_radius", norm_radius, minimum=0, open_minimum=True)
        self.sign_radius = check_float("sign_radius", sign_radius, minimum=0, open_minimum=True)

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Clip, sparsify, and average layer by layer."""
        d = updates.shape[1]
        norms = squared_norms(updates).sqrt().cpu()
        factors = clip_factors(norms, coordinate_median(norms[:, None]))
        # Clipping changes neither signs nor which entries are largest, so it can wait.
        sparse = keep_largest(updates, max(1, math.floor((1 - Fraction(str(self.sparsity))) * d)))
        sizes = (d,) if ctx is None else ctx.layout.sizes
        return torch.cat([self._layer(part, factors) for part in sparse.split(sizes, dim=1)])

    def _layer(self, updates: Tensor, factors: Tensor) -> Tensor:
        lengths = factors * squared_norms(updates).sqrt().cpu()
        admitted = median_z_scores(lengths) <= self.norm_radius
        admitted &= median_z_scores(positive_purity(updates)) <= self.sign_radius
        if not bool(admitted.any()):
            admitted = torch.ones_like(admitted)
        return (admitted / admitted.sum() * factors).to(updates) @ updates
