"""FedRecover against an independent float64 computation of the paper's Algorithm 1."""

import numpy as np
import pytest
import torch

from fedrec import Attack, FederatedLoop
from fedrec.aggregators import FedAvg, Median
from fedrec.attacks import SignFlip
from fedrec.history import MemoryHistory
from fedrec.recoverers import Estimates, Estimator, FedRecover, TrainFromScratch
from fedrec.recoverers.threshold import abnormality_threshold
from fedrec.testing.problems import quadratic_federation
from tests.parity.bfgs import dense_bfgs

ROUNDS = 60
ATTACK = SignFlip(scale=0.5)
LR = 0.3


def recorded(num_clients: int = 5, size: int = 6):
    federation = quadratic_federation(num_clients=num_clients, size=size)
    history, loop = MemoryHistory(), FederatedLoop(accelerator="cpu", enable_progress_bar=False)
    loop.record(federation, FedAvg(), history, max_rounds=ROUNDS, server_lr=LR, attack=ATTACK)
    return federation, history, loop


def algorithm_1(federation, *, t_w, t_c, t_f, s, tau):
    """Algorithm 1 in float64 with dense matrices, poisoned training included.

    Returns the recovered model, the exact rounds per client, and the estimation errors.
    """
    clients = federation.clients
    hessians = [c.hessian.double().numpy() for c in clients]
    centres = [c.centre.double().numpy() for c in clients]
    sizes = np.array([c.num_samples for c in clients], dtype=float)
    benign = [i for i, c in enumerate(clients) if c.client_id not in federation.malicious]
    gradient = lambda i, w: hessians[i] @ (w - centres[i])  # noqa: E731

    w_bar, g_bar = [np.zeros(len(centres[0]))], []
    for _ in range(ROUNDS):
        g = [gradient(i, w_bar[-1]) * (1 if i in benign else -0.5) for i in range(len(clients))]
        g_bar.append(g)
        w_bar.append(w_bar[-1] - LR * (sizes @ np.array(g)) / sizes.sum())

    w, pairs = w_bar[0].copy(), {i: [] for i in benign}
    exact = dict.fromkeys(benign, 0)
    errors = []
    for t in range(ROUNDS):
        everyone = t < t_w or t >= ROUNDS - t_f or (t - t_w + 1) % t_c == 0
        g = {}
        for i in benign:
            ask = everyone
            if not everyone:
                v = w - w_bar[t]
                g[i] = g_bar[t][i] + dense_bfgs(pairs[i]) @ v
                ask = np.abs(g[i]).max() > tau
                true = gradient(i, w)
                errors.append((np.linalg.norm(g[i] - true), np.linalg.norm(g_bar[t][i] - true)))
            if ask:
                exact[i] += 1
                g[i] = gradient(i, w)
                delta = w - w_bar[t]
                if delta @ delta > 0 and t < ROUNDS - t_f:
                    pairs[i] = [*pairs[i], (delta, g[i] - g_bar[t][i])][-s:]
        weights = sizes[benign] / sizes[benign].sum()
        w = w - LR * weights @ np.array([g[i] for i in benign])
    return w, exact, np.array(errors)


@pytest.mark.parametrize("tau", [np.inf, 2.0])
def test_trajectory_is_algorithm_1(tau: float) -> None:
    federation, history, loop = recorded()
    expected, exact, _ = algorithm_1(federation, t_w=5, t_c=10, t_f=3, s=2, tau=tau)
    recoverer = FedRecover(
        warmup_rounds=5,
        correction_period=10,
        final_rounds=3,
        abnormality_threshold=None if np.isinf(tau) else tau,
        tolerance_rate=None,
        estimator="paired",
    )
    result = loop.recover(federation, history, recoverer, federation.malicious, attack=ATTACK)
    np.testing.assert_allclose(result.global_weights.numpy(), expected, atol=2e-4)
    asked = {federation.client_ids[i]: n for i, n in exact.items()}
    assert {c: round(ROUNDS * (1 - cp)) for c, cp in result.ledger.cp().items()} == asked
    if not np.isinf(tau):
        assert len(set(asked.values())) > 1, "the threshold should fix some clients more often"


