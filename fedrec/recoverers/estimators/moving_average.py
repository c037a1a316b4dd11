"""Moving averages of what clients sent: estimates without the history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedrec._checks import check_fraction
from fedrec.aggregators.base import ColumnRule
from fedrec.functional.aggregation.means import weighted_mean, weighted_sum
from fedrec.functional.aggregation.order_statistics import trimmed_mean
from fedrec.recoverers.estimators._common_gain import CommonGain, Errors
from fedrec.recoverers.estimators._rows import picking, rows_of
from fedrec.recoverers.estimators.base import AggregatedEstimates, Estimates, Estimator
from fedrec.recoverers.threshold import largest_magnitudes
from fedrec.types import RoundRecord

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView

__all__ = ["MovingAverage"]


class MovingAverage(Estimator):
    r"""Takes a moving average of what the client has sent, and does not read the history.

    $$\hat g_t^i = a^i, \qquad
    a^i \leftarrow a^i + K (g_t^i - a^i) + (K_c - K)^+ \, \overline{g_t - a}$$

    whenever client $i$ is asked: its average moves by a fraction $K$ (`gain`) of its own error, and
    by a fraction $K_c$ (`common_gain`), if that is larger, of the mean error over all clients that
    are asked with it. The noise of mini-batches is in the former and averages out. The latter
    hardly has noise, and how the model is going to move depends on it.

    $K_c$ starts at $2 / (n + 1)$, the gain by spacing. It is multiplied by $1 + \rho / 2$, where
    $\rho$ is the regression of mean errors on those of the correction before, over three pairs of
    corrections: it grows while errors keep their direction, and falls if the model goes back and
    forth. It stays between the smallest $K$ and 1.

    In the mean, a client whose update is longer than the median of the round before counts for
    less, in proportion, so that no client decides about others.

    Nothing of the recording is needed but its initial weights and who took part: this also recovers
    from histories that were made to mislead. Between two corrections the estimates are the same,
    so an estimated round costs next to nothing. But nothing tells how gradients change in between:
    with a learning rate near the largest that works, and in few rounds, take `AnchoredLBFGS`.

    Args:
        gain: $K$ in (0, 1], or `"spacing"` for $2 / (n + 1)$ if the client was asked $n$ rounds
            ago. An average is used $n$ times, and so is its noise; with this gain, the noise adds
            up to that of $n$ exact updates.
        common_gain: $K_c$ in (0, 1], or `"adaptive"`.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Cao et al., FedRecover, IEEE S&P 2023 (the schedule).
        - Gu et al., Fast Federated Learning in the Presence of Arbitrary Device Unavailability,
          NeurIPS 2021 (MIFA: the update that a client sent last in place of the one it does not
          send, which is $K = 1$).

    Examples:
        >>> MovingAverage().gain
        'spacing'
    """

    reads_history = False

    def __init__(
        self, *, gain: float | str = "spacing", common_gain: float | str = "adaptive"
    ) -> None:
        self.gain = check_fraction("gain", gain, ("spacing",), positive=True)
        self.common_gain = check_fraction("common_gain", common_gain, ("adaptive",), positive=True)
        self._rows: dict[str, int] = {}
        self._begin()

    def _begin(self) -> None:
        """Forget what was observed."""
        self._round = torch.full((len(self._rows),), -1, dtype=torch.int64)
        self._averages = torch.empty(0)
        self._common = CommonGain(self.common_gain)
        self._forget_derived()

    def _forget_derived(self) -> None:
        self._largest: Tensor | None = None
        self._aggregated: tuple[tuple[str, ...], ColumnRule, Tensor] | None = None

    def start(self, history: HistoryView, rounds: range) -> None:
        """Forget all that was observed."""
        self._rows = {c: i for i, c in enumerate(history.remaining)}
        self._begin()

    def _allocate(self, weights: Tensor) -> None:
        """Make room on the device of the weights, unless there is."""
        if not len(self._averages):
            self._averages = weights.new_zeros(len(self._rows), weights.numel())

    def observe(
        self, record: RoundRecord, exact: Tensor, global_weights: Tensor, reason: str
    ) -> Errors | None:
        """Move the averages of these clients by their own errors.

        Returns:
            If all were asked, how far they were off, of those that were asked before.
        """
        self._allocate(global_weights)
        rows = rows_of(record, self._rows)
        at, known = picking(rows, exact.device), self._round[rows] >= 0
        found = None
        if reason in ("warmup", "correction") and bool(known.any()):
            gains = torch.ones(len(rows), dtype=torch.float64)
            ages = (record.round - self._round[rows]).double()
            own = 2 / (ages + 1) if isinstance(self.gain, str) else gains * self.gain
            gains[known] = own[known]
            errors = exact - self._averages[at]
            counts, length = self._common.counts(exact, known)
            found = Errors(
                mean=weighted_mean(errors, counts),
                weight=float(counts.sum()),
                length=length,
                gain=float(gains[known].min()),
            )
            # Where the gain is 1, this is the exact update, bit by bit.
            self._averages[at] = errors.mul_((gains - 1).to(errors)[:, None]).add_(exact)
            self._common.moved = rows, gains
        else:
            self._averages[at] = exact
        self._round[rows] = record.round
        self._forget_derived()
        return found

    def pool(self, statistics: Sequence[Errors]) -> None:
        """Learn the common gain from the errors of all clients, and move averages by their mean."""
        self._common.follow(statistics, self._averages)
        self._forget_derived()

    def estimate(self, record: RoundRecord, global_weights: Tensor) -> Estimates:
        """Return the averages; a client that was never asked has no estimate."""
        rows = rows_of(record, self._rows)
        usable = self._round[rows] >= 0
        self._allocate(global_weights)
        if self._largest is None:
            self._largest = largest_magnitudes(self._averages)
        at = picking(rows, global_weights.device)
        return Estimates(self._averages[at], self._largest[at], usable)

    def aggregate(
        self, record: RoundRecord, global_weights: Tensor, rule: ColumnRule
    ) -> AggregatedEstimates | None:
        """Aggregate the averages, unless they are those of the round before."""
        updates, largest, usable = self.estimate(record, global_weights)
        if not bool(usable.all()):
            return None
        known = self._aggregated
        if known is None or known[0] != record.client_ids or known[1] is not rule:
            if rule.factors is None:
                aggregate = trimmed_mean(updates, rule.num_trim)
            else:
                aggregate = weighted_sum(updates, rule.factors.to(updates))
            self._aggregated = known = record.client_ids, rule, aggregate
        return AggregatedEstimates(known[2], largest, usable)

    def kept_bytes(self, num_clients: int, num_parameters: int) -> int:
        """Return the bytes of averages, and of their errors while they are moved."""
        return (2 * num_clients + 2) * num_parameters * torch.float32.itemsize

    def state_dict(self) -> dict[str, Any]:
        """Return clients, averages and what was learnt."""
        return {
            "remaining": list(self._rows),
            "round": self._round,
            "averages": self._averages,
            "common": self._common.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._rows = {c: i for i, c in enumerate(state["remaining"])}
        self._begin()
        self._round, self._averages = state["round"].cpu(), state["averages"]
        self._common.load_state_dict(state["common"])

    def diagnostics(self) -> dict[str, float]:
        """Return the gain of what clients have in common."""
        return {"common_gain": self._common.value}
