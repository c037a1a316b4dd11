"""MovingAverage by hand: two or three clients, two parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedrec.aggregators import FedAvg, TrimmedMean
from fedrec.aggregators.base import ColumnRule
from fedrec.exceptions import ConfigurationError
from fedrec.history import MemoryHistory
from fedrec.loop import FederatedLoop
from fedrec.recoverers import FedRecover, MovingAverage, UpdateFilter
from fedrec.testing.problems import quadratic_federation
from fedrec.types import CohortUpdates, RoundRecord

WEIGHTS = torch.zeros(2)


def started(ids: str = "ab", **arguments: Any) -> MovingAverage:
    estimator = MovingAverage(**arguments)
    estimator.start(SimpleNamespace(remaining=tuple(ids)), range(20))  # type: ignore[arg-type]
    return estimator


def record(t: int, ids: str = "ab") -> RoundRecord:
    """A round of which no update was read."""
    sent = CohortUpdates(
        client_ids=tuple(ids),
        updates=torch.empty(len(ids), 0),
        num_samples=torch.ones(len(ids), dtype=torch.int64),
    )
    return RoundRecord(round=t, global_weights=WEIGHTS, sent=sent, aggregate=WEIGHTS)


def learn(
    estimator: MovingAverage, t: int, exact: list[float], reason: str, ids: str = "ab"
) -> None:
    """Let it learn from a round, as the only one; updates are (x, 0)."""
    updates = torch.tensor([[x, 0.0] for x in exact])
    errors = estimator.observe(record(t, ids), updates, WEIGHTS, reason)
    if errors is not None:
        estimator.pool([errors])


def averages(estimator: MovingAverage, t: int, ids: str = "ab") -> Tensor:
    return estimator.estimate(record(t, ids), WEIGHTS).updates[:, 0].clone()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"gain": 0.0}, r"`gain` to be a finite number in \(0, 1\], but got 0.0"),
        (
            {"gain": "kalman"},
            r"`gain` to be a number in \(0, 1\], or a name, but got 'kalman'.*Known: spacing",
        ),
        ({"common_gain": 0}, r"`common_gain` to be a finite number in \(0, 1\], but got 0"),
        (
            {"common_gain": "spacing"},
            r"`common_gain` to be a number in \(0, 1\], or a name, but got.*Known: adaptive",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        MovingAverage(**arguments)


def test_whoever_was_never_asked_has_no_estimate() -> None:
    estimator = started()
    assert estimator.estimate(record(0, "b"), WEIGHTS).usable.tolist() == [False]
    learn(estimator, 0, [7.0], "fallback", "b")
    updates, largest, usable = estimator.estimate(record(1), WEIGHTS)
    assert usable.tolist() == [False, True]
    torch.testing.assert_close(updates[1], torch.tensor([7.0, 0.0]))
    assert float(largest[1]) == 7.0


def test_the_average_moves_by_what_is_a_clients_own_and_by_what_is_not() -> None:
    estimator = started(gain=0.25, common_gain=0.5)
    learn(estimator, 0, [8.0, -8.0], "warmup")
    # Errors are -4 and 4: a quarter of the way. On average there is none.
    learn(estimator, 10, [4.0, -4.0], "correction")
    assert averages(estimator, 11).tolist() == [7.0, -7.0]
    # Both are 4 more: half of the way.
    learn(estimator, 20, [11.0, -3.0], "correction")
    assert averages(estimator, 21).tolist() == [9.0, -5.0]
    # Whoever is asked alone starts again.
    learn(estimator, 22, [4.0], "abnormality", "a")
    assert averages(estimator, 23).tolist() == [4.0, -5.0]


def test_the_gain_by_spacing_is_one_in_successive_rounds() -> None:
    estimator = started(common_gain=0.1)
    learn(estimator, 0, [0.0, 0.0], "warmup")
    # Half of the way after three rounds.
    for t, exact, average in ((1, 8.0, 8.0), (4, 0.0, 4.0), (7, 0.0, 2.0)):
        learn(estimator, t, [exact, exact], "correction")
        assert averages(estimator, t + 1).tolist() == [average, average]


@pytest.mark.parametrize(
    ("errors", "gain"),
    [
        # The own gain, until something is known.
        ([8.0], 0.4),
        # 8 again: 0.4 (1 + 1 / 2).
        ([8.0, 8.0], 0.6),
        # Then -8: of 64 - 64 there is nothing left.
        ([8.0, 8.0, -8.0], 0.6),
        # Back and forth: half of 0.6, but not below the own gain.
        ([8.0, 8.0, -8.0, 8.0, -8.0], 0.4),
        ([8.0, 80.0], 1.0),
    ],
)
def test_the_common_gain_grows_as_errors_go_on(errors: list[float], gain: float) -> None:
    estimator = started(gain=0.4)
    learn(estimator, 0, [0.0, 0.0], "warmup")
    learn(estimator, 1, [0.0, 0.0], "correction")  # without an error it learns nothing
    for t, error in enumerate(errors, 2):
        exact = (averages(estimator, t) + error).tolist()
        learn(estimator, t, exact, "correction")
    assert estimator.diagnostics()["common_gain"] == pytest.approx(gain)


def test_the_gain_in_common_does_not_move_those_whose_own_is_larger() -> None:
    """a was asked two rounds before, so 2 / 3; b and c eleven rounds before, so 1 / 6."""
    estimator = started("abc", common_gain=0.5)
    learn(estimator, 0, [0.0, 0.0, 0.0], "warmup", "abc")
    learn(estimator, 9, [0.0], "fallback", "a")
    learn(estimator, 11, [6.0, 6.0, 0.0], "correction", "abc")
    # b: 6 / 6, and a third of the mean error of 4 more; c: as much more.
    torch.testing.assert_close(averages(estimator, 12, "abc"), torch.tensor([4, 1 + 4 / 3, 4 / 3]))


def test_a_long_update_counts_as_one_of_median_length() -> None:
    estimator = started("abc", gain=0.5, common_gain=1.0)
    learn(estimator, 0, [1.0, 1.0, 100.0], "warmup", "abc")
    learn(estimator, 1, [1.0, 1.0, 100.0], "warmup", "abc")
    # Of lengths 2, 2, 200, where 1 was the median: 1/2, 1/2 and 1/200 of errors 1, 1 and 100.
    updates = torch.tensor([[2.0, 0], [2.0, 0], [200.0, 0]])
    errors = estimator.observe(record(2, "abc"), updates, WEIGHTS, "correction")
    assert errors is not None
    assert (errors.weight, errors.length) == (pytest.approx(1.005), 2.0)
    torch.testing.assert_close(errors.mean, torch.tensor([1.5 / 1.005, 0]))


def test_the_mean_error_is_that_of_the_estimators_of_some_clients_each() -> None:
    together, apart = started("abc", gain=0.5), [started(c, gain=0.5) for c in "abc"]
    for t, exact in ((0, [0.0, 3.0, 6.0]), (1, [1.0, 5.0, 9.0]), (2, [4.0, 4.0, 4.0])):
        learn(together, t, exact, "correction", "abc")
        said = [
            one.observe(record(t, c), torch.tensor([[x, 0.0]]), WEIGHTS, "correction")
            for one, c, x in zip(apart, "abc", exact, strict=True)
        ]
        for one in apart:
            if t:
                one.pool([errors for errors in said if errors is not None])
    found = torch.cat([averages(one, 3, c) for one, c in zip(apart, "abc", strict=True)])
    torch.testing.assert_close(found, averages(together, 3, "abc"))
    gains = [one.diagnostics()["common_gain"] for one in apart]
    assert gains == [pytest.approx(together.diagnostics()["common_gain"])] * 3


def test_an_aggregate_is_computed_once_between_two_corrections() -> None:
    estimator = started("abc")
    learn(estimator, 0, [1.0, 2.0, 9.0], "warmup", "abc")
    middle = ColumnRule(factors=None, num_trim=1, server_lr=0.1)
    some = ColumnRule(factors=torch.tensor([0.5, 0.25, 0.25]), num_trim=0, server_lr=0.1)

    def aggregate(rule: ColumnRule, ids: str = "abc") -> Tensor:
        found = estimator.aggregate(record(1, ids), WEIGHTS, rule)
        assert found is not None
        return found.aggregate

    first = aggregate(middle)
    assert first.tolist() == [2.0, 0.0]
    assert aggregate(middle) is first
    # Of another rule, of others, and after they were asked again, it is another one.
    assert aggregate(some).tolist() == [3.25, 0.0]
    assert aggregate(ColumnRule(torch.tensor([1.0]), 0, 0.1), "b").tolist() == [2.0, 0.0]
    learn(estimator, 2, [3.0, 4.0, 9.0], "fallback", "abc")
    assert aggregate(middle).tolist() == [4.0, 0.0]


def test_it_tells_what_it_keeps() -> None:
    assert started().kept_bytes(2, 100) == (2 * 2 + 2) * 100 * 4


def test_a_state_can_be_taken_over_before_anything_was_observed() -> None:
    other = MovingAverage()
    other.load_state_dict(started().state_dict())
    assert other.estimate(record(0), WEIGHTS).usable.tolist() == [False, False]


class Unreadable(MemoryHistory):
    """A history that does not give out updates."""

    def read_round(self, t, client_ids=None):
        assert client_ids is not None
        assert tuple(client_ids) == ()
        return super().read_round(t, client_ids)


SETTINGS = {"warmup_rounds": 2, "correction_period": 4, "final_rounds": 2, "estimator": "average"}


@pytest.mark.parametrize("rule", [FedAvg(), TrimmedMean(trim=1)])
def test_nothing_that_was_sent_is_read(rule: Any) -> None:
    federation, history = quadratic_federation(), Unreadable()
    loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False, logger=False)
    loop.record(federation, rule, history, max_rounds=20, server_lr=0.3)
    method = FedRecover(**SETTINGS, tolerance_rate=None)
    result = loop.recover(federation, history, method, ["q4"])
    # 2 + 4 + 2 of 20 rounds.
    assert result.ledger.acp() == pytest.approx(0.6)
    assert result.diagnostics["estimated_updates"] == 4 * 12


def test_it_needs_no_updates_that_are_kept() -> None:
    federation = quadratic_federation()
    loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False, logger=False)
    found = []
    for history in (MemoryHistory(), MemoryHistory(keep={"every": 20})):
        loop.record(federation, FedAvg(), history, max_rounds=20, server_lr=0.3)
        method = FedRecover(**SETTINGS, tolerance_rate=None)
        found.append(loop.recover(federation, history, method, ["q4"]))
    whole, sparse = found
    assert torch.equal(whole.global_weights, sparse.global_weights)
    assert whole.ledger.entries == sparse.ledger.entries


def test_a_filter_still_compares_with_averages() -> None:
    federation, history = quadratic_federation(), MemoryHistory()
    loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False, logger=False)
    loop.record(federation, FedAvg(), history, max_rounds=20, server_lr=0.3)
    method = FedRecover(**SETTINGS, update_filter=UpdateFilter(max_distance=1e-9))
    result = loop.recover(federation, history, method, ["q4"])
    # In corrections and at the end nobody sends exactly the average: it is taken instead.
    assert result.diagnostics["filtered_updates"] > 0