def test_estimates_are_closer_than_history_on_the_convex_problem() -> None:
    federation, _, _ = recorded()
    _, _, errors = algorithm_1(federation, t_w=5, t_c=10, t_f=3, s=2, tau=np.inf)
    estimated, historical = np.median(errors, axis=0)
    assert estimated < 0.5 * historical


@pytest.mark.parametrize("aggregator", [FedAvg(), Median()])
def test_corollary_1_exact_hessian_products_give_train_from_scratch(aggregator) -> None:
    federation, history, loop = recorded()

    hessians = {c.client_id: c.hessian for c in federation.clients}

    class ExactHessians(Estimator):
        """Multiplies with the clients' true Hessians."""

        def estimate(self, record, global_weights):
            v = global_weights - record.global_weights
            products = torch.stack([hessians[c] for c in record.client_ids]) @ v
            estimates = record.updates + products
            usable = torch.ones(len(estimates), dtype=torch.bool)
            return Estimates(estimates, estimates.abs().amax(dim=1), usable)

    kwargs = {"attack": ATTACK, "aggregator": aggregator}
    recoverer = FedRecover(
        warmup_rounds=3,
        correction_period=None,
        final_rounds=0,
        tolerance_rate=None,
        estimator=ExactHessians(),
    )
    recovered = loop.recover(federation, history, recoverer, federation.malicious, **kwargs)
    scratch = loop.recover(federation, history, TrainFromScratch(), federation.malicious, **kwargs)
    torch.testing.assert_close(recovered.global_weights, scratch.global_weights, atol=2e-5, rtol=0)
    assert recovered.ledger.acp() == pytest.approx(0.95)
    # Without the correction of Corollary 1, reusing history ends far away.
    reused = FedRecover(
        warmup_rounds=3,
        correction_period=None,
        final_rounds=0,
        tolerance_rate=None,
        estimator="history",
    )
    far = loop.recover(federation, history, reused, federation.malicious, **kwargs).global_weights
    assert float((far - scratch.global_weights).norm()) > 0.1


def test_schedule_of_the_papers_mnist_setting_has_222_exact_rounds() -> None:
    recoverer = FedRecover(warmup_rounds=20, correction_period=10, final_rounds=5)
    reasons = [recoverer.exact_reason(t, 2000) for t in range(2000)]
    exact = [r for r in reasons if r is not None]
    assert len(exact) == 222
    assert {r: exact.count(r) for r in set(exact)} == {
        "warmup": 20,
        "correction": 197,
        "final": 5,
    }
    # Algorithm 1: (t - T_w + 1) mod T_c == 0 for T_w <= t < T - T_f, t from 0.
    assert [t for t, r in enumerate(reasons) if r == "correction"][:2] == [29, 39]
    assert pytest.approx(88.9) == 100 * (1 - 222 / 2000)


@pytest.mark.parametrize(
    ("change", "count"),
    [({"correction_period": None}, 25), ({"final_rounds": 0}, 218), ({}, 222)],
)
def test_each_strategy_can_be_switched_off(change: dict, count: int) -> None:
    recoverer = FedRecover(**change)
    assert sum(recoverer.exact_reason(t, 2000) is not None for t in range(2000)) == count


@pytest.mark.parametrize("rate", [0.0, 1e-3, 0.01, 0.1, 0.29])
def test_threshold_is_the_largest_of_the_rounds_order_statistics(rate: float) -> None:
    rng = np.random.default_rng(0)
    rounds = [rng.normal(size=(4, 25)) * scale for scale in (1.0, 3.0, 2.0)]
    found = abnormality_threshold([torch.from_numpy(g) for g in rounds], rate)
    # 100 entries a round; floor(0.29 * 100) is 29, though 0.29 * 100 is 28.99... in binary.
    allowed = {0.0: 0, 1e-3: 0, 0.01: 1, 0.1: 10, 0.29: 29}[rate]
    expected = max(np.sort(np.abs(g).ravel())[::-1][allowed] for g in rounds)
    assert found == expected
    assert max((np.abs(g) > found).sum() for g in rounds) <= allowed


