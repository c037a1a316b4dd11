"""Multi-Krum."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.aggregators.byzantine import ByzantineAggregator
from fedrec.functional.aggregation.krum import krum_scores, lowest
from fedrec.functional.aggregation.means import mean_of_rows
from fedrec.functional.distances import distances_of, gram_matrix
from fedrec.types import RoundContext

__all__ = ["MultiKrum"]


class MultiKrum(ByzantineAggregator):
    r"""The mean of the $m - f$ client updates that are nearest to their nearest neighbours.

    All clients are scored once, as by `Krum`; of equal scores, those in earlier rows are averaged.
    Client weights are ignored.

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
        >>> MultiKrum(num_byzantine=1)(torch.tensor([[1.0], [2.0], [4.0], [5.0], [90.0]]))
        tensor([3.])
    """

    bound = (2, 3)
    needs = "gram"

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Average the updates with the lowest scores."""
        return mean_of_rows(updates, self._chosen(gram_matrix(updates)))

    def gram_coefficients(self, gram: Tensor, client_weights: Tensor) -> Tensor:
        """Return equal shares of the updates with the lowest scores, 0 for all others."""
        chosen = self._chosen(gram).cpu()
        return torch.zeros(len(gram)).index_fill_(0, chosen, 1 / len(chosen))

    def _chosen(self, gram: Tensor) -> Tensor:
        f = self.count(len(gram))
        return lowest(krum_scores(distances_of(gram), f), len(gram) - f)
