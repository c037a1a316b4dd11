"""Divide and conquer."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedrec._checks import check_float, check_int
from fedrec.aggregators.base import AggregationContext
from fedrec.aggregators.byzantine import ByzantineAggregator
from fedrec.exceptions import AggregationError
from fedrec.functional.aggregation.krum import lowest
from fedrec.functional.aggregation.means import mean_of_rows
from fedrec.functional.aggregation.spectral import spectral_scores, top_projections
from fedrec.functional.kernels._columns import column_mean
from fedrec.types import RoundContext

if TYPE_CHECKING:
    from fedrec.distributed.updates import ShardedUpdates

__all__ = ["DnC"]


class DnC(ByzantineAggregator):
    r"""The mean of the clients that are no outliers along the direction of largest variance.

    Divide and conquer: in each iteration, $b$ random coordinates of the updates are centered, and
    the $\lfloor m - cf \rfloor$ clients with the smallest squared projections on their top right
    singular direction are good. Clients that are good in every iteration are averaged; client
    weights are ignored. The coordinates are a function of the seed and the round.

    Args:
        num_byzantine: Malicious clients at most: a count $f$, or a fraction $\beta$ of the cohort
            in [0, 0.5), then $f = \lfloor \beta m \rfloor$. A fraction keeps its meaning when
            clients are left out, as in a recovery; a count can become impossible.
        filter_factor: $c > 0$: clients removed in an iteration, for each malicious client.
        num_coordinates: $b$, at least 1; where a model has fewer, all are used.
        iterations: How often coordinates are drawn, at least 1.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If `num_byzantine` is negative, or a fraction of 0.5 or more, or
            another argument is out of its range.
        AggregationError: If $m < 2f + 1$ or $m - cf < 1$, or no client is good in every iteration.

    References:
        - Shejwalkar and Houmansadr, Manipulating the Byzantine: Optimizing Model Poisoning Attacks
          and Defenses for Federated Learning, NDSS 2021.

    Examples:
        >>> import torch
        >>> DnC(num_byzantine=1)(torch.tensor([[1.0], [2.0], [3.0], [90.0]]))
        tensor([2.])
    """

    bound = (2, 1)
    needs = "parts"

    def __init__(
        self,
        *,
        num_byzantine: int | float,
        filter_factor: float = 1.0,
        num_coordinates: int = 10_000,
        iterations: int = 1,
    ) -> None:
        super().__init__(num_byzantine=num_byzantine)
        self.filter_factor = check_float(
            "filter_factor", filter_factor, minimum=0, open_minimum=True
        )
        self.num_coordinates = check_int("num_coordinates", num_coordinates, minimum=1)
        self.iterations = check_int("iterations", iterations, minimum=1)

    def num_good(self, num_clients: int) -> int:
        """Return how many clients are good in one iteration."""
        removed = Fraction(str(self.filter_factor)) * self.count(num_clients)
        return math.floor(num_clients - removed)

    def check_cohort(self, num_clients: int) -> None:
        """Raise `AggregationError` if there are too few clients for so many malicious ones."""
        super().check_cohort(num_clients)
        if self.num_good(num_clients) < 1:
            raise AggregationError(
                f"DnC needs m - cf >= 1, but got m={num_clients} client updates with "
                f"f={self.count(num_clients)} and c={self.filter_factor:g}. "
                "HINT: lower `filter_factor` or `num_byzantine`."
            )

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Average the clients that are good in every iteration."""
        scores = [
            spectral_scores(updates if drawn is None else updates[:, drawn.to(updates.device)])
            for drawn in self._drawn(updates.shape[1], ctx)
        ]
        return mean_of_rows(updates, self._good(scores))

    def aggregate_parts(
        self, sent: ShardedUpdates, client_weights: Tensor, ctx: AggregationContext
    ) -> Tensor:
        """Score by inner products of the coordinates that were drawn, then average."""
        scores = [
            top_projections((sent if drawn is None else sent.narrowed(drawn)).gram(column_mean))
            for drawn in self._drawn(sent.part.shape[1], ctx)
        ]
        good = self._good(scores)
        return sent.weighted_sum(torch.zeros(len(scores[0])).index_fill_(0, good, 1 / len(good)))

    def _drawn(self, d: int, ctx: RoundContext | None) -> list[Tensor | None]:
        """Return the coordinates of each iteration, ascending; `None` for all of them."""
        if self.num_coordinates >= d:
            return [None] * self.iterations
        generator, count = self.generator(ctx), self.num_coordinates
        orders = (torch.randperm(d, generator=generator) for _ in range(self.iterations))
        return [order[:count].sort().values for order in orders]

    def _good(self, scores: list[Tensor]) -> Tensor:
        """Return the row numbers of the clients that are good in every iteration."""
        m = len(scores[0])
        good = torch.ones(m, dtype=torch.bool)
        for each in scores:
            kept = lowest(each, self.num_good(m))
            good &= torch.zeros(m, dtype=torch.bool).index_fill_(0, kept, True)
        if not good.any():
            raise AggregationError(
                f"DnC removed each of m={m} clients in one of {self.iterations} iterations. "
                "HINT: lower `iterations`, `filter_factor` or `num_byzantine`."
            )
        return good.nonzero().flatten()
