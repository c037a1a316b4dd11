"""Robust learning rate."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from fedrec._checks import check_float, check_int, is_fraction
from fedrec.aggregators.base import Aggregator
from fedrec.aggregators.wrapper import RuleWrapper
from fedrec.exceptions import AggregationError
from fedrec.functional.aggregation.signs import sign_votes
from fedrec.types import RoundContext

__all__ = ["RLR"]


class RLR(RuleWrapper):
    r"""Robust learning rate: what a rule returns, turned round where too few clients agree.

    $$\begin{cases} A_k & \text{if } \left\lvert \sum_i \operatorname{sgn} g_{i,k} \right\rvert
    \ge \theta \\ -A_k & \text{otherwise} \end{cases}$$

    with $A$ the result of the wrapped rule, FedAvg in the paper. It is meant against backdoors of
    few clients.

    Args:
        rule: The rule whose result gets its signs.
        threshold: $\theta$: a count of at least 1, or a fraction of the cohort in (0, 1], rounded
            up. $\theta \le m$, or no coordinate could ever reach it.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If `threshold` is out of range or `rule` is not an `Aggregator`.
        AggregationError: If `threshold` is more than $m$.

    References:
        - Ozdayi et al., Defending against Backdoors in Federated Learning with Robust Learning
          Rate, AAAI 2021.

    Examples:
        >>> from fedrec.aggregators import FedAvg
        >>> RLR(FedAvg(), threshold=2)(torch.tensor([[1.0, 1.0], [2.0, -1.0], [3.0, 6.0]]))
        tensor([ 2., -2.])
    """

    needs = "columns"

    def __init__(self, rule: Aggregator, *, threshold: int | float) -> None:
        super().__init__(rule)
        if is_fraction(threshold):
            threshold = check_float("threshold", threshold, minimum=0, maximum=1, open_minimum=True)
        else:
            hint = "give a fraction as a float."
            threshold = check_int("threshold", threshold, minimum=1, hint=hint)
        self.threshold = threshold

    def votes(self, num_clients: int) -> int:
        r"""Return $\theta$ for this many clients."""
        if isinstance(self.threshold, int):
            return self.threshold
        return math.ceil(Fraction(str(self.threshold)) * num_clients)

    def check_cohort(self, num_clients: int) -> None:
        """Raise `AggregationError` if the threshold is out of reach."""
        super().check_cohort(num_clients)
        if self.votes(num_clients) > num_clients:
            raise AggregationError(
                f"RLR needs m >= threshold, but got m={num_clients} client updates with "
                f"threshold={self.votes(num_clients)}. HINT: lower `threshold` or let more clients "
                "take part."
            )

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Turn round what is not agreed upon."""
        aggregate = self.rule(updates, client_weights, ctx)
        agreed = sign_votes(updates).abs() >= self.votes(len(updates))
        return torch.where(agreed, aggregate, -aggregate)
