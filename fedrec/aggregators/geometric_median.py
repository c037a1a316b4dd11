"""The geometric median."""

from __future__ import annotations

from torch import Tensor

from fedrec._checks import check_bool, check_float, check_int
from fedrec.aggregators.base import Aggregator
from fedrec.functional.aggregation.geometric_median import geometric_median, median_shares
from fedrec.functional.aggregation.order_statistics import coordinate_median
from fedrec.types import RoundContext

__all__ = ["GeometricMedian"]


class GeometricMedian(Aggregator):
    r"""The point with the smallest weighted sum of distances to the client updates.

    $$\operatorname*{argmin}_z \sum_{i=1}^m \frac{n_i}{\sum_k n_k} \lVert g_i - z \rVert$$

    by Weiszfeld's algorithm from the weighted mean, with distances of at least $\nu$, until it
    converges. With few iterations it is RFA as its authors run it: `max_iterations=3`.

    Args:
        smoothing: $\nu$, the distance below which all count the same, as a fraction of the median
            distance of the updates from their coordinate-wise median.
        tolerance: It has converged when an iteration changes no client's share of the result by
            more than this, relative to the share.
        max_iterations: Iterations at most, at least 1; then the result is taken as it is. More than
            1,000 are needed only where the result is an update at which the others pull with nearly
            its weight; the sum of distances is then too large by a ten-thousandth or less.
        weighted: Weight clients by `client_weights` ($n_i$, their number of samples); `False` for
            equal weights.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If `smoothing` is not positive, `tolerance` is negative,
            `max_iterations` is less than 1 or `weighted` is not a bool.

    References:
        - Pillutla et al., Robust Aggregation for Federated Learning, IEEE TSP 2022.

    Examples:
        >>> import torch
        >>> updates = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> GeometricMedian()(updates)
        tensor([0.5000, 0.5000])
    """

    needs = "gram"

    def __init__(
        self,
        *,
        smoothing: float = 1e-6,
        tolerance: float = 1e-8,
        max_iterations: int = 1000,
        weighted: bool = True,
    ) -> None:
        self.smoothing = check_float("smoothing", smoothing, minimum=0, open_minimum=True)
        self.tolerance = check_float("tolerance", tolerance, minimum=0)
        self.max_iterations = check_int("max_iterations", max_iterations, minimum=1)
        self.weighted = check_bool("weighted", weighted)

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Find the geometric median."""
        return geometric_median(
            updates,
            client_weights if self.weighted else None,
            smoothing=self.smoothing,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
        )

    def gram_center(self, columns: Tensor) -> Tensor:
        """Return the coordinate-wise median, a point in the middle."""
        return coordinate_median(columns)

    def gram_coefficients(self, gram: Tensor, client_weights: Tensor) -> Tensor:
        """Return the shares of Weiszfeld's algorithm."""
        return median_shares(
            gram,
            client_weights if self.weighted else None,
            smoothing=self.smoothing,
            tolerance=self.tolerance,
            max_iterations=self.max_iterations,
        )
