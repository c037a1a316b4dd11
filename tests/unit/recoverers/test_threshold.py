from dataclasses import replace

import numpy as np
import pytest
import torch

from fedrec.recoverers import threshold as module
from fedrec.recoverers.threshold import (
    AbnormalityThreshold,
    abnormality_threshold,
    largest_magnitudes,
    raised_threshold,
)
from fedrec.types import CohortUpdates


def reference(rounds: list[np.ndarray], allowed: list[int]) -> float:
    """max over t of the (allowed + 1)-th largest magnitude, by sorting in float64."""
    found = 0.0
    for values, k in zip(rounds, allowed, strict=True):
        if values.size:
            magnitudes = np.abs(values.astype(np.float64)).ravel()
            found = max(found, float(np.partition(magnitudes, values.size - k - 1)[-k - 1]))
    return found


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 18])
@pytest.mark.parametrize(
    ("rate", "allowed"), [(0.0, 0), (0.001, 0), (0.01, 3), (0.29, 87), (0.999, 299)]
)
def test_threshold_is_the_order_statistic_by_sorting(
    block: int, rate: float, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    rng = np.random.default_rng(0)
    scales = (1.0, 3.0, 2.0, 3.1)
    rounds = [(rng.normal(size=(6, 50)) * a).astype(np.float32) for a in scales]
    rounds[1] = np.round(rounds[1])  # ties, also at the threshold
    for count in range(1, 5):
        found = abnormality_threshold((torch.from_numpy(g) for g in rounds[:count]), rate)
        assert found == reference(rounds[:count], [allowed] * count)


def test_rounds_differ_in_size() -> None:
    rounds = [torch.arange(-9.0, 1.0)[None], torch.tensor([[6.0, -8.0, 7.0]])]
    # floor(0.2 * 10) = 2 entries may exceed in the first round, none in the second.
    assert abnormality_threshold(rounds, 0.2) == 8.0
    assert abnormality_threshold(rounds[:1], 0.2) == 7.0


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
def test_equal_entries_are_their_own_threshold(rate: float) -> None:
    assert abnormality_threshold([torch.full((3, 4), -2.5)], rate) == 2.5


def test_zeros_and_rounds_without_entries_give_zero() -> None:
    assert abnormality_threshold([], 0.1) == 0.0
    assert abnormality_threshold([torch.zeros(0, 5), torch.zeros(2, 5)], 0.1) == 0.0


def test_largest_negative_entry_counts() -> None:
    assert abnormality_threshold([torch.tensor([[1.0, -3.0], [2.0, 0.5]])], 0.0) == 3.0


def sent_by(rows: list[list[float]]) -> CohortUpdates:
    ids = tuple("abcd"[: len(rows)])
    return CohortUpdates(
        client_ids=ids,
        updates=torch.tensor(rows),
        num_samples=torch.ones(len(rows), dtype=torch.int64),
    )


def alone(value):
    return [value]


@pytest.mark.parametrize(
    ("exact", "estimates", "threshold"),
    [
        pytest.param([[3.0, 0], [4, 0], [5, 0]], [[2.0, 0], [2, 1], [9, 0]], 5.0, id="all right"),
        pytest.param([[3.0, 0], [4, 0]], [[2.0, 0], [2, 0]], 1.0, id="half of the clients"),
        pytest.param([[3.0, 0], [4, 0], [5, 0]], [[2.0, 0], [2, 0], [-2, 0]], 1.0, id="one wrong"),
        pytest.param([[3.0, 0], [4, 0], [1, 0]], [[2.0, 0], [2, 0], [1.5, 0]], 1.0, id="one small"),
    ],
)  # fmt: skip
def test_threshold_rises_once_most_clients_are_asked_for_right_estimates(
    exact: list[list[float]], estimates: list[list[float]], threshold: float
) -> None:
    tau = AbnormalityThreshold(tolerance_rate=0.0)
    tau.value = 1.0  # of a recording; 4 clients
    tau.observe(sent_by([[2.0, 0]] * 4), "correction", None, 4, alone)
    assert tau.value == 1.0
    tau.observe(sent_by(exact), "abnormality", sent_by(estimates), 4, alone)
    assert tau.value == threshold
    tau.observe(sent_by([[6.0, 0]]), "abnormality", sent_by([[6.0, 0]]), 4, alone)
    assert tau.value == threshold
    resumed = AbnormalityThreshold(tolerance_rate=0.0)
    resumed.load_state_dict(tau.state_dict())
    for one in (tau, resumed):
        one.observe(sent_by([[-7.0, 0]] * 4), "correction", None, 4, alone)
        assert one.value == (7.0 if threshold > 1 else 1.0)


def test_clients_without_an_estimate_do_not_raise_the_threshold() -> None:
    tau = AbnormalityThreshold(tolerance_rate=0.0)
    tau.value = 1.0
    exceeding = replace(sent_by([[9.0, 0]]), client_ids=("d",))
    tau.observe(sent_by([[9.0, 0]] * 3), "fallback", exceeding, 4, alone)
    assert tau.value == 1.0
    tau.observe(sent_by([[9.0, 0]] * 4), "correction", None, 4, alone)
    assert tau.value == 1.0


@pytest.mark.parametrize("options", [{"rises": False}, {"fixed": 1.0}])
def test_a_threshold_that_does_not_rise(options: dict[str, float]) -> None:
    tau = AbnormalityThreshold(tolerance_rate=0.0, **options)
    tau.value = 1.0
    tau.observe(sent_by([[9.0]] * 4), "abnormality", sent_by([[9.0]] * 4), 4, alone)
    assert tau.value == 1.0


def test_a_round_raises_the_threshold_whichever_processes_have_its_rows() -> None:
    rows = [[9.0, -8.0, 1.0], [7.0, 2.0, -6.0]]
    sent = sent_by(rows)
    # floor(0.34 * 6) = 2 entries may exceed: 9 and 8 do, so the third largest is the threshold.
    for before, after in [(0.0, 7.0), (6.5, 7.0), (7.0, 7.0), (7.5, 7.5)]:
        assert raised_threshold(before, sent, 0.34, alone) == after

    def gather(value):  # of two processes
        return [value, torch.tensor([7.0])]

    first = replace(sent, updates=torch.tensor(rows[:1]))
    assert raised_threshold(6.5, first, 0.34, gather) == 7.0


def test_largest_magnitudes_of_rows() -> None:
    rows = torch.tensor([[1.0, -3.0], [-1.0, 2.0], [0.0, -0.0], [float("-inf"), 1.0]])
    assert largest_magnitudes(rows).tolist() == [3.0, 2.0, 0.0, float("inf")]
    assert bool(largest_magnitudes(torch.tensor([[1.0, float("nan")]])).isnan())
