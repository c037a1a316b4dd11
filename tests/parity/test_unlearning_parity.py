"""Methods that start from the final model against softmax regression in NumPy."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fedrec import FederatedLoop, Federation, LightningClient
from fedrec.aggregators import FedAvg, Median
from fedrec.clients.batches import batch_indices
from fedrec.data.draw import draw_samples
from fedrec.exceptions import ConfigurationError
from fedrec.functional import (
    distance_to_random_models,
    distillation_loss,
    project_onto_ball,
    reference_weights,
)
from fedrec.history import MemoryHistory
from fedrec.models import MLP
from fedrec.random import numpy_generator
from fedrec.recoverers import FineTune, GradientAscent, KnowledgeDistillation, WeightNegation

F, L, ROUNDS, LR = 4, 3, 6, 0.4
D = L * (F + 1)


def samples(seed: int, count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, F, generator=generator)
    return TensorDataset(x, x[:, :L].argmax(dim=1))


def loop(**kwargs) -> FederatedLoop:
    return FederatedLoop(accelerator="cpu", enable_progress_bar=False, logger=False, **kwargs)


class Run:
    """Five clients of 8, 12, ..., 24 samples, recorded."""

    def __init__(self, rule=None, server=None, seed: int = 7) -> None:
        torch.manual_seed(1)
        module = MLP(in_features=F, hidden=(), num_classes=L, lr=0.1)
        data = [samples(i, 8 + 4 * i) for i in range(5)]
        clients = [LightningClient(f"c{i}", module, d, batch_size=4) for i, d in enumerate(data)]
        server = samples(99, 20) if server is None else server
        self.federation = Federation(clients, module, server_data=server)
        self.data, self.server, self.history = data, server, MemoryHistory()
        self.final = loop(seed=seed).record(
            self.federation, rule or FedAvg(), self.history, max_rounds=ROUNDS, server_lr=LR
        )
        self.seed = seed

    def recover(self, recoverer, *exclude: str, **kwargs):
        return loop().recover(self.federation, self.history, recoverer, exclude, **kwargs)

    def batches(self, t: int, name: str, size: int, batch: int, epochs: int = 1):
        return batch_indices(
            seed=self.seed, round=t, client_id=name, num_samples=size, batch_size=batch,
            local_steps=None, local_epochs=epochs,
        )  # fmt: skip


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def arrays(dataset: TensorDataset) -> tuple[np.ndarray, np.ndarray]:
    x, y = dataset.tensors
    return np.c_[x.numpy().astype(np.float64), np.ones(len(x))], np.eye(L)[y.numpy()]


def matrix(vector) -> np.ndarray:
    """The weights (L, F), then the biases (L,), as one matrix (L, F + 1)."""
    v = np.asarray(vector, dtype=np.float64)
    return np.c_[v[: L * F].reshape(L, F), v[L * F :]]


def vector(m: np.ndarray) -> np.ndarray:
    return np.r_[m[:, :F].ravel(), m[:, F]]


def gradient(m: np.ndarray, x: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Of the mean cross-entropy."""
    return (softmax(x @ m.T) - targets).T @ x / len(x)


def close(found: torch.Tensor, expected: np.ndarray, tol: float = 1e-5) -> None:
    expected = vector(expected) if expected.ndim == 2 else expected
    assert np.abs(found.double().numpy() - expected).max() < tol * np.abs(expected).max()


# -- FineTune -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lr", "count", "beta"), [(None, None, None), (0.05, 9, 0.5)])
def test_fine_tuning_is_sgd_on_the_servers_samples(lr, count, beta) -> None:
    run = Run()
    recoverer = FineTune(num_epochs=3, batch_size=6, lr=lr, num_samples=count, beta=beta)
    result = run.recover(recoverer, "c4")
    x, y = arrays(run.server)
    if count is not None:
        labels = run.server.tensors[1].numpy()
        chosen = draw_samples(labels, count, beta, numpy_generator(run.seed, "fine-tune"))
        x, y = x[chosen], y[chosen]
    m = matrix(run.final.global_weights)
    for t in range(ROUNDS, ROUNDS + 3):
        for rows in run.batches(t, "server", len(x), 6):
            m = m - (LR if lr is None else lr) * gradient(m, x[rows], y[rows])
    close(result.global_weights, m)
    assert (len(result.ledger), result.ledger.acp(), result.rounds) == (0, 1.0, 3)


