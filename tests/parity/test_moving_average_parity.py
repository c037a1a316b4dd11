"""MovingAverage against float64 NumPy, client by client."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from fedrec import FederatedLoop
from fedrec.aggregators import FedAvg
from fedrec.attacks import SignFlip
from fedrec.clients import Client
from fedrec.federation import ClientSampler, Federation
from fedrec.history import MemoryHistory
from fedrec.recoverers import FedRecover, MovingAverage, TrainFromScratch
from fedrec.testing.problems import VectorModule, quadratic_federation
from fedrec.types import ClientUpdate

ROUNDS, LR = 60, 0.3
ATTACK = SignFlip(scale=0.5)
WARMUP, PERIOD, FINAL = 5, 6, 3


class Kept:
    """What the server keeps of a client."""

    def __init__(self, client) -> None:
        self.hessian, self.centre = client.hessian.double().numpy(), client.centre.double().numpy()
        self.size, self.round, self.average = client.num_samples, None, None

    def gradient(self, w: np.ndarray) -> np.ndarray:
        return self.hessian @ (w - self.centre)


class Server:
    """What it learns from all clients together."""

    def __init__(self, gain="spacing", common_gain="adaptive") -> None:
        self.gain, self.common_gain = gain, common_gain
        self.kc = 0.0 if common_gain == "adaptive" else common_gain
        self.length, self.error = np.inf, None
        self.successive: list[tuple[float, float]] = []

    def observe(self, t, clients, sent) -> None:
        """All clients were asked; `sent` is of those who took part."""
        known = [c for c in sent if clients[c].round is not None]
        if known:
            sizes = {c: np.linalg.norm(sent[c]) for c in known}
            counts = {c: min(1.0, self.length / sizes[c]) for c in known}
            errors = {c: sent[c] - clients[c].average for c in known}
            error = sum(counts[c] * errors[c] for c in known) / sum(counts.values())
            own = {c: 2 / (t - clients[c].round + 1) for c in known}
            if self.gain != "spacing":
                own = dict.fromkeys(known, self.gain)
            self.adapt(error, min(own.values()))
            # Half of the clients, or one less, are longer; torch takes the lower of two.
            self.length = sorted(sizes.values())[(len(sizes) - 1) // 2]
            for c in known:
                step = own[c] * errors[c] + max(self.kc - own[c], 0) * error
                clients[c].average = clients[c].average + step
        for c in sent:
            if c not in known:
                clients[c].average = sent[c]
            clients[c].round = t

    def adapt(self, error, least) -> None:
        if least == 1 or self.common_gain != "adaptive":
            self.error = None
            return
        if self.error is not None:
            pair = error @ self.error, self.error @ self.error
            self.successive = [*self.successive, pair][-3:]
            along, size = map(sum, zip(*self.successive, strict=True))
            self.kc = self.kc * (1 + along / size / 2)
        self.kc = np.clip(self.kc, least, 1)
        self.error = error


def by_hand(federation, history, tau, arguments):
    """Recover; returns the weights, the calls as (client, round), and the common gain."""
    clients = {
        c.client_id: Kept(c) for c in federation.clients if c.client_id not in federation.malicious
    }
    server = Server(**arguments)
    w, asked = history.read_round(0, ()).global_weights.double().numpy(), []
    for t in range(ROUNDS):
        ids = [c for c in history.read_round(t).client_ids if c in clients]
        sent = {}
        if t < WARMUP or t >= ROUNDS - FINAL or (t - WARMUP + 1) % PERIOD == 0:
            asked += [(c, t) for c in ids]
            sent = {c: clients[c].gradient(w) for c in ids}
            if t < ROUNDS - FINAL:
                server.observe(t, clients, sent)
        else:
            for c in ids:
                kept = clients[c]
                sent[c] = kept.average
                if sent[c] is None or np.abs(sent[c]).max() > tau:
                    asked.append((c, t))
                    sent[c] = kept.average = kept.gradient(w)
                    kept.round = t
        total_size = sum(clients[c].size for c in ids)
        w = w - LR * sum(clients[c].size / total_size * sent[c] for c in ids)
    return w, asked, server.kc


CASES = [
    {},
    {"gain": 0.3},
    {"common_gain": 0.7},
    {"gain": 0.5, "common_gain": 0.5},
    {"gain": 1.0},
]


@pytest.mark.parametrize("tau", [np.inf, 1.5])
@pytest.mark.parametrize("arguments", CASES, ids=str)
def test_trajectory_is_that_of_the_formula(arguments, tau: float) -> None:
    federation = quadratic_federation(num_clients=8, size=6)
    history, loop = MemoryHistory(), FederatedLoop(accelerator="cpu", enable_progress_bar=False)
    # q2 joins in a round in which estimates are made, and q1 has averages of other rounds.
    sampler = ClientSampler(dropout=0.2, joins={"q2": 12}, leaves={"q5": 40})
    options = {"max_rounds": ROUNDS, "server_lr": LR, "attack": ATTACK, "sampler": sampler}
    loop.record(federation, FedAvg(), history, **options)
    expected, asked, common_gain = by_hand(federation, history, tau, arguments)
    method = FedRecover(
        warmup_rounds=WARMUP,
        correction_period=PERIOD,
        final_rounds=FINAL,
        abnormality_threshold=None if np.isinf(tau) else tau,
        tolerance_rate=None,
        estimator=MovingAverage(**arguments),
    )
    result = loop.recover(federation, history, method, federation.malicious)
    np.testing.assert_allclose(result.global_weights.numpy(), expected, atol=2e-4)
    calls = [(e.client_id, e.round) for e in result.ledger.entries]
    assert Counter(calls) == Counter(asked)
    reasons = {e.reason for e in result.ledger.entries}
    assert ("abnormality" in reasons) == (not np.isinf(tau))
    assert "fallback" in reasons
    assert result.diagnostics["common_gain"] == pytest.approx(common_gain, abs=1e-2)


class Linear(Client):
    """A client with a linear loss: it sends the same gradient in every round."""

    def local_update(self, global_weights, ctx):
        generator = torch.Generator().manual_seed(int(self.client_id[1:]))
        return ClientUpdate(update=torch.randn(6, generator=generator), num_samples=1)


def recovered(federation, max_rounds: int, **arguments):
    """Record, and recover by training from scratch and by FedRecover."""
    history, loop = MemoryHistory(), FederatedLoop(accelerator="cpu", enable_progress_bar=False)
    settings = {"max_rounds": max_rounds, "server_lr": LR, "attack": ATTACK}
    loop.record(federation, FedAvg(), history, **settings)
    method = FedRecover(estimator="average", tolerance_rate=None, **arguments)
    return [
        loop.recover(federation, history, recoverer, federation.malicious)
        for recoverer in (TrainFromScratch(), method)
    ]


def test_on_linear_losses_it_is_training_from_scratch() -> None:
    """Gradients never change, so the average is the exact update, as in Corollary 1."""
    clients = [Linear(f"c{i}", num_samples=1) for i in range(5)]
    federation = Federation(clients, VectorModule(size=6), malicious=["c4"])
    scratch, found = recovered(federation, 40, warmup_rounds=1, final_rounds=0)
    torch.testing.assert_close(found.global_weights, scratch.global_weights)
    # 36 of 40 rounds are estimated: all but the first and rounds 10, 20 and 30.
    assert found.ledger.acp() == pytest.approx(0.9)


def test_on_quadratics_it_ends_where_training_from_scratch_would() -> None:
    """Nothing moves any more only where the mean update is 0: at (sum n A)^-1 sum n A c."""
    federation = quadratic_federation(num_clients=5, size=6)
    benign = [c for c in federation.clients if c.client_id not in federation.malicious]
    _, found = recovered(federation, 1000, correction_period=5, final_rounds=0)
    hessians = [c.num_samples * c.hessian.double() for c in benign]
    centres = [a @ c.centre.double() for a, c in zip(hessians, benign, strict=True)]
    best = torch.linalg.solve(torch.stack(hessians).sum(dim=0), torch.stack(centres).sum(dim=0))
    torch.testing.assert_close(found.global_weights.double(), best, atol=1e-4, rtol=0)
