"""The covariance-bound agnostic filter."""

from __future__ import annotations

from torch import Tensor

from fedrec.aggregators.byzantine import ByzantineAggregator
from fedrec.functional.aggregation.order_statistics import coordinate_median
from fedrec.functional.aggregation.spectral import caf_shares, covariance_bound_agnostic_filter
from fedrec.types import RoundContext

__all__ = ["CAF"]


class CAF(ByzantineAggregator):
    r"""A weighted mean whose weighted covariance has a small largest eigenvalue.

    The covariance-bound agnostic filter starts with weights $c_i = 1$ and, as long as
    $\sum_i c_i > m - 2f$, lowers those of clients that are far from the weighted mean $\mu_c$ along
    the top eigenvector $v$ of the weighted covariance:

    $$c_i \leftarrow c_i \left(1 - \frac{\tau_i}{\max_{c_j > 0} \tau_j}\right), \qquad
    \tau_i = \langle v, g_i - \mu_c \rangle^2$$

    Of the weighted means of all passes, it returns the mean whose largest eigenvalue is smallest.
    It needs no bound on how much benign updates vary. Every pass takes a client out, and all of
    them work on the $m \times m$ inner products. Client weights are ignored.

    Args:
        num_byzantine: Malicious clients at most: a count $f$, or a fraction $\beta$ of the cohort
            in [0, 0.5), then $f = \lfloor \beta m \rfloor$. A fraction keeps its meaning when
            clients are left out, as in a recovery; a count can become impossible.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If `num_byzantine` is negative, or a fraction of 0.5 or more.
        AggregationError: If $m < 2f + 1$.

    References:
        - Allouah et al., Towards Trustworthy Federated Learning with Untrusted Participants, ICML
          2025.

    Examples:
        >>> import torch
        >>> CAF(num_byzantine=1)(torch.tensor([[1.0], [2.0], [3.0], [90.0]]))
        tensor([2.0076])
    """

    bound = (2, 1)
    needs = "gram"

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Average with the filter's weights."""
        return covariance_bound_agnostic_filter(updates, self.count(len(updates)))

    def gram_center(self, columns: Tensor) -> Tensor:
        """Return the coordinate-wise median, a point in the middle."""
        return coordinate_median(columns)

    def gram_coefficients(self, gram: Tensor, client_weights: Tensor) -> Tensor:
        """Return the filter's weights."""
        return caf_shares(gram.cpu().double(), self.count(len(gram)))
