"""AnchoredSecant against float64 NumPy, client by client and with dense matrices."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from fedrec import Attack, FederatedLoop
from fedrec.aggregators import FedAvg
from fedrec.federation import ClientSampler
from fedrec.history import MemoryHistory
from fedrec.recoverers import AnchoredSecant, FedRecover, TrainFromScratch
from fedrec.recoverers.estimators import secant
from fedrec.testing.problems import quadratic_federation

ROUNDS, LR = 60, 0.3
WARMUP, PERIOD, FINAL, PAIRS = 5, 6, 3, 2
EARLY = 18  # rounds after which no model is near its end


class Reverse(Attack):
    """Malicious clients send minus half their update."""

    def craft(self, updates, malicious, ctx):
        return torch.where(malicious[:, None], -0.5 * updates, updates)


class Client:
    """What the server keeps of a client."""

    def __init__(self, client) -> None:
        self.hessian, self.centre = client.hessian.double().numpy(), client.centre.double().numpy()
        self.size = client.num_samples
        self.round = None

    def gradient(self, w: np.ndarray) -> np.ndarray:
        return self.hessian @ (w - self.centre)

    def observe(self, t, w, wb, gb, g, anchor) -> None:
        self.round, self.w, self.wb, self.gb, self.g, self.anchor = t, w, wb, gb, g, anchor


class Server:
    """What it learns from all clients together."""

    def __init__(self, gain, common_gain, history_weight, curvature_weight, num_secants) -> None:
        self.gain, self.common_gain = gain, common_gain
        self.history_weight, self.curvature_weight = history_weight, curvature_weight
        self.beta = 1.0 if history_weight == "pooled" else history_weight
        self.gamma = 1.0 if curvature_weight == "pooled" else curvature_weight
        self.kc = 0.5 if common_gain == "adaptive" else common_gain
        self.most, self.length, self.error = num_secants, np.inf, None
        self.points: list[tuple[np.ndarray, np.ndarray]] = []
        self.changes: list[tuple[np.ndarray, ...]] = []
        self.successive: list[tuple[float, float]] = []

    def curvature(self, v: np.ndarray) -> np.ndarray:
        """Ridge regression of update on model, in the other of its two forms."""
        if not self.points:
            return np.zeros_like(v)
        x, y = (np.array(every) for every in zip(*self.points, strict=True))
        x, y = x - x.mean(axis=0), y - y.mean(axis=0)
        ridge = 0.1 * (x**2).sum() / len(x)
        return y.T @ x @ np.linalg.inv(x.T @ x + ridge * np.eye(len(v))) @ v

    def estimate(self, client: Client, w, wb, gb) -> np.ndarray:
        v = (w - client.w) - self.beta * (wb - client.wb)
        changed = self.beta * (gb - client.gb) + self.gamma * self.curvature(v)
        return client.anchor + changed

    def observe(self, t, w, wb, clients, gbs, sent, warm) -> None:
        """All clients were asked; gbs and sent are of those who took part."""
        known = [c for c in sent if clients[c].round is not None]
        if known:
            sizes = {c: np.linalg.norm(sent[c]) for c in known}
            counts = {c: min(1.0, self.length / sizes[c]) for c in known}

            def mean(of) -> np.ndarray:
                return sum(counts[c] * of(c, clients[c]) for c in known) / sum(counts.values())

            errors = {c: sent[c] - self.estimate(clients[c], w, wb, gbs[c]) for c in known}
            error = mean(lambda c, _: errors[c])
            move, recorded_move = mean(lambda _, k: w - k.w), mean(lambda _, k: wb - k.wb)
            now = mean(lambda c, k: sent[c] - k.g)
            then = mean(lambda c, k: gbs[c] - k.gb)
            own = {c: 2 / (t - clients[c].round + 1) for c in known}
            if self.gain != "spacing":
                own = dict.fromkeys(known, self.gain)
            if warm:
                own = dict.fromkeys(known, 1.0)
            self.weigh(now, then, self.curvature(move), self.curvature(recorded_move))
            self.adapt(error, min(own.values()))
            # Half of the clients, or one less, are longer; torch takes the lower of two.
            self.length = sorted(sizes.values())[(len(sizes) - 1) // 2]
            if not self.points:
                self.points = [(np.zeros_like(w), np.zeros_like(w))]
            x, y = self.points[-1]
            self.points = [*self.points, (x + move, y + now)][-self.most - 1 :]
        for c in sent:
            anchor = sent[c]
            if c in known:
                anchor = sent[c] - (1 - own[c]) * errors[c]
                anchor = anchor + max(self.kc - own[c], 0) * error
            clients[c].observe(t, w, wb, gbs[c], sent[c], anchor)

    def weigh(self, *changes) -> None:
        self.changes = [*self.changes, changes][-3:]
        if self.curvature_weight == "pooled":
            self.gammas = [(now @ x + then @ y, x @ x + y @ y) for now, then, x, y in self.changes]
            top, bottom = map(sum, zip(*self.gammas, strict=True))
            self.gamma = np.clip(top / bottom, 0, 1) if bottom > 0 else self.gamma
        # What a round says of beta is with the gamma of that round.
        now, then, x, y = changes
        now, then = now - self.gamma * x, then - self.gamma * y
        self.betas = [*getattr(self, "betas", []), (now @ then, then @ then)][-3:]
        if self.history_weight == "pooled":
            top, bottom = map(sum, zip(*self.betas, strict=True))
            self.beta = np.clip(top / bottom, 0, 1) if bottom > 0 else self.beta

    def adapt(self, error, least) -> None:
        if least == 1 or self.common_gain != "adaptive":
            self.error = None
            return
        if self.error is not None:
            pair = error @ self.error, self.error @ self.error
            self.successive = [*self.successive, pair][-3:]
            along, size = map(sum, zip(*self.successive, strict=True))
            self.kc = np.clip(self.kc * (1 + along / size / 2), least, 1)
        self.error = error


def by_hand(federation, history, tau, arguments):
    """Recover; returns the weights, the calls as (client, round), and what was learnt."""
    clients = {
        c.client_id: Client(c)
        for c in federation.clients
        if c.client_id not in federation.malicious
    }
    server = Server(**(DEFAULTS | arguments))
    w, asked = history.read_round(0, ()).global_weights.double().numpy(), []
    for t in range(ROUNDS):
        ids = [c for c in history.read_round(t).client_ids if c in clients]
        record = history.read_round(t, ids)
        wb = record.global_weights.double().numpy()
        gbs = dict(zip(ids, record.updates.double().numpy(), strict=True))
        sent = {}
        if t < WARMUP or t >= ROUNDS - FINAL or (t - WARMUP + 1) % PERIOD == 0:
            asked += [(c, t) for c in ids]
            sent = {c: clients[c].gradient(w) for c in ids}
            if t < ROUNDS - FINAL:
                server.observe(t, w, wb, clients, gbs, sent, t < WARMUP)
        else:
            for c in ids:
                kept = clients[c]
                if kept.round is not None:
                    sent[c] = server.estimate(kept, w, wb, gbs[c])
                if kept.round is None or np.abs(sent[c]).max() > tau:
                    asked.append((c, t))
                    sent[c] = kept.gradient(w)
                    kept.observe(t, w, wb, gbs[c], sent[c], sent[c])
        total_size = sum(clients[c].size for c in ids)
        w = w - LR * sum(clients[c].size / total_size * sent[c] for c in ids)
    learnt = {"history_weight": server.beta, "curvature_weight": server.gamma}
    return w, asked, {**learnt, "common_gain": server.kc}


DEFAULTS = {
    "gain": "spacing",
    "common_gain": "adaptive",
    "history_weight": "pooled",
    "curvature_weight": "pooled",
    "num_secants": 5,
}
CASES = [
    {},
    {"gain": 0.3, "num_secants": 2},
    {"common_gain": 0.7, "curvature_weight": 0.0},
    {"gain": 0.5, "common_gain": 0.5, "history_weight": 0.0, "curvature_weight": 0.8},
    {"gain": 1.0, "history_weight": 0.4, "num_secants": 1},
]


@pytest.mark.parametrize("tau", [np.inf, 1.5])
@pytest.mark.parametrize("arguments", CASES, ids=str)
def test_trajectory_is_that_of_the_formula(arguments, tau: float) -> None:
    federation = quadratic_federation(num_clients=8, size=6)
    history, loop = MemoryHistory(), FederatedLoop(accelerator="cpu", enable_progress_bar=False)
    # q2 joins in a round in which estimates are made, and q1 has anchors of other rounds.
    sampler = ClientSampler(dropout=0.2, joins={"q2": 12}, leaves={"q5": 40})
    options = {"max_rounds": ROUNDS, "server_lr": LR, "attack": Reverse(), "sampler": sampler}
    loop.record(federation, FedAvg(), history, **options)
    expected, asked, end = by_hand(federation, history, tau, arguments)
    method = FedRecover(
        warmup_rounds=WARMUP,
        correction_period=PERIOD,
        final_rounds=FINAL,
        abnormality_threshold=None if np.isinf(tau) else tau,
        tolerance_rate=None,
        estimator=AnchoredSecant(**arguments),
    )
    result = loop.recover(federation, history, method, federation.malicious)
    np.testing.assert_allclose(result.global_weights.numpy(), expected, atol=2e-4)
    calls = [(e.client_id, e.round) for e in result.ledger.entries]
    assert Counter(calls) == Counter(asked)
    reasons = {e.reason for e in result.ledger.entries}
    assert ("abnormality" in reasons) == (not np.isinf(tau))
    assert "fallback" in reasons
    found = {name: result.diagnostics[name] for name in end}
    assert found == pytest.approx(end, abs=1e-2)


def recovered(federation, history, loop, estimator, **changes) -> torch.Tensor:
    method = FedRecover(
        **{"warmup_rounds": 3, "correction_period": 7, "final_rounds": 0, **changes},
        tolerance_rate=None,
        estimator=estimator,
    )
    result = loop.recover(federation, history, method, federation.malicious, max_rounds=EARLY)
    return result.global_weights


@pytest.fixture
def reversed_training():
    """A recording whose model is far from the recovered one, and what training again gives."""
    federation = quadratic_federation(num_clients=5, size=6)
    for client in federation.clients:
        client.hessian = federation.clients[0].hessian
    history, loop = MemoryHistory(), FederatedLoop(accelerator="cpu", enable_progress_bar=False)
    loop.record(federation, FedAvg(), history, max_rounds=ROUNDS, server_lr=LR, attack=Reverse())
    scratch = loop.recover(
        federation, history, TrainFromScratch(), federation.malicious, max_rounds=EARLY
    )
    return federation, history, loop, scratch.global_weights


WHOLE = [case for case in CASES if "curvature_weight" not in case]


@pytest.mark.parametrize("period", [None, 7])
@pytest.mark.parametrize("arguments", WHOLE, ids=str)
def test_corollary_1_with_the_true_hessian_it_is_training_from_scratch(
    arguments, period, reversed_training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """g0 + beta dgb + A (dw - beta dwb) is A (w - c), as dgb is A dwb: whatever beta and K.

    And gamma is 1, as A dw is all of the change. All clients have the same Hessian here.
    """
    federation, history, loop, scratch = reversed_training
    hessian = federation.clients[0].hessian
    monkeypatch.setattr(AnchoredSecant, "_times_curvature", lambda self, v: v @ hessian)
    estimator = AnchoredSecant(**arguments)
    found = recovered(federation, history, loop, estimator, correction_period=period)
    torch.testing.assert_close(found, scratch, atol=2e-5, rtol=0)


def test_corollary_1_with_secants_in_all_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two secants are the Hessian of two parameters, but for the ridge, which is left out."""
    monkeypatch.setattr(secant, "RIDGE", 1e-12)
    federation = quadratic_federation(num_clients=5, size=2)
    for client in federation.clients:
        client.hessian = federation.clients[0].hessian
    history, loop = MemoryHistory(), FederatedLoop(accelerator="cpu", enable_progress_bar=False)
    loop.record(federation, FedAvg(), history, max_rounds=ROUNDS, server_lr=LR, attack=Reverse())
    scratch = loop.recover(
        federation, history, TrainFromScratch(), federation.malicious, max_rounds=EARLY
    )
    found = recovered(federation, history, loop, AnchoredSecant(), warmup_rounds=6)
    torch.testing.assert_close(found, scratch.global_weights, atol=2e-4, rtol=0)
    # Without curvature the same rounds end elsewhere.
    without = AnchoredSecant(curvature_weight=0.0)
    other = recovered(federation, history, loop, without, warmup_rounds=6)
    assert float((other - scratch.global_weights).norm()) > 1e-3


def test_a_secant_is_the_hessian_but_for_the_ridge() -> None:
    """Two points at half their distance from their mean: squares have the sum 2 and the mean 1.

    So the regression is 2 / 2.1 of the Hessian.
    """
    estimator = AnchoredSecant()
    estimator._moves, estimator._turns = torch.tensor([[3.0]]), torch.tensor([[6.0]])
    estimator._inverse = secant._inverse(torch.tensor([[9.0]], dtype=torch.float64))
    found = float(estimator._times_curvature(torch.tensor([[5.0]]))[0, 0])
    assert found == pytest.approx(5 * 2 * 2 / 2.1)
