"""FedEraser and RollbackRetrain against independent float64 computations of their papers."""

import numpy as np
import pytest
import torch

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import FedAvg
from fedrec.data import Digits
from fedrec.exceptions import ConfigurationError
from fedrec.federation import ClientSampler
from fedrec.functional import calibrate, certified_sensitivity, removal_effect
from fedrec.history import HistoryView, MemoryHistory
from fedrec.models import MLP
from fedrec.recoverers import FedEraser, RollbackRetrain, TrainFromScratch
from fedrec.testing.problems import quadratic_federation

ROUNDS = 12
LR = 0.3


def make_loop(**kwargs) -> FederatedLoop:
    return FederatedLoop(accelerator="cpu", enable_progress_bar=False, logger=False, **kwargs)


def recorded(keep=None, sampler=None, rounds: int = ROUNDS, **kwargs):
    federation, history = quadratic_federation(**kwargs), MemoryHistory(keep=keep)
    make_loop().record(
        federation, FedAvg(), history, max_rounds=rounds, server_lr=LR, sampler=sampler
    )
    return federation, history


class Problem:
    """The quadratic federation in float64, all clients in all rounds, FedAvg."""

    def __init__(self, federation: Federation) -> None:
        self.hessians = [c.hessian.double().numpy() for c in federation.clients]
        self.centres = [c.centre.double().numpy() for c in federation.clients]
        sizes = np.array([c.num_samples for c in federation.clients], dtype=float)
        self.p = sizes / sizes.sum()
        malicious = [c in federation.malicious for c in federation.client_ids]
        self.benign = np.flatnonzero(~np.array(malicious))
        self.w = [np.zeros(len(self.centres[0]))]
        for _ in range(ROUNDS):
            self.w.append(self.w[-1] - LR * self.p @ self.gradients(self.w[-1]))

    def gradients(self, w: np.ndarray) -> np.ndarray:
        return np.array([a @ (w - c) for a, c in zip(self.hessians, self.centres, strict=True)])

    def benign_step(self, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        p = self.p[self.benign]
        return w - LR * p @ g[self.benign] / p.sum()


def test_fed_eraser_gives_new_directions_their_old_length() -> None:
    federation, history = recorded()
    problem = Problem(federation)
    w = problem.benign_step(problem.w[0], problem.gradients(problem.w[0]))
    for t in (3, 6, 9):
        new, old = problem.gradients(w), problem.gradients(problem.w[t])
        units = new / np.sqrt((new**2).sum(axis=1, keepdims=True))
        w = problem.benign_step(w, np.sqrt((old**2).sum(axis=1, keepdims=True)) * units)
    result = make_loop().recover(federation, history, FedEraser(interval=3), federation.malicious)
    np.testing.assert_allclose(result.global_weights.numpy(), w, atol=1e-5)
    # Asked in 3 of 12 rounds: the first of the four is replayed.
    assert [(e.round, e.reason) for e in result.ledger.entries[::4]] == [
        (t, "other") for t in (3, 6, 9)
    ]
    assert len(result.ledger) == 3 * 4
    assert result.ledger.acp() == 0.75
    assert result.rounds == 4


def test_fed_eraser_of_every_round_without_exclusion_is_the_recording() -> None:
    """Same model, so same directions: nothing changes from round to round."""
    federation, history = recorded()
    result = make_loop().recover(federation, history, FedEraser(interval=1), [])
    w = Problem(federation).w[-1]
    np.testing.assert_allclose(result.global_weights.numpy(), w, atol=1e-5)


def test_calibration_of_a_zero_update_is_zero() -> None:
    old, new = torch.tensor([[3.0, 4.0], [3.0, 4.0]]), torch.tensor([[0.0, 0.0], [0.0, -2.0]])
    assert torch.equal(calibrate(old, new), torch.tensor([[0.0, 0.0], [0.0, -5.0]]))


@pytest.mark.parametrize(
    ("work", "ratio", "steps"),
    [
        ({"local_steps": 6}, 0.5, {3}),
        ({"local_steps": 6}, 1.0, {6}),
        ({"local_steps": 1}, 0.5, {1}),
        # 1,437 digits over 4 clients in batches of 100: 4 of 4 batches an epoch, half of them 2.
        ({"local_epochs": 1}, 0.5, {2}),
    ],
)
def test_fed_eraser_scales_local_steps(work: dict, ratio: float, steps: set[int]) -> None:
    federation = Federation.from_data(
        Digits(num_clients=4), MLP(in_features=64), malicious=1, batch_size=100, **work
    )
    history, loop = MemoryHistory(), make_loop(eval_every=4)
    loop.record(federation, FedAvg(), history, max_rounds=4, server_lr=0.1)
    recoverer = FedEraser(interval=2, calibration_ratio=ratio)
    result = loop.recover(federation, history, recoverer, federation.malicious)
    assert {e.local_steps for e in result.ledger.entries} == steps
    assert [row["round"] for row in result.curve] == [2], "the last round has a point in the curve"


def test_fed_eraser_needs_its_rounds_only() -> None:
    federation, history = recorded(keep={"every": 3})
    whole = make_loop().recover(*recorded(), FedEraser(interval=3), federation.malicious)
    kept = make_loop().recover(federation, history, FedEraser(interval=3), federation.malicious)
    assert torch.equal(kept.global_weights, whole.global_weights)
    with pytest.raises(ConfigurationError, match="keeps none of round 2"):
        make_loop().recover(federation, history, FedEraser(interval=2), federation.malicious)


def test_fed_eraser_follows_the_recorded_cohorts() -> None:
    sampler = ClientSampler(schedule=[["q0", "q1"], ["q1", "q4"], ["q4"], ["q2", "q3"]])
    federation, history = recorded(sampler=sampler)
    result = make_loop().recover(federation, history, FedEraser(interval=1), federation.malicious)
    # Nobody is asked in round 0, nor in rounds 2, 6, 10, of which only q4 was part.
    asked = [e.round for e in result.ledger.entries if e.client_id == "q1"]
    assert asked == [1, 4, 5, 8, 9]
    assert {e.client_id for e in result.ledger.entries} == {"q0", "q1", "q2", "q3"}


# -- RollbackRetrain ----------------------------------------------------------------------------


def influence(problem: Problem) -> np.ndarray:
    """Psi(0), ..., Psi(T), by the effect of removal: p_S |mean of S - mean of the others|."""
    psi = [0.0]
    excluded = np.setdiff1d(np.arange(len(problem.p)), problem.benign)
    for w in problem.w[:-1]:
        g, p = problem.gradients(w), problem.p
        theirs = p[excluded] @ g[excluded] / p[excluded].sum()
        others = p[problem.benign] @ g[problem.benign] / p[problem.benign].sum()
        psi.append(psi[-1] + LR * p[excluded].sum() * np.linalg.norm(theirs - others))
    return np.array(psi)


@pytest.mark.parametrize("first", [0, 1, 5, 11])
def test_rollback_goes_to_the_last_model_within_the_bound(first: int) -> None:
    federation, history = recorded(num_malicious=2)
    problem = Problem(federation)
    psi = influence(problem)
    assert np.all(np.diff(psi) > 1e-3)
    bound = (psi[first] + psi[first + 1]) / 2
    w = problem.w[first]
    for _ in range(first, ROUNDS):
        w = problem.benign_step(w, problem.gradients(w))
    recoverer = RollbackRetrain(max_sensitivity=bound)
    result = make_loop().recover(federation, history, recoverer, federation.malicious)
    np.testing.assert_allclose(result.global_weights.numpy(), w, atol=1e-5)
    assert result.diagnostics["rollback_round"] == first
    assert result.diagnostics["sensitivity"] == pytest.approx(psi[first], rel=1e-4)
    assert result.ledger.acp() == pytest.approx(first / ROUNDS)
    assert len(result.ledger) == 3 * (ROUNDS - first)


def test_at_least_the_last_round_is_trained_again() -> None:
    federation, history = recorded()
    result = make_loop().recover(
        federation, history, RollbackRetrain(max_sensitivity=1e9), federation.malicious
    )
    assert {e.round for e in result.ledger.entries} == {ROUNDS - 1}


def test_without_tolerance_rounds_before_the_first_excluded_client_are_kept() -> None:
    sampler = ClientSampler(joins={"q4": 5})
    federation, history = recorded(sampler=sampler)
    rolled = make_loop().recover(federation, history, RollbackRetrain(), federation.malicious)
    scratch = make_loop().recover(federation, history, TrainFromScratch(), federation.malicious)
    assert {e.round for e in rolled.ledger.entries} == set(range(5, ROUNDS))
    assert torch.equal(rolled.global_weights, scratch.global_weights)


def test_rollback_can_train_for_fewer_rounds() -> None:
    federation, history = recorded()
    recoverer = RollbackRetrain(num_rounds=3)
    result = make_loop().recover(federation, history, recoverer, federation.malicious)
    assert [e.round for e in result.ledger.entries[::4]] == [0, 1, 2]
    assert result.rounds == 3


def test_noise_has_its_standard_deviation_and_is_drawn_once() -> None:
    federation, history = recorded(size=300)
    w = history.read_round(0, ()).global_weights
    noise = [
        RollbackRetrain(noise_std=s).initial_weights(HistoryView(history)) - w
        for s in (0.1, 0.1, 0.3)
    ]
    assert torch.equal(noise[0], noise[1])
    torch.testing.assert_close(noise[2], 3 * noise[0])
    # The standard deviation of 300 normal numbers is within 4 / sqrt(600) of the true one.
    assert abs(float(noise[0].std()) / 0.1 - 1) < 0.17
    assert abs(float(noise[0].mean())) < 0.1 * 4 / 300**0.5


def test_removal_effect_is_that_of_the_renormalised_mean() -> None:
    rng = np.random.default_rng(0)
    updates, weights = rng.normal(size=(6, 9)), rng.uniform(1, 5, size=6)
    removed = np.array([False, True, False, True, False, False])
    means = [np.average(updates[k], axis=0, weights=weights[k]) for k in (removed | True, ~removed)]
    found = removal_effect(*map(torch.from_numpy, (updates, weights, removed)))
    assert found == pytest.approx(np.linalg.norm(means[0] - means[1]), rel=1e-12)
    everyone = torch.ones(6, dtype=torch.bool)
    found = removal_effect(torch.from_numpy(updates), torch.from_numpy(weights), everyone)
    assert found == pytest.approx(np.linalg.norm(means[0]), rel=1e-12)


def test_certified_sensitivity_inverts_the_gaussian_mechanism() -> None:
    """Noise of sensitivity * sqrt(2 ln(1.25/delta)) / epsilon is (epsilon, delta)-private."""
    bound = certified_sensitivity(noise_std=0.3, epsilon=0.5, delta=1e-5)
    assert bound * np.sqrt(2 * np.log(1.25e5)) / 0.5 == pytest.approx(0.3)


def test_rollback_needs_every_update() -> None:
    for keep in ({"every": 2}, {"clients": 3}):
        federation, history = recorded(keep=keep)
        with pytest.raises(ConfigurationError, match="needs every update of round"):
            make_loop().recover(
                federation, history, RollbackRetrain(max_sensitivity=1e9), federation.malicious
            )