def test_no_epoch_leaves_the_poisoned_model() -> None:
    run = Run()
    assert torch.equal(run.recover(FineTune(num_epochs=0)).global_weights, run.final.global_weights)
    earlier = run.recover(FineTune(num_epochs=0), max_rounds=2).global_weights
    assert torch.equal(earlier, run.history.read_round(2).global_weights)


# -- KnowledgeDistillation ------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [True, False])
def test_subtraction_is_training_in_which_the_excluded_sent_zeros(weighted: bool) -> None:
    run = Run(FedAvg(weighted=weighted))
    found = run.recover(KnowledgeDistillation(num_epochs=0), "c1", "c4").global_weights
    w = run.history.read_round(0).global_weights.double().numpy()
    sizes = np.array([8, 12, 16, 20, 24.0]) if weighted else np.ones(5)
    for t in range(ROUNDS):
        updates = run.history.read_round(t).updates.double().numpy()
        updates[[1, 4]] = 0
        w = w - LR * np.average(updates, axis=0, weights=sizes)
    close(found, w)


def test_for_other_rules_it_is_one_by_the_number_of_clients() -> None:
    run = Run(Median())
    found = run.recover(KnowledgeDistillation(num_epochs=0), "c1").global_weights
    sent = np.mean([run.history.read_round(t).updates[1].double().numpy() for t in range(6)], 0)
    close(found, run.final.global_weights.double().numpy() + LR * 6 * sent / 5)


def test_distillation_follows_the_gradient_of_the_softened_predictions() -> None:
    run, tau = Run(), 4.0
    recoverer = KnowledgeDistillation(num_epochs=2, batch_size=8, lr=0.2, temperature=tau)
    found = run.recover(recoverer, "c4").global_weights
    x, _ = arrays(run.server)
    m = matrix(run.recover(KnowledgeDistillation(num_epochs=0), "c4").global_weights)
    taught = softmax(x @ matrix(run.final.global_weights).T / tau)
    for t in (ROUNDS + 1, ROUNDS + 2):
        for rows in run.batches(t, "server", 20, 8):
            z = tau * (softmax(x[rows] @ m.T / tau) - taught[rows])  # of tau^2 KL
            m = m - 0.2 * z.T @ x[rows] / len(rows)
    close(found, m)


