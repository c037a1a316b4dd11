"""AnchoredLBFGS against float64 NumPy, client by client and with dense matrices."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from fedrec import FederatedLoop
from fedrec.aggregators import FedAvg
from fedrec.attacks import SignFlip
from fedrec.federation import ClientSampler
from fedrec.history import MemoryHistory
from fedrec.recoverers import AnchoredLBFGS, FedRecover, TrainFromScratch
from fedrec.recoverers.estimators import Estimates
from fedrec.testing.problems import quadratic_federation
from tests.parity.bfgs import dense_bfgs

ROUNDS, LR = 60, 0.3
ATTACK = SignFlip(scale=0.5)
WARMUP, PERIOD, FINAL, PAIRS = 5, 6, 3, 2
EARLY = 18  # rounds after which no model is near its end


def bfgs_product(pairs: list[tuple[np.ndarray, np.ndarray]], v: np.ndarray) -> np.ndarray:
    return dense_bfgs(pairs) @ v if pairs else np.zeros_like(v)


class Client:
    """What the server keeps of a client."""

    def __init__(self, client) -> None:
        self.hessian, self.centre = client.hessian.double().numpy(), client.centre.double().numpy()
        self.size = client.num_samples
        self.pairs: list[tuple[np.ndarray, np.ndarray]] = []
        self.round = None
        self.beta = 1.0

    def gradient(self, w: np.ndarray) -> np.ndarray:
        return self.hessian @ (w - self.centre)

    def estimate(self, w, wb, gb, gamma: float) -> np.ndarray:
        v = (w - self.w) - self.beta * (wb - self.wb)
        return self.anchor + self.beta * (gb - self.gb) + gamma * bfgs_product(self.pairs, v)

    def observe(self, t, w, wb, gb, g, gain=1.0) -> None:
        new = w, wb, gb, g
        if gain < 1:
            old = self.w, self.wb, self.gb, self.anchor
            new = tuple((1 - gain) * x + gain * y for x, y in zip(old, new, strict=True))
        self.w, self.wb, self.gb, self.anchor = new
        self.round = t
        if (w - wb) @ (w - wb) > 0 and (g - gb) @ (w - wb) > 0:
            self.pairs = [*self.pairs, (w - wb, g - gb)][-PAIRS:]


class Common:
    """The gain of what clients have in common."""

    def __init__(self, given) -> None:
        self.given, self.length, self.error = given, np.inf, None
        self.gain = 0.0 if given == "adaptive" else given
        self.successive: list[tuple[float, float]] = []

    def mean(self, sent, errors, least: float) -> np.ndarray:
        """Learn from exact updates, and from how far estimates were off; return the mean error."""
        sizes = {c: np.linalg.norm(sent[c]) for c in errors}
        counts = {
            c: min(1.0, self.length / max(sizes[c], np.linalg.norm(error)))
            for c, error in errors.items()
        }
        mean = sum(counts[c] * error for c, error in errors.items()) / sum(counts.values())
        # Half of the clients, or one less, are longer; torch takes the lower of two.
        self.length = sorted(sizes.values())[(len(sizes) - 1) // 2]
        if self.given == "adaptive" and least < 1:
            if self.error is not None:
                pair = mean @ self.error, self.error @ self.error
                self.successive = [*self.successive, pair][-3:]
                along, size = map(sum, zip(*self.successive, strict=True))
                self.gain = self.gain * (1 + along / size / 2)
            self.gain, self.error = np.clip(self.gain, least, 1), mean
        return mean


def by_hand(
    federation,
    history,
    tau,
    gain,
    history_weight,
    curvature_weight="pooled",
    common_gain="adaptive",
):
    """Recover; returns the weights, the calls as (client, round), and what was learnt."""
    common = Common(common_gain)
    clients = {
        c.client_id: Client(c)
        for c in federation.clients
        if c.client_id not in federation.malicious
    }
    if not isinstance(history_weight, str):
        for client in clients.values():
            client.beta = history_weight
    gamma = 1.0 if curvature_weight == "pooled" else curvature_weight
    products: list[dict[str, np.ndarray]] = []
    first = history.read_round(0, ())
    w, asked = first.global_weights.double().numpy(), []
    for t in range(ROUNDS):
        ids = [c for c in history.read_round(t).client_ids if c in clients]
        record = history.read_round(t, ids)
        wb = record.global_weights.double().numpy()
        gbs = dict(zip(ids, record.updates.double().numpy(), strict=True))
        everyone = t < WARMUP or t >= ROUNDS - FINAL or (t - WARMUP + 1) % PERIOD == 0
        sent = {}
        if everyone:
            asked += [(c, t) for c in ids]
            sent = {c: clients[c].gradient(w) for c in ids}
        if everyone and t < ROUNDS - FINAL:
            known = [c for c in ids if clients[c].round is not None]
            errors, changes = {}, {}
            for c in known:
                kept = clients[c]
                errors[c] = sent[c] - kept.estimate(w, wb, gbs[c], gamma)
                of_now, of_then = (bfgs_product(kept.pairs, v) for v in (w - kept.w, wb - kept.wb))
                changes[c] = sent[c] - kept.anchor, gbs[c] - kept.gb, of_now, of_then
            if known:
                found = {
                    c: np.array(
                        [now @ now + then @ then, now @ hx + then @ hy, hx @ hx + hy @ hy, 0, 0]
                    )
                    for c, (now, then, hx, hy) in changes.items()
                }
                products = [*products, found][-3:]
                if curvature_weight == "pooled":
                    whole, top, bottom, _, _ = sum(p for one in products for p in one.values())
                    gamma = np.clip(top / bottom, 0, 1) if bottom > 0 else gamma
                    gamma = gamma if top**2 >= 0.01 * bottom * whole else 0.0
                for c, (now, then, hx, hy) in changes.items():
                    now, then = now - gamma * hx, then - gamma * hy
                    found[c][3:] = now @ then, then @ then
                if history_weight == "pooled":
                    own, size = sum(p[3:] for one in products for p in one.values())
                    for client in clients.values():
                        client.beta = np.clip(own / size, 0, 1)
            own = {c: 2 / (t - clients[c].round + 1) if gain == "spacing" else gain for c in known}
            moved = [c for c in known if t >= WARMUP and own[c] < 1]
            for c in ids:
                clients[c].observe(t, w, wb, gbs[c], sent[c], own[c] if c in moved else 1.0)
            if moved:
                least = min(own[c] for c in moved)
                mean = common.mean(sent, {c: errors[c] for c in moved}, least)
                for c in moved:
                    clients[c].anchor = clients[c].anchor + max(common.gain - own[c], 0) * mean
        elif not everyone:
            for c in ids:
                kept = clients[c]
                if kept.round is not None:
                    sent[c] = kept.estimate(w, wb, gbs[c], gamma)
                if kept.round is None or np.abs(sent[c]).max() > tau:
                    asked.append((c, t))
                    sent[c] = kept.gradient(w)
                    kept.observe(t, w, wb, gbs[c], sent[c])
        total_size = sum(clients[c].size for c in ids)
        w = w - LR * sum(clients[c].size / total_size * sent[c] for c in ids)
    beta = next(iter(clients.values())).beta
    learnt = {"history_weight": beta, "curvature_weight": gamma, "common_gain": common.gain}
    return w, asked, learnt


CASES = [
    {"gain": 0.5, "history_weight": "pooled"},
    {"gain": 0.3, "history_weight": "pooled"},
    {"gain": "spacing", "history_weight": "pooled"},
    {"gain": 0.5, "history_weight": 0.0, "curvature_weight": 0.8},
    {"gain": 1.0, "history_weight": 0.4},
    {"gain": 0.2, "history_weight": "pooled", "common_gain": 0.6},
]


@pytest.mark.parametrize("tau", [np.inf, 1.5])
@pytest.mark.parametrize("arguments", CASES, ids=str)
def test_trajectory_is_that_of_the_formula(arguments, tau: float) -> None:
    federation = quadratic_federation(num_clients=8, size=6)
    history, loop = MemoryHistory(), FederatedLoop(accelerator="cpu", enable_progress_bar=False)
    # q2 joins in a round in which estimates are made, and q1 has anchors of other rounds.
    sampler = ClientSampler(dropout=0.2, joins={"q2": 12}, leaves={"q5": 40})
    options = {"max_rounds": ROUNDS, "server_lr": LR, "attack": ATTACK, "sampler": sampler}
    loop.record(federation, FedAvg(), history, **options)
    expected, asked, end = by_hand(federation, history, tau, **arguments)
    method = FedRecover(
        warmup_rounds=WARMUP,
        correction_period=PERIOD,
        final_rounds=FINAL,
        abnormality_threshold=None if np.isinf(tau) else tau,
        tolerance_rate=None,
        estimator=AnchoredLBFGS(**arguments),
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


class ExactProducts:
    """Stands in for the pairs: products with the clients' true Hessians."""

    def __init__(self, hessians: torch.Tensor) -> None:
        self.hessians, self.skipped = hessians, 0

    def push(self, *arguments, **keywords) -> None:
        """Nothing is to be learnt."""

    def estimate(self, updates, v, rows) -> Estimates:
        found = updates + self.hessians[rows] @ v
        return Estimates(found, found.abs().amax(dim=1), torch.ones(len(rows), dtype=torch.bool))


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
    history, loop = MemoryHistory(), FederatedLoop(accelerator="cpu", enable_progress_bar=False)
    loop.record(federation, FedAvg(), history, max_rounds=ROUNDS, server_lr=LR, attack=ATTACK)
    scratch = loop.recover(
        federation, history, TrainFromScratch(), federation.malicious, max_rounds=EARLY
    )
    return federation, history, loop, scratch.global_weights