class Hold(Attack):
    """Malicious clients take back what the others do: the model stays where it is."""

    def craft(self, updates, malicious, ctx):
        sizes = torch.arange(1.0, 1 + len(updates))
        others = (sizes * ~malicious) @ updates
        return torch.where(malicious[:, None], -others / sizes[malicious].sum(), updates)


class LastSent(Estimator):
    """Takes what a client has sent last; notes all of it."""

    def start(self, history, rounds):
        self.last, self.sent = {}, []

    def observe(self, record, exact, global_weights, reason):
        sent = dict(zip(record.client_ids, exact.clone(), strict=True))
        self.last.update(sent)
        self.sent.append((reason, {c: g.double().numpy() for c, g in sent.items()}))

    def estimate(self, record, global_weights):
        updates = torch.stack([self.last[c] for c in record.client_ids])
        usable = torch.ones(len(updates), dtype=torch.bool)
        return Estimates(updates, updates.abs().amax(dim=1), usable)


class LastSentAsInThePaper(LastSent):
    raises_threshold = False


def risen_threshold(tau, sent, num_clients, order_statistic):
    """The threshold after what clients sent, if estimates are what they sent before."""
    last, outgrown = {}, False
    for reason, updates in sent:
        rises = outgrown and reason == "correction"
        if reason == "abnormality" and not outgrown:
            right = [
                np.abs(g).max() > tau and np.sum((last[c] - g) ** 2) < np.sum(g**2)
                for c, g in updates.items()
            ]
            rises = outgrown = sum(right) > num_clients / 2
        if rises:
            tau = max(tau, order_statistic(np.array(list(updates.values()))))
        last.update(updates)
    return tau


@pytest.mark.parametrize("on_missing", ["drop", "estimate"])  # nobody is missing
def test_threshold_rises_where_updates_outgrow_a_recording_that_learned_nothing(
    on_missing: str,
) -> None:
    federation = quadratic_federation(num_clients=5, size=6)
    for client in federation.clients:  # gradients grow with the distance from a client's centre
        client.hessian = -client.hessian
    history, loop = MemoryHistory(), FederatedLoop(accelerator="cpu", enable_progress_bar=False)
    loop.record(federation, FedAvg(), history, max_rounds=30, server_lr=0.1, attack=Hold())
    benign = [c for c in federation.client_ids if c not in federation.malicious]

    def order_statistic(updates):  # alpha = 0.1 allows two of 4 * 6 entries
        return np.sort(np.abs(updates).ravel())[::-1][updates.size // 10]

    recorded = [history.read_round(t, benign).updates.double().numpy() for t in range(30)]
    of_history = max(map(order_statistic, recorded))
    fixes = []
    for estimator in (LastSent(), LastSentAsInThePaper()):
        recoverer = FedRecover(
            warmup_rounds=3,
            correction_period=10,
            final_rounds=1,
            tolerance_rate=0.1,
            estimator=estimator,
            on_missing=on_missing,
        )
        result = loop.recover(federation, history, recoverer, federation.malicious, attack=Hold())
        risen = risen_threshold(of_history, estimator.sent, len(benign), order_statistic)
        assert risen > 2 * of_history
        expected = risen if estimator.raises_threshold else of_history
        assert result.diagnostics["abnormality_threshold"] == expected
        fixes.append(sum(entry.reason == "abnormality" for entry in result.ledger.entries))
    assert fixes[0] < fixes[1]


def test_without_estimates_only_exact_rounds_make_a_step() -> None:
    """The paper's variant without approximation: exact rounds alone, in order."""
    federation, history, loop = recorded()
    recoverer = FedRecover(warmup_rounds=5, correction_period=10, final_rounds=3, estimator="none")
    result = loop.recover(federation, history, recoverer, federation.malicious, attack=ATTACK)
    benign = [c for c in federation.clients if c.client_id not in federation.malicious]
    sizes = np.array([c.num_samples for c in benign], dtype=float)
    w = np.zeros(6)
    for _ in range(5 + 5 + 3):
        g = [c.hessian.double().numpy() @ (w - c.centre.double().numpy()) for c in benign]
        w = w - LR * (sizes / sizes.sum()) @ np.array(g)
    np.testing.assert_allclose(result.global_weights.numpy(), w, atol=1e-5)
