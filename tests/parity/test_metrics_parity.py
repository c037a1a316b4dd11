"""TER, ASR, CP and ACP against float64 NumPy, written from the paper's definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedrec.metrics import REASONS, AttackSuccessRate, CostLedger, TestErrorRate


@pytest.mark.parametrize("seed", range(5))
def test_rates(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(257, 7))
    true = rng.integers(0, 7, size=257)
    target_label = int(rng.integers(0, 7))

    ter, asr = TestErrorRate(), AttackSuccessRate(target_label=target_label)
    for rows in np.array_split(np.arange(257), 4):
        batch = torch.from_numpy(scores[rows]), torch.from_numpy(true[rows])
        ter.update(*batch)
        asr.update(*batch)

    wrong, success, candidates = 0, 0, 0
    for row, label in zip(scores, true, strict=True):
        prediction = max(range(7), key=lambda c, row=row: row[c])
        wrong += prediction != label
        if label != target_label:
            candidates += 1
            success += prediction == target_label
    assert float(ter.compute()) == pytest.approx(wrong / 257, abs=1e-7)
    assert float(asr.compute()) == pytest.approx(success / candidates, abs=1e-7)
    assert 0 < candidates < 257  # inputs of the target label were there to be dropped


@pytest.mark.parametrize("seed", range(5))
def test_cost_saving(seed: int) -> None:
    """Any number of requests in any order, against a table of who was asked in which round."""
    rng = np.random.default_rng(seed)
    num_clients, horizon = 9, 40
    total = rng.integers(0, horizon + 1, size=num_clients)
    total[0] = 0
    names = [f"client-{i}" for i in range(num_clients)]
    ledger = CostLedger({name: int(t) for name, t in zip(names, total, strict=True)})

    asked = np.zeros((num_clients, horizon), dtype=bool)
    reason_of = np.full((num_clients, horizon), -1)
    num_bytes = 0
    for _ in range(int(rng.integers(1, 500))):
        i, t, r = (int(rng.integers(n)) for n in (num_clients, horizon, len(REASONS)))
        size = int(rng.integers(1000))
        ledger.add(names[i], t, REASONS[r], num_bytes=size)
        num_bytes += size
        if not asked[i, t]:
            reason_of[i, t] = r
        asked[i, t] = True

    counted = total > 0
    cp = (total[counted] - asked[counted].sum(axis=1)) / total[counted]
    found = ledger.cp()
    assert list(found) == [name for name, t in zip(names, total, strict=True) if t > 0]
    np.testing.assert_allclose(list(found.values()), cp, rtol=1e-12)
    assert ledger.acp() == pytest.approx(cp.mean(), rel=1e-12)
    expected = {
        reason: (reason_of[counted] == r).sum() / counted.sum() for r, reason in enumerate(REASONS)
    }
    assert ledger.exact_rounds_by_reason() == pytest.approx(expected, rel=1e-12)
    assert ledger.total_bytes() == num_bytes


def test_removed_clients_would_inflate_the_average() -> None:
    """80 remaining clients asked in 222 of 2,000 rounds: 0.889, and not the 0.911 over all 100."""
    remaining = [f"client-{i:02d}" for i in range(80)]
    ledger = CostLedger(dict.fromkeys(remaining, 2000))
    for name in remaining:
        for t in range(222):
            ledger.add(name, t, "correction")
    assert ledger.acp() == pytest.approx(1 - 222 / 2000)
    over_all = (80 * ledger.acp() + 20) / 100
    assert over_all == pytest.approx(0.9112)


def test_fixes_count_for_the_client_alone() -> None:
    """Paper: T_r is per client, so one client's fixes lower its own CP and 1/n' of that the ACP."""
    ledger = CostLedger({"a": 100, "b": 100})
    for t in range(11):
        for name in ("a", "b"):
            ledger.add(name, t, "warmup")
    for t in (50, 60, 70):
        ledger.add("b", t, "abnormality")
    assert ledger.cp() == pytest.approx({"a": 0.89, "b": 0.86})
    assert ledger.acp() == pytest.approx(0.875)