WHOLE = [case for case in CASES if "curvature_weight" not in case]


@pytest.mark.parametrize("period", [None, 7])
@pytest.mark.parametrize("arguments", WHOLE, ids=str)
def test_corollary_1_exact_products_give_training_from_scratch(
    arguments, period, reversed_training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """g0 + beta dgb + A (dw - beta dwb) is A (w - c), as dgb is A dwb: whatever beta and K.

    And gamma is 1, as A dw is all of the change.
    """
    federation, history, loop, scratch = reversed_training
    hessians = torch.stack([c.hessian for c in federation.clients])
    allocate = AnchoredLBFGS._allocate

    def with_exact(self, weights) -> None:
        allocate(self, weights)
        self._pairs = ExactProducts(hessians)

    monkeypatch.setattr(AnchoredLBFGS, "_allocate", with_exact)
    estimator = AnchoredLBFGS(**arguments)
    found = recovered(federation, history, loop, estimator, correction_period=period)
    torch.testing.assert_close(found, scratch, atol=2e-5, rtol=0)


@pytest.mark.parametrize("arguments", WHOLE, ids=str)
def test_corollary_1_with_pairs_that_are_exact(arguments) -> None:
    """A multiple of the identity is what one pair gives exactly."""
    federation = quadratic_federation(num_clients=5, size=6)
    for client, curvature in zip(federation.clients, (0.5, 0.8, 1.0, 1.5, 2.0), strict=True):
        client.hessian = curvature * torch.eye(6)
    history, loop = MemoryHistory(), FederatedLoop(accelerator="cpu", enable_progress_bar=False)
    loop.record(federation, FedAvg(), history, max_rounds=ROUNDS, server_lr=LR, attack=ATTACK)
    scratch = loop.recover(
        federation, history, TrainFromScratch(), federation.malicious, max_rounds=EARLY
    )
    found = recovered(federation, history, loop, AnchoredLBFGS(buffer_size=1, **arguments))
    torch.testing.assert_close(found, scratch.global_weights, atol=2e-5, rtol=0)
    # Without products the same rounds end elsewhere.
    without = recovered(federation, history, loop, AnchoredLBFGS(curvature_weight=0.0, **arguments))
    assert float((without - scratch.global_weights).norm()) > 1e-3


def test_it_is_the_papers_estimate_where_the_newest_pairs_fit(reversed_training) -> None:
    """gb + dg0 + H (v - dw0) is gb + H v if H dw0 = dg0: here all curvature is positive."""
    federation, history, loop, _ = reversed_training
    whole = {"gain": 1.0, "curvature_weight": 1.0}
    found = recovered(federation, history, loop, AnchoredLBFGS(history_weight=1.0, **whole))
    torch.testing.assert_close(
        found, recovered(federation, history, loop, "paired"), atol=2e-5, rtol=0
    )
    other = recovered(federation, history, loop, AnchoredLBFGS(history_weight=0.5, **whole))
    assert float((other - found).norm()) > 1e-3
