"""The estimates of a whole cohort, whose clients may be in shards."""

from __future__ import annotations

import copy
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from fedrec._guard import returned
from fedrec.aggregators.base import ColumnRule
from fedrec.component import goes_with
from fedrec.exceptions import RecoveryError
from fedrec.recoverers.aggregated import AggregatedUpdates
from fedrec.recoverers.estimators.base import Estimates, Estimator
from fedrec.types import CohortUpdates, RoundRecord

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView

__all__ = ["CohortEstimator"]

T = TypeVar("T")


class CohortEstimator:
    """Estimates the updates of all clients of a recovery.

    Clients in shards (`fedrec.distributed`) have an estimator for each shard: what it learns and
    estimates is a function of the shard, in whichever process. Rows stay where they are. Between
    processes travel the verdicts on estimates, and what `Estimator.observe` returns.

    Args:
        estimator: Estimates the updates of all clients; with shards, it is copied for each of them.
    """

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._own: dict[int | None, Estimator] = {None: estimator}
        self._history: HistoryView | None = None

    def start(self, history: HistoryView, rounds: range) -> None:
        """Start all estimators; see `Estimator.start`."""
        for shard, view in self._enter(history).items():
            self._own[shard].start(view, rounds)

    def _enter(self, history: HistoryView) -> dict[int | None, HistoryView]:
        """Have an estimator for each shard that this process has; return what each sees."""
        views = history.shards()
        self._history = history
        self._own = {
            shard: self._estimator if shard is None else copy.deepcopy(self._estimator)
            for shard in views
        }
        return views

    def observe(
        self, record: RoundRecord, exact: CohortUpdates, global_weights: Tensor, reason: str
    ) -> None:
        """Let the estimators learn from exact updates; see `Estimator.observe`.

        Args:
            record: The recorded round of these clients.
            exact: What they sent now, in the same order.
            global_weights: Shape $(d,)$.
            reason: Why they were asked.
        """
        sent = exact.shards()
        found = [
            self._own[shard].observe(part, sent[shard].updates, global_weights, reason)
            for shard, part in _by_shard(record).items()
        ]
        every = [one for some in self.gather(found) for one in some if one is not None]
        if every:
            for estimator in self._own.values():
                estimator.pool(every)

    def estimate(self, record: RoundRecord, global_weights: Tensor) -> tuple[CohortUpdates, Tensor]:
        """Estimate the updates of the clients of `record`; see `Estimator.estimate`.

        Returns:
            The estimates; and the largest magnitude of each, in the order of `record.client_ids`,
            shape $(m,)$, on the CPU, in all processes. It is NaN where there is no estimate, or it
            has NaN.
        """
        found = [
            _estimated(self._own[shard], part, global_weights)
            for shard, part in _by_shard(record).items()
        ]
        largest = [torch.where(one.usable, one.largest.cpu(), float("nan")) for one in found]
        # A process need not have any of these clients.
        rows = [one.updates for one in found] or [global_weights.new_empty(0, len(global_weights))]
        sent = record.sent
        return sent.with_rows(rows), sent.gathered(largest)

    def aggregate(
        self, record: RoundRecord, global_weights: Tensor, rule: ColumnRule
    ) -> tuple[AggregatedUpdates, Tensor] | None:
        """Estimate and aggregate in one pass; see `Estimator.aggregate`.

        Returns:
            The estimates, and the largest magnitudes as from `estimate`; or `None` if clients are
            in shards, or the estimator does not do it.
        """
        if None not in self._own:
            return None
        estimator = self._own[None]
        if not goes_with(estimator, "aggregate", "estimate"):
            return None
        found = estimator.aggregate(record, global_weights, rule)
        if found is None:
            return None

        def compute() -> Tensor:
            return estimator.estimate(record, global_weights).updates

        largest = torch.where(found.usable, found.largest.cpu(), float("nan"))
        return AggregatedUpdates(found.aggregate, compute, record.sent), largest

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the estimator, where clients are not in shards."""
        return self._own[None].state_dict() if None in self._own else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        if state:
            self._own = {None: self._estimator}
            self._estimator.load_state_dict(state)

    def shard_states(self) -> dict[int, dict[str, Any]]:
        """Return the state of the estimator of each shard that this process has."""
        return {shard: one.state_dict() for shard, one in self._own.items() if shard is not None}

    def load_shard_states(self, states: dict[int, dict[str, Any]], history: HistoryView) -> None:
        """Take over what `shard_states` returned, of the shards that this process has."""
        for shard in self._enter(history):
            if shard is not None:
                self._own[shard].load_state_dict(states[shard])

    def diagnostics(self) -> dict[str, float]:
        """Return the numbers of the estimator; see `Estimator.counted` for those of several."""
        own = [one.diagnostics() for one in self._own.values()]
        every = [numbers for some in self.gather(own) for numbers in some]
        found: dict[str, float] = {}
        for name in dict.fromkeys(name for numbers in every for name in numbers):
            values = [numbers[name] for numbers in every if name in numbers]
            if name in self._estimator.counted:
                found[name] = sum(values)
            else:
                found[name] = values[0] if len(set(values)) == 1 else fmean(values)
        return found

    def gather(self, value: T) -> list[T]:
        """Return the value of each process, of which the first has the first shards."""
        return [value] if self._history is None else self._history.gather(value)


def _estimated(estimator: Estimator, record: RoundRecord, global_weights: Tensor) -> Estimates:
    """Return an estimator's estimates of the clients of `record`, and check them."""
    method = f"{type(estimator).__name__}.estimate"
    found = estimator.estimate(record, global_weights)
    if not isinstance(found, Estimates):
        raise RecoveryError(
            f"Expected {method} to return Estimates, but got {type(found).__name__}. HINT: "
            "`Estimates(updates, largest, usable)` are a row, a number and a verdict per client."
        )
    rows = len(record.client_ids)
    shape = (rows, len(global_weights))
    updates = returned(method, found.updates, shape, global_weights.dtype, RecoveryError)
    for name, vector in (("largest", found.largest), ("usable", found.usable)):
        if not isinstance(vector, Tensor) or vector.shape != (rows,):
            raise RecoveryError(
                f"Expected `{name}` of what {method} returns to have shape ({rows},), one for each "
                f"client, but got {getattr(vector, 'shape', type(vector).__name__)}."
            )
    return found._replace(updates=updates)


def _by_shard(record: RoundRecord) -> dict[int | None, RoundRecord]:
    """Return the round as each of this process's shards that take part has it."""
    return {
        shard: record if sent is record.sent else replace(record, sent=sent)
        for shard, sent in record.sent.shards().items()
    }
