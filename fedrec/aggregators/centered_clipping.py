"""Centered clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedrec._checks import check_float, check_int
from fedrec.aggregators.base import AggregationContext, Aggregator
from fedrec.functional.aggregation.clipping import centered_clipping, moved_centre
from fedrec.functional.distances import squared_norms
from fedrec.types import RoundContext

if TYPE_CHECKING:
    from fedrec.distributed.updates import ShardedUpdates

__all__ = ["CenteredClipping"]


class CenteredClipping(Aggregator):
    r"""Mean of the updates, each clipped to a radius around the last result.

    $$v \leftarrow v + \frac1m \sum_{i=1}^m (g_i - v) \min\left(1,
    \frac{\tau}{\lVert g_i - v \rVert}\right)$$

    The rule remembers its result $v$ and starts the next round from there; it begins at zero. No
    client moves it by more than $\tau / m$ an iteration. As in the paper, all clients count the
    same: client weights are ignored.

    Args:
        tau: Radius $\tau > 0$, in the unit of the updates (mean gradients). The paper's is for
            clients that send momentum, which varies less than gradients do.
        iterations: How often the centre moves within a round, at least 1.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If `tau` is not positive or `iterations` is less than 1.

    References:
        - Karimireddy et al., Learning from History for Byzantine Robust Optimization, ICML 2021.

    Examples:
        >>> import torch
        >>> rule = CenteredClipping(tau=1.0)
        >>> updates = torch.tensor([[1.0], [2.0], [900.0]])
        >>> rule(updates), rule(updates)
        (tensor([1.]), tensor([1.6667]))
    """

    needs = "parts"

    def __init__(self, *, tau: float, iterations: int = 1) -> None:
        self.tau = check_float("tau", tau, minimum=0, open_minimum=True)
        self.iterations = check_int("iterations", iterations, minimum=1)
        self._centre: Tensor | None = None

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Move the centre of the round before."""
        centre = self._begin(updates)
        self._centre = centered_clipping(updates, centre, self.tau, self.iterations)
        return self._centre.clone()

    def aggregate_parts(
        self, sent: ShardedUpdates, client_weights: Tensor, ctx: AggregationContext
    ) -> Tensor:
        """Move the centre by distances that are measured where updates are, and by a sum."""
        self._centre = moved_centre(
            self._begin(sent.part),
            self.tau,
            self.iterations,
            distances=lambda centre: sent.measured(
                lambda part: squared_norms(part.updates, centre).sqrt()
            ),
            weighted_sum=sent.weighted_sum,
        )
        return self._centre.clone()

    def _begin(self, updates: Tensor) -> Tensor:
        if self._centre is None:
            return updates.new_zeros(updates.shape[1])
        return self._centre.to(updates)

    def state_dict(self) -> dict[str, Any]:
        """Return the last centre, shape $(d,)$, or `None` before the first round."""
        return {"centre": self._centre}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the centre."""
        self._centre = state["centre"]
