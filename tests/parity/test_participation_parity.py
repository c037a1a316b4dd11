"""FedRecover where clients come and go, against float64 NumPy with one list of pairs a client."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from fedrec import FederatedLoop
from fedrec.aggregators import FedAvg
from fedrec.attacks import SignFlip
from fedrec.federation import ClientSampler
from fedrec.history import MemoryHistory
from fedrec.recoverers import FedRecover, PairedLBFGS
from fedrec.testing.problems import quadratic_federation
from tests.parity.bfgs import dense_bfgs

ROUNDS, LR, SEED = 60, 0.3, 3
ATTACK = SignFlip(scale=0.5)
WARMUP, PERIOD, FINAL, PAIRS = 5, 10, 3, 2
IDS = tuple(f"q{i}" for i in range(8))

SAMPLERS = {
    "fraction": ClientSampler(fraction=0.6),
    "cohort": ClientSampler(num_clients=4),
    "schedule": ClientSampler(schedule=[IDS[:5], IDS[2:], ("q0", "q7", "q4"), IDS]),
    "dropout": ClientSampler(dropout=0.4),
    "joins-and-leaves": ClientSampler(joins={"q1": 23, "q7": 8}, leaves={"q0": 31, "q3": 2}),
    "all-at-once": ClientSampler(fraction=0.7, dropout=0.2, joins={"q2": 12}, leaves={"q5": 40}),
}


def by_hand(federation, sampler: ClientSampler):
    """Record and recover; returns the weights and (client, round, reason) of every call."""
    gradients = {
        c.client_id: (c.hessian.double().numpy(), c.centre.double().numpy(), c.num_samples)
        for c in federation.clients
    }

    def gradient(client: str, w: np.ndarray) -> np.ndarray:
        hessian, centre, _ = gradients[client]
        return hessian @ (w - centre)

    def mean(updates: dict[str, np.ndarray]) -> np.ndarray:
        sizes = {c: gradients[c][2] for c in updates}
        return sum(sizes[c] * g for c, g in updates.items()) / sum(sizes.values())

    cohorts = [sampler.sample(IDS, t, SEED) for t in range(ROUNDS)]
    w_bar, g_bar = [np.zeros(4)], []
    for cohort in cohorts:
        sent = {
            c: gradient(c, w_bar[-1]) * (-0.5 if c in federation.malicious else 1) for c in cohort
        }
        g_bar.append(sent)
        w_bar.append(w_bar[-1] - LR * mean(sent))

    w, calls = w_bar[0].copy(), []
    pairs = {c: [] for c in IDS}
    for t, cohort in enumerate(cohorts):
        g = {}
        for c in [c for c in cohort if c not in federation.malicious]:
            reason = None
            if t < WARMUP:
                reason = "warmup"
            elif t >= ROUNDS - FINAL:
                reason = "final"
            elif (t - WARMUP + 1) % PERIOD == 0:
                reason = "correction"
            elif not pairs[c]:
                reason = "fallback"
            if reason is None:
                g[c] = g_bar[t][c] + dense_bfgs(pairs[c]) @ (w - w_bar[t])
                continue
            calls.append((c, t, reason))
            g[c] = gradient(c, w)
            if (w - w_bar[t]).any() and t < ROUNDS - FINAL:
                pairs[c] = [*pairs[c], (w - w_bar[t], g[c] - g_bar[t][c])][-PAIRS:]
        if g:
            w = w - LR * mean(g)
    return w, calls


@pytest.mark.parametrize("name", SAMPLERS)
def test_pairs_are_per_client_and_estimates_only_of_rounds_it_took_part_in(name: str) -> None:
    sampler = SAMPLERS[name]
    federation = quadratic_federation(num_clients=8, size=4, num_malicious=2)
    loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False, logger=False, seed=SEED)
    history = MemoryHistory()
    kwargs = {"max_rounds": ROUNDS, "server_lr": LR, "attack": ATTACK, "sampler": sampler}
    loop.record(federation, FedAvg(), history, **kwargs)
    for t in range(ROUNDS):
        assert history.read_round(t).client_ids == sampler.sample(IDS, t, SEED)

    recoverer = FedRecover(
        warmup_rounds=WARMUP,
        correction_period=PERIOD,
        final_rounds=FINAL,
        estimator=PairedLBFGS(buffer_size=PAIRS),
        tolerance_rate=None,
    )
    result = loop.recover(federation, history, recoverer, federation.malicious, attack=ATTACK)
    expected, calls = by_hand(federation, sampler)
    np.testing.assert_allclose(result.global_weights.numpy(), expected, atol=5e-4)
    asked = Counter(c for c, _, _ in calls)
    taken = Counter(c for t in range(ROUNDS) for c in sampler.sample(IDS, t, SEED))
    assert result.ledger.cp() == pytest.approx(
        {c: 1 - asked[c] / taken[c] for c in IDS if c not in federation.malicious}
    )
    entries = [(e.client_id, e.round, e.reason) for e in result.ledger.entries]
    assert sorted(entries) == sorted(calls)
