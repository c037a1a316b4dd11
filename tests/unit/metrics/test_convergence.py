"""When a model has converged, after the paper's definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedrec.exceptions import ConfigurationError
from fedrec.metrics import CostLedger, rounds_to_converge
from fedrec.recipe.step_results import method_result
from fedrec.types import RunResult


@pytest.mark.parametrize("seed", range(8))
def test_it_is_the_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    errors = 0.9 * np.exp(-np.arange(80) / 12) + rng.normal(0, 0.002, 80)
    p, epsilon = 10, 0.003

    def fell(k: int, since: int) -> float:
        return float(errors[:since].min() - errors[:k].min())

    expected = next((k for k in range(p + 1, 81) if fell(k, k - p) <= epsilon < fell(k, 1)), None)
    assert expected is not None
    assert rounds_to_converge(errors.tolist(), patience=p, tolerance=epsilon) == expected


def test_a_plateau_before_it_learns_is_not_convergence() -> None:
    assert rounds_to_converge([0.9] * 30 + [0.1] * 40) == 31 + 20


def test_still_falling_or_too_short_is_none() -> None:
    assert rounds_to_converge([1 - k / 100 for k in range(60)]) is None
    assert rounds_to_converge([0.1] * 60) is None  # it never learned anything
    assert rounds_to_converge([0.9] + [0.1] * 20) is None
    assert rounds_to_converge([0.9] + [0.1] * 21) == 22
    assert rounds_to_converge([]) is None


def test_a_fall_of_the_tolerance_does_not_count() -> None:
    errors = [0.75, 0.5, 0.5, 0.375, 0.375, 0.375]
    assert rounds_to_converge(errors, patience=2, tolerance=0.125) == 4
    assert rounds_to_converge(errors, patience=2, tolerance=0.1249) == 6
    # A fall of 10 in 10,000, in float32, is one of 0.001.
    single = np.float32([0.9, 0.1242, 0.1232]).tolist()
    assert single[1] - single[2] > 0.001
    assert rounds_to_converge(single, patience=1) == 3


@pytest.mark.parametrize("arguments", [{"patience": 0}, {"tolerance": -0.1}])
def test_arguments_are_checked(arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        rounds_to_converge([0.1], **arguments)  # type: ignore[arg-type]


def _kept(curve: list[dict[str, float]], ledger: CostLedger) -> dict[str, Any]:
    return method_result(
        RunResult(
            name="a",
            global_weights=torch.zeros(1),
            rounds=40,
            seconds=1.0,
            curve=curve,
            ledger=ledger,
        )
    )


def test_costs_until_then() -> None:
    ledger = CostLedger({"a": 40, "b": 40, "gone": 0})
    for t in range(40):
        ledger.add("a", t, "scratch", local_steps=3)
    ledger.add("b", 2, "abnormality", local_steps=5)
    ledger.add("b", 30, "final", local_steps=5)
    ledger.add("gone", 1, "other", local_steps=100)
    curve = [{"round": float(t), "ter": 0.9 if t < 4 else 0.2} for t in range(40)]
    found = _kept(curve, ledger)
    # The fall is in the first 4 + 1 rounds, and 20 later no longer in the last 20.
    assert found["rounds_to_converge"] == 25
    assert found["exact_rounds_to_converge"] == (25 + 1) / 2
    assert found["local_steps_to_converge"] == (25 * 3 + 5) / 2
    assert len(ledger) == 43  # it was not cut


def test_nothing_without_an_error_after_every_round() -> None:
    curve = [{"round": float(t), "ter": 0.2} for t in range(0, 40, 2)]
    found = _kept(curve, CostLedger({"a": 40}))
    assert found["rounds_to_converge"] is found["local_steps_to_converge"] is None
