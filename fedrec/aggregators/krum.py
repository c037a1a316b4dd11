"""Krum."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.aggregators.byzantine import ByzantineAggregator
from fedrec.functional.aggregation.krum import krum_scores, lowest
from fedrec.functional.distances import distances_of, gram_matrix
from fedrec.types import RoundContext

__all__ = ["Krum"]


class Krum(ByzantineAggregator):
    r"""The one client update that is nearest to its nearest neighbours.

    $$\operatorname*{argmin}_{g_i} \sum_{j \in N_i} \lVert g_i - g_j \rVert^2$$

    with $N_i$ the $m - f - 2$ clients nearest to $i$, without $i$ itself; of equal scores, the one
    in the first row. Client weights are ignored. One update has the noise of one client:
    `MultiKrum` averages several.

    Args:
        num_byzantine: Malicious clients at most: a count $f$, or a fraction $\beta$ of the cohort
            in [0, 0.5), then $f = \lfloor \beta m \rfloor$. A fraction keeps its meaning when
            clients are left out, as in a recovery; a count can become impossible.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If `num_byzantine` is negative, or a fraction of 0.5 or more.
        AggregationError: If $m < 2f + 3$.

    References:
        - Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent,
          NeurIPS 2017.

    Examples:
        >>> import torch
        >>> Krum(num_byzantine=1)(torch.tensor([[1.0], [2.0], [4.0], [5.5], [90.0]]))
        tensor([2.])
    """

    bound = (2, 3)
    needs = "gram"

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Return the update with the lowest score."""
        return updates[self._chosen(gram_matrix(updates))]

    def gram_coefficients(self, gram: Tensor, client_weights: Tensor) -> Tensor:
        """Return 1 for the update with the lowest score, 0 for all others."""
        found = torch.zeros(len(gram))
        found[self._chosen(gram)] = 1
        return found

    def _chosen(self, gram: Tensor) -> int:
        return int(lowest(krum_scores(distances_of(gram), self.count(len(gram))), 1))