def test_labels_are_not_read() -> None:
    recoverer = KnowledgeDistillation(num_epochs=2)
    x = samples(99, 20).tensors[0]
    found = [
        Run(server=server).recover(recoverer, "c4").global_weights
        for server in (samples(99, 20), TensorDataset(x), TensorDataset(x, torch.full((20,), -5)))
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_distillation_loss() -> None:
    rng = np.random.default_rng(0)
    student, teacher, tau = rng.normal(size=(5, 3)), rng.normal(size=(5, 3)), 2.5
    p, q = softmax(teacher / tau), softmax(student / tau)
    expected = tau**2 * np.mean([np.sum(a * np.log(a / b)) for a, b in zip(p, q, strict=True)])
    found = distillation_loss(torch.tensor(student), torch.tensor(teacher), tau)
    assert float(found) == pytest.approx(expected, rel=1e-12)


# -- GradientAscent -------------------------------------------------------------------------------


def own_model(run: Run, row: int) -> np.ndarray:
    last = run.history.read_round(ROUNDS - 1)
    return (last.global_weights - LR * last.updates[row]).double().numpy()


@pytest.mark.parametrize(
    ("clip", "radius", "stop"), [(None, 50.0, None), (0.3, 0.25, None), (5.0, 50.0, 0.6)]
)
def test_the_target_climbs_in_the_ball(clip, radius, stop) -> None:
    run = Run()
    recoverer = GradientAscent(
        num_epochs=3, batch_size=5, lr=0.1, clip_norm=clip, radius=radius,
        stop_distance=stop, final_rounds=0,
    )  # fmt: skip
    result = run.recover(recoverer, "c2")
    share, own = 16 / 80, own_model(run, 2)
    reference = (run.final.global_weights.double().numpy() - share * own) / (1 - share)
    x, y = arrays(run.data[2])
    m, steps = matrix(reference), 0
    for rows in run.batches(ROUNDS + 1, "c2", 16, 5, epochs=3):
        g = gradient(m, x[rows], y[rows])
        if clip is not None:
            g = g * min(1, clip / np.linalg.norm(g))
        moved = m + 0.1 * g - matrix(reference)
        m = matrix(reference) + moved * min(1, radius / np.linalg.norm(moved))
        steps += 1
        if stop is not None and np.linalg.norm(vector(m) - own) > stop:
            break
    close(result.global_weights, m)
    assert (steps < 12) == (stop is not None)
    if radius < 1:
        assert np.linalg.norm(vector(m) - reference) == pytest.approx(radius, rel=1e-6)
    (entry,) = result.ledger.entries
    assert (entry.client_id, entry.round, entry.reason, entry.local_steps) == (
        "c2",
        ROUNDS + 1,
        "other",
        12,
    )
    assert result.ledger.acp() == 1.0


def test_by_default_the_ball_holds_a_third_of_the_squared_distance_to_random_models() -> None:
    run = Run()
    far = GradientAscent(num_epochs=1, lr=1e6, stop_distance=None, final_rounds=0)
    found = run.recover(far, "c2").global_weights.double().numpy()
    share = 16 / 80
    reference = run.final.global_weights.double().numpy() - share * own_model(run, 2)
    reference /= 1 - share
    rng, start = np.random.default_rng(0), run.history.read_round(0).global_weights.double().numpy()
    parts = start[: L * F], start[L * F :]
    squares = [
        np.sum((reference - np.concatenate([rng.permutation(p) for p in parts])) ** 2)
        for _ in range(20_000)
    ]
    radius = np.linalg.norm(found - reference)
    assert radius == pytest.approx(np.sqrt(np.mean(squares) / 3), rel=0.01)


def test_the_reference_is_the_mean_of_the_other_models() -> None:
    # Of unweighted averaging, w_T is the mean of all clients' models of the last round.
    run = Run(FedAvg(weighted=False))
    models = np.stack([own_model(run, i) for i in range(5)])
    close(run.final.global_weights, models.mean(axis=0))
    tiny = GradientAscent(num_epochs=1, radius=1e-9, final_rounds=0, stop_distance=None)
    close(run.recover(tiny, "c2").global_weights, models[[0, 1, 3, 4]].mean(axis=0))
    close(run.recover(tiny, "c2", "c3").global_weights, models[[0, 1, 4]].mean(axis=0))
    w = torch.tensor(models.mean(axis=0))
    direct = reference_weights(w, torch.tensor(models[[2]]), torch.tensor([0.2]))
    close(direct, (5 * w.numpy() - models[2]) / 4, tol=1e-7)


def test_random_models_are_the_first_one_in_random_order() -> None:
    rng = np.random.default_rng(3)
    w, start = rng.normal(size=7), rng.normal(size=7)
    squares = [
        np.sum((w[:3] - start[list(a)]) ** 2) + np.sum((w[3:] - start[list(b)]) ** 2)
        for a in permutations(range(3))
        for b in permutations(range(3, 7))
    ]
    found = distance_to_random_models(torch.tensor(w), torch.tensor(start), [3, 4])
    assert found == pytest.approx(np.mean(squares), rel=1e-12)


def test_projection() -> None:
    rng = np.random.default_rng(1)
    v, centre = torch.tensor(rng.normal(size=6)), torch.tensor(rng.normal(size=6))
    distance = float((v - centre).norm())
    assert project_onto_ball(v, centre, distance + 1e-9) is v
    found = project_onto_ball(v, centre, distance / 3)
    # On the sphere, and on the way.
    assert float((found - centre).norm()) == pytest.approx(distance / 3)
    assert float((v - found).norm()) == pytest.approx(2 * distance / 3)


def test_several_targets_are_averaged_and_the_others_train_on() -> None:
    run, settings = Run(), {"num_epochs": 2, "batch_size": 5, "lr": 0.1, "stop_distance": None}
    recoverer = GradientAscent(**settings, radius=50.0, final_rounds=0)
    both = run.recover(recoverer, "c1", "c2").global_weights
    w = run.final.global_weights.double().numpy()
    reference = (w - 0.15 * own_model(run, 1) - 0.2 * own_model(run, 2)) / 0.65
    ends = []
    for row, name, size in ((1, "c1", 12), (2, "c2", 16)):
        x, y = arrays(run.data[row])
        m = matrix(reference)
        for rows in run.batches(ROUNDS + 1, name, size, 5, epochs=2):
            g = gradient(m, x[rows], y[rows])
            m = m + 0.1 * g * min(1, 5 / np.linalg.norm(g))
        ends.append(vector(m))
    close(both, np.mean(ends, axis=0))

    recoverer = GradientAscent(**settings, radius=50.0, final_rounds=1)
    result = run.recover(recoverer, "c1", "c2")
    m, total = matrix(np.mean(ends, axis=0)), 0
    for row, size in ((0, 8), (3, 20), (4, 24)):
        x, y = arrays(run.data[row])
        rows = run.batches(ROUNDS + 2, f"c{row}", size, 4)[0]
        total = total + size / 52 * gradient(m, x[rows], y[rows])
    close(result.global_weights, m - LR * total)
    assert result.ledger.acp() == pytest.approx((ROUNDS - 1) / ROUNDS)


# -- WeightNegation -------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [None, ["layers.1.bias"]])
def test_the_negated_model_is_trained_by_the_remaining_clients(layers) -> None:
    """Khalil et al. 2025: minus the weights of a layer, then federated training."""
    run = Run()
    result = run.recover(WeightNegation(num_rounds=3, layers=layers), "c1", "c4")
    m = matrix(run.final.global_weights)
    m = np.c_[m[:, :F], -m[:, F]] if layers else -m
    for t in range(ROUNDS + 1, ROUNDS + 4):
        total = 0
        for row, size in ((0, 8), (2, 16), (3, 20)):
            x, y = arrays(run.data[row])
            rows = run.batches(t, f"c{row}", size, 4)[0]
            total = total + size / 44 * gradient(m, x[rows], y[rows])
        m = m - LR * total
    close(result.global_weights, m)
    assert result.ledger.acp() == pytest.approx((ROUNDS - 3) / ROUNDS)
    # The first round asks nobody.
    assert {entry.round for entry in result.ledger.entries} == set(range(ROUNDS + 1, ROUNDS + 4))


def test_the_first_layer_alone_is_negated() -> None:
    torch.manual_seed(1)
    module = MLP(in_features=F, hidden=(3,), num_classes=L, lr=0.1)
    clients = [LightningClient(f"c{i}", module, samples(i, 8), batch_size=4) for i in range(3)]
    federation, history = Federation(clients, module), MemoryHistory()
    final = loop().record(federation, FedAvg(), history, max_rounds=2, server_lr=LR).global_weights
    found = loop().recover(federation, history, WeightNegation(num_rounds=0), ["c0"])
    first = 3 * F + 3
    assert torch.equal(found.global_weights[:first], -final[:first])
    assert torch.equal(found.global_weights[first:], final[first:])
    with pytest.raises(ConfigurationError, match="to be layers of the model"):
        loop().recover(federation, history, WeightNegation(layers=["layers.9"]), ["c0"])
