"""AlignIns."""

from __future__ import annotations

from torch import Tensor

from fedrec._checks import check_float
from fedrec.aggregators.base import Aggregator
from fedrec.aggregators.byzantine import count_of
from fedrec.functional.aggregation.alignment import principal_sign_alignment
from fedrec.functional.aggregation.clipping import clip_factors
from fedrec.functional.aggregation.median_z_scores import median_z_scores
from fedrec.functional.aggregation.order_statistics import coordinate_median
from fedrec.functional.consistency import row_cosines
from fedrec.functional.distances import squared_norms
from fedrec.types import RoundContext

__all__ = ["AlignIns"]


class AlignIns(Aggregator):
    r"""Leaves out clients whose direction is unusual, as a whole or in its largest entries.

    Two measures of a client's direction are taken: the cosine $\omega_i = \cos(g_i, w_t)$ of its
    update with the global weights, and the share $\rho_i$ of its largest entries whose sign is the
    majority's, see
    [`principal_sign_alignment`][fedrec.functional.principal_sign_alignment]. A client is admitted
    if both are close to the median of all clients, by their
    [`median_z_scores`][fedrec.functional.median_z_scores]:

    $$\mathcal A = \left\{ i : z(\omega)_i \le \lambda_c \wedge z(\rho)_i \le \lambda_s \right\},
    \qquad \frac{1}{\lvert \mathcal A \rvert} \sum_{i \in \mathcal A}
    \min\left(1, \frac{c}{\lVert g_i \rVert}\right) g_i$$

    with $c$ the median norm of the admitted clients. Client weights are ignored. The paper's
    updates are differences of models, with the opposite sign, which changes neither measure's
    z-scores. The authors' code takes the lower of the two middle norms for an even number of
    clients; here it is their mean.

    Args:
        top_fraction: Share of an update's entries whose signs are looked at, in (0, 1].
        cosine_radius: $\lambda_c > 0$, in standard deviations.
        sign_radius: $\lambda_s > 0$, in standard deviations.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`. It is zero, with a `FedrecWarning`, if
          nobody is admitted.

    Raises:
        ConfigurationError: If an argument is out of range.
        AggregationError: If there is no `ctx`, which has the global weights.

    References:
        - Xu et al., Detecting Backdoor Attacks in Federated Learning via Direction Alignment
          Inspection, CVPR 2025.

    Examples:
        >>> AlignIns()
        AlignIns(top_fraction=0.3, cosine_radius=1.0, sign_radius=1.0)
    """

    def __init__(
        self,
        *,
        top_fraction: float = 0.3,
        cosine_radius: float = 1.0,
        sign_radius: float = 1.0,
    ) -> None:
        self.top_fraction = check_float(
            "top_fraction", top_fraction, minimum=0, maximum=1, open_minimum=True
        )
        self.cosine_radius = check_float(
            "cosine_radius", cosine_radius, minimum=0, open_minimum=True
        )
        self.sign_radius = check_float("sign_radius", sign_radius, minimum=0, open_minimum=True)

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Average the admitted clients, clipped to their median norm."""
        start = self._global_weights(ctx).to(updates)
        d = updates.shape[1]
        count = max(1, count_of(self.top_fraction, d))
        cosines = row_cosines(updates, start)
        signs = principal_sign_alignment(updates, count)
        admitted = median_z_scores(cosines) <= self.cosine_radius
        admitted &= median_z_scores(signs) <= self.sign_radius
        if not bool(admitted.any()):
            return self._no_effect(f"admits none of {len(updates)} updates", updates)
        norms = squared_norms(updates).sqrt().cpu()
        bound = coordinate_median(norms[admitted, None])
        shares = admitted.double() / admitted.sum() * clip_factors(norms, bound)
        return shares.to(updates) @ updates
