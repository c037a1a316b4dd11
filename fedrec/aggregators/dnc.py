"""Divide and conquer."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from fedrec._checks import check_float, check_int
from fedrec.aggregators.byzantine import ByzantineAggregator
from fedrec.exceptions import AggregationError
from fedrec.functional.aggregation.krum import lowest
from fedrec.functional.aggregation.means import mean_of_rows
from fedrec.functional.aggregation.spectral import spectral_scores
from fedrec.types import RoundContext

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
        m, d = updates.shape
        generator = self.generator(ctx)
        good = torch.ones(m, dtype=torch.bool)
        for _ in range(self.iterations):
            some = updates
            if self.num_coordinates < d:
                drawn = torch.randperm(d, generator=generator)[: self.num_coordinates]
                some = updates[:, drawn.sort().values.to(updates.device)]
            kept = lowest(spectral_scores(some), self.num_good(m))
            good &= torch.zeros(m, dtype=torch.bool).index_fill_(0, kept, True)
        if not good.any():
            raise AggregationError(
                f"DnC removed each of m={m} clients in one of {self.iterations} iterations. "
                "HINT: lower `iterations`, `filter_factor` or `num_byzantine`."
            )
        return mean_of_rows(updates, good.nonzero().flatten())
