"""Rules published since 2022 against float64 NumPy written from the papers, client by client."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.cluster import HDBSCAN
from torch import nn

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import (
    LASA,
    RFLBAT,
    AggregationContext,
    Aggregator,
    AlignIns,
    DeepSight,
    MultiMetrics,
)
from fedrec.data import Digits
from fedrec.exceptions import AggregationError, FedrecWarning
from fedrec.functional import gap_clusters, median_z_scores, whitened_scores
from fedrec.history import MemoryHistory
from fedrec.models import MLP
from fedrec.parameters import ParameterVector
from fedrec.random import torch_generator

MODULE = nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 5))
LAYOUT = ParameterVector(MODULE)
D = LAYOUT.num_parameters
LAYERS = np.split(np.arange(D), np.cumsum(LAYOUT.sizes)[:-1])


def updates_of(m: int, seed: int, num_malicious: int = 0) -> np.ndarray:
    """Benign updates around a direction; malicious ones on the other side, the first rows."""
    rng = np.random.default_rng(seed)
    direction = rng.normal(size=D)
    x = direction + rng.standard_t(4, size=(m, D))
    x[:num_malicious] = -2 * direction + 0.3 * rng.normal(size=(num_malicious, D))
    return x.astype(np.float32)


def context(m: int, weights: np.ndarray) -> AggregationContext:
    return AggregationContext(
        round=2,
        phase="record",
        client_ids=tuple(f"client-{i:02d}" for i in range(m)),
        global_weights=torch.from_numpy(weights),
        layout=LAYOUT,
    )


def weights_of(seed: int) -> np.ndarray:
    return np.random.default_rng(100 + seed).normal(size=D).astype(np.float32)


def run(rule: Aggregator, x: np.ndarray, w: np.ndarray, sizes: np.ndarray | None = None):
    given = None if sizes is None else torch.from_numpy(sizes)
    return rule(torch.from_numpy(x), given, context(len(x), w)).double().numpy()


def z_scores(values: list[float]) -> np.ndarray:
    """|x - median| / standard deviation, as both papers define it."""
    v = np.array(values)
    spread = np.sqrt(np.mean((v - v.mean()) ** 2))
    return np.abs(v - np.median(v)) / spread if spread > 0 else 0 * v


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


# -- AlignIns: Xu et al. 2025, algorithm 1, on differences of models ------------------------------


def alignins_by_definition(x, w, k, lc, ls) -> tuple[np.ndarray, list[int]]:
    deltas = [-0.1 * row for row in x.astype(np.float64)]  # local minus global model
    w = w.astype(np.float64)
    tda = [cosine(delta, w) for delta in deltas]
    p = np.sign(sum(np.sign(delta) for delta in deltas))
    mpsa = []
    for delta in deltas:
        mask = np.zeros(D)
        mask[np.argsort(-np.abs(delta))[:k]] = 1
        mpsa.append(1 - np.count_nonzero((np.sign(delta) - p) * mask) / k)
    zc, zs = z_scores(tda), z_scores(mpsa)
    kept = [i for i in range(len(x)) if zc[i] <= lc and zs[i] <= ls]
    c = np.median([np.linalg.norm(deltas[i]) for i in kept])
    total = sum(deltas[i] * min(1, c / np.linalg.norm(deltas[i])) for i in kept)
    return total / len(kept) / -0.1, kept


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("fraction", "lc", "ls"), [(0.3, 1.0, 1.0), (1.0, 2.0, 0.7)])
def test_alignins(seed: int, fraction: float, lc: float, ls: float) -> None:
    x, w = updates_of(16, seed, num_malicious=3), weights_of(seed)
    want, kept = alignins_by_definition(x, w, int(fraction * D), lc, ls)
    rule = AlignIns(top_fraction=fraction, cosine_radius=lc, sign_radius=ls)
    np.testing.assert_allclose(run(rule, x, w), want, rtol=1e-5, atol=1e-6)
    assert 0 < len(kept) < 16


def test_alignins_leaves_out_those_on_the_other_side() -> None:
    for seed in range(5):
        x, w = updates_of(16, seed, num_malicious=3), weights_of(seed)
        kept = alignins_by_definition(x, w, int(0.3 * D), 1.0, 1.0)[1]
        assert not {0, 1, 2} & set(kept)
        # The step goes where benign clients go.
        assert cosine(run(AlignIns(), x, w), x[3:].mean(axis=0)) > 0.8


def test_alignins_without_anybody_has_no_effect_and_says_so() -> None:
    x, w = updates_of(2, 0), weights_of(0)
    # Of two, both are one standard deviation away from the median.
    with pytest.warns(FedrecWarning, match="AlignIns admits none of 2 updates"):
        assert not run(AlignIns(cosine_radius=0.9), x, w).any()


@pytest.mark.parametrize("rule", [AlignIns(), MultiMetrics(local_lr=0.1)])
def test_rules_that_need_the_global_weights_say_so(rule: Aggregator) -> None:
    with pytest.raises(AggregationError, match="needs the global weights"):
        rule(torch.ones(3, 2))


# -- LASA: Xu et al. 2025, algorithm 1 ------------------------------------------------------------


def lasa_by_definition(x, sparsity, ln, ls) -> tuple[np.ndarray, list[list[int]]]:
    m = len(x)
    deltas = [-row for row in x.astype(np.float64)]
    c = np.median([np.linalg.norm(delta) for delta in deltas])
    deltas = [delta * min(1, c / np.linalg.norm(delta)) for delta in deltas]
    keep = int(round((1 - sparsity) * D, 9))
    for delta in deltas:
        delta[np.argsort(-np.abs(delta))[keep:]] = 0
    result, sets = np.zeros(D), []
    for layer in LAYERS:
        parts = [delta[layer] for delta in deltas]
        zn = z_scores([np.linalg.norm(part) for part in parts])
        zs = z_scores(
            [0.5 * (1 + np.sign(part).sum() / np.abs(np.sign(part)).sum()) for part in parts]
        )
        kept = [i for i in range(m) if zn[i] <= ln and zs[i] <= ls] or list(range(m))
        result[layer] = sum(parts[i] for i in kept) / len(kept)
        sets.append(kept)
    return -result, sets


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("sparsity", "ln", "ls"), [(0.3, 1.0, 1.0), (0.0, 2.0, 1.0), (0.5, 1, 2)])
def test_lasa(seed: int, sparsity: float, ln: float, ls: float) -> None:
    x = updates_of(15, seed, num_malicious=3)
    want, sets = lasa_by_definition(x, sparsity, ln, ls)
    rule = LASA(sparsity=sparsity, norm_radius=ln, sign_radius=ls)
    np.testing.assert_allclose(run(rule, x, weights_of(0)), want, rtol=1e-5, atol=1e-6)
    # Layers have sets of their own.
    assert len({tuple(kept) for kept in sets}) > 1


def test_lasa_averages_a_layer_over_all_where_nobody_is_left() -> None:
    # The long one has an unusual length, the two others unusual signs.
    x = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    torch.testing.assert_close(LASA(sparsity=0.0, norm_radius=0.5, sign_radius=0.5)(x), x.mean(0))


def test_lasa_leaves_out_a_layer_on_the_other_side() -> None:
    x = np.abs(updates_of(12, 1)) + 1
    x[:2, LAYERS[2]] *= -1  # the weights of the last layer alone
    want = lasa_by_definition(x, 0.0, 2.0, 1.0)
    assert not {0, 1} & set(want[1][2])
    assert (run(LASA(sparsity=0.0, norm_radius=2.0), x, weights_of(0)) > 0).all()


# -- Multi-Metrics: Huang et al. 2023, section 4 --------------------------------------------------


def multi_metrics_by_definition(x, w, lr, p, sizes) -> tuple[np.ndarray, np.ndarray]:
    m, w0 = len(x), w.astype(np.float64)
    models = [w0 - lr * row for row in x.astype(np.float64)]
    measures = np.array(
        [[np.abs(v - w0).sum(), np.linalg.norm(v - w0), cosine(w0, v)] for v in models]
    )
    apart = np.zeros_like(measures)
    for i in range(m):
        for j in range(m):
            if i != j:
                apart[i] += np.abs(measures[i] - measures[j])
    inverse = np.linalg.inv(np.cov(apart.T))
    scores = np.array([np.sqrt(row @ inverse @ row) for row in apart])
    chosen = np.sort(np.argsort(scores)[: int(p * m)])
    models = np.array([models[i] for i in chosen])
    return (w0 - np.average(models, axis=0, weights=sizes[chosen])) / lr, scores


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("lr", "p"), [(0.1, 0.3), (2.0, 0.6)])
def test_multi_metrics(seed: int, lr: float, p: float) -> None:
    x, w = updates_of(20, seed, num_malicious=4), weights_of(seed)
    sizes = np.random.default_rng(seed).integers(1, 50, size=20)
    want, _ = multi_metrics_by_definition(x, w, lr, p, sizes)
    rule = MultiMetrics(local_lr=lr, fraction=p)
    np.testing.assert_allclose(run(rule, x, w, sizes), want, rtol=1e-4, atol=1e-5)


def test_multi_metrics_leaves_out_the_long_and_the_turned() -> None:
    for seed in range(5):
        x, w = updates_of(20, seed), weights_of(seed)
        x[:2] *= 3
        x[2:4] -= 3 * w  # of other angles with the global weights
        scores = multi_metrics_by_definition(x, w, 0.1, 0.6, np.ones(20))[1]
        assert not set(np.argsort(scores)[:12]) & {0, 1, 2, 3}
        kept = x.astype(np.float64)[np.argsort(scores)[:12]].mean(axis=0)
        got = run(MultiMetrics(local_lr=0.1, fraction=0.6), x, w)
        np.testing.assert_allclose(got, kept, rtol=1e-4, atol=1e-5)


def test_whitening_does_not_depend_on_units_and_survives_measures_that_do_not_tell() -> None:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(9, 3)))
    scores = whitened_scores(x)
    torch.testing.assert_close(whitened_scores(x * torch.tensor([1e9, 1.0, 1e-9])), scores)
    constant = torch.cat([x, torch.full((9, 1), 7.0)], dim=1)
    torch.testing.assert_close(whitened_scores(constant), scores)
    twice = torch.cat([x, x[:, :1]], dim=1)
    torch.testing.assert_close(whitened_scores(twice), scores)
    assert whitened_scores(torch.ones(4, 3)).tolist() == [0.0] * 4


def test_median_z_scores_of_equal_values() -> None:
    assert median_z_scores(torch.full((7,), 0.1)).tolist() == [0.0] * 7


# -- RFLBAT: Wang et al. 2022 ---------------------------------------------------------------------


def rflbat_by_definition(x: np.ndarray, e1: float, e2: float) -> list[int]:
    """The steps one by one; the clusters are told (see the test below of who finds them)."""
    x = x.astype(np.float64)
    centred = x - x.mean(axis=0)
    plane = centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T
    # Either sign of a principal component is as good; k-means starts from one of them.
    plane = plane * np.sign(plane[np.abs(plane).argmax(axis=0), [0, 1]])

    def within(rows: list[int], factor: float) -> list[int]:
        sums = [sum(np.linalg.norm(plane[i] - plane[j]) for j in rows) for i in rows]
        return [i for i, s in zip(rows, sums, strict=True) if s <= factor * np.median(sums)]

    rows = within(list(range(len(x))), e1)
    labels = gap_clusters(torch.from_numpy(plane[rows])).numpy()
    medians = []
    for label in range(labels.max() + 1):
        members = [i for i, one in zip(rows, labels, strict=True) if one == label]
        alike = [np.mean([cosine(x[i], x[j]) for j in members]) for i in members]
        medians.append(np.median(alike) if len(members) > 1 else 1.0)
    chosen = int(np.argmin(medians))
    return within([i for i, one in zip(rows, labels, strict=True) if one == chosen], e2)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("e1", "e2"), [(10.0, 4.0), (1.5, 1.2)])
def test_rflbat(seed: int, e1: float, e2: float) -> None:
    x = updates_of(20, seed, num_malicious=5)
    kept = rflbat_by_definition(x, e1, e2)
    rule = RFLBAT(outlier_factor=e1, cluster_factor=e2)
    want = x.astype(np.float64)[kept].mean(axis=0)
    np.testing.assert_allclose(run(rule, x, weights_of(0)), want, rtol=1e-5, atol=1e-6)
    assert not set(kept) & {0, 1, 2, 3, 4}


def test_rflbat_leaves_out_a_far_one_first() -> None:
    x = updates_of(20, 3)
    x[7] *= 1e4
    kept = rflbat_by_definition(x, 10.0, 4.0)
    assert 7 not in kept
    want = x.astype(np.float64)[kept].mean(axis=0)
    np.testing.assert_allclose(run(RFLBAT(), x, weights_of(0)), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [2, 3])
def test_as_many_clusters_as_there_are(count: int) -> None:
    rng = np.random.default_rng(count)
    truth = np.sort(np.arange(40) % count)
    points = np.array([[0, 0], [30, 1], [8, 0]])[truth] + 0.2 * rng.normal(size=(40, 2))
    order = rng.permutation(40)
    found = gap_clusters(torch.from_numpy(points[order])).numpy()
    assert len(set(found)) == count
    for label in range(count):
        assert len(set(found[truth[order] == label])) == 1
    # Names follow the coordinates, not the rows.
    assert gap_clusters(torch.from_numpy(points)).numpy()[order].tolist() == found.tolist()


def test_one_cluster_where_there_are_no_groups() -> None:
    points = np.random.default_rng(1).random((40, 2))
    assert gap_clusters(torch.from_numpy(points)).tolist() == [0] * 40
    assert gap_clusters(torch.ones(4, 2)).tolist() == [0] * 4


# -- DeepSight: Rieger et al. 2022, algorithms 1 to 3 ---------------------------------------------

SETTINGS = {"input_shape": (9,), "local_lr": 0.1, "num_samples": 40, "num_seeds": 2}


def predict(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Probabilities of `MODULE` with these weights."""
    a, b, c, d = (
        weights[layer].reshape(shape) for layer, shape in zip(LAYERS, LAYOUT.shapes, strict=True)
    )
    z = np.maximum(x @ a.T + b, 0) @ c.T + d
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def logits(weights: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(MODULE, LAYOUT.unflatten(weights), (inputs,))


def apart(found: HDBSCAN) -> np.ndarray:
    labels, m = found.labels_, len(found.labels_)
    same = [[i == j or labels[i] == labels[j] >= 0 for j in range(m)] for i in range(m)]
    return 1.0 - np.array(same)


def deepsight_by_definition(x, w, inputs) -> tuple[np.ndarray, list[int], np.ndarray]:
    m, x, w = len(x), x.astype(np.float64), w.astype(np.float64)
    given = {"min_cluster_size": 3, "allow_single_cluster": True, "copy": True}
    neups, bias = [], []
    for row in x:
        energy = np.abs(row[LAYERS[3]]) + np.abs(row[LAYERS[2]].reshape(5, 7)).sum(axis=1)
        neups.append(energy**2 / (energy**2).sum())
        bias.append(row[LAYERS[3]])
    exceedings = np.array([(c > max(0.01, 1 / 5) * c.max()).sum() for c in neups])
    angles = np.array([[1 - cosine(a, b) for b in bias] for a in bias]).clip(0, 2)
    np.fill_diagonal(angles, 0)
    distances = apart(HDBSCAN(metric="precomputed", **given).fit(angles))
    distances += apart(HDBSCAN(**given).fit(np.array(neups)))
    for drawn in inputs:
        ddifs = [(predict(w - 0.1 * row, drawn) / predict(w, drawn)).mean(axis=0) for row in x]
        distances += apart(HDBSCAN(**given).fit(np.array(ddifs))) / len(inputs)
    final = apart(HDBSCAN(metric="precomputed", **given).fit(distances / 3))
    poisoned = exceedings <= np.median(exceedings) / 2
    kept = [i for i in range(m) if np.mean(poisoned[final[i] == 0]) < 1 / 3]
    norms = [np.linalg.norm(row) for row in x]
    bound = np.median(norms)
    total = sum(x[i] * min(1, bound / norms[i]) for i in kept)
    return total / len(kept), kept, poisoned


def of_few_classes(m: int, seed: int, num_malicious: int) -> np.ndarray:
    """Benign clients change all output neurons; malicious ones change one, and are alike."""
    rng = np.random.default_rng(seed)
    x = 0.3 * rng.normal(size=D) + 0.2 * rng.normal(size=(m, D))
    x[:, LAYERS[3]] += 1.0
    weights = x[:num_malicious, LAYERS[2]].reshape(num_malicious, 5, 7)
    weights[:, 0] += 4.0
    x[:num_malicious, LAYERS[2]] = weights.reshape(num_malicious, -1)
    x[:num_malicious, LAYERS[3]] = [6.0, 0.1, 0.1, 0.1, 0.1]
    return x.astype(np.float32)


@pytest.mark.parametrize("seed", range(6))
def test_deepsight(seed: int) -> None:
    x, w = of_few_classes(16, seed, num_malicious=4), weights_of(seed)
    generator = torch_generator(0, "DeepSight", 2)
    inputs = [torch.rand(40, 9, generator=generator).double().numpy() for _ in range(2)]
    want, kept, poisoned = deepsight_by_definition(x, w, inputs)
    ctx = replace(context(16, w), outputs=logits)
    got = DeepSight(**SETTINGS)(torch.from_numpy(x), None, ctx)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-5)
    assert poisoned[:4].all()
    assert not poisoned[4:].any()
    assert not {0, 1, 2, 3} & set(kept)
    assert len(kept) >= 8


def test_deepsight_without_anybody_or_without_a_model_says_so() -> None:
    w = weights_of(0)
    x = torch.from_numpy(of_few_classes(4, 0, 4))
    with pytest.raises(AggregationError, match="needs outputs of the model"):
        DeepSight(**SETTINGS)(x, None, context(4, w))
    # Two changed all five neurons, two one neuron: half of the median is 1.5. All are alike.
    x = x[:1].repeat(4, 1)
    x[2:, LAYERS[3]] = 20.0
    ctx = replace(context(4, w), outputs=logits)
    rule = DeepSight(**SETTINGS | {"local_lr": 1e-9}, min_cluster_size=4, max_suspicious=0.5)
    with pytest.warns(FedrecWarning, match="DeepSight leaves out all of 4"):
        assert not rule(x, None, ctx).any()


def test_deepsight_in_the_loop_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(0)
    data, model = Digits(num_clients=8), MLP(in_features=64)
    federation = Federation.from_data(data, model, batch_size=32)
    loop = FederatedLoop(logger=False, enable_progress_bar=False)
    rule = DeepSight(input_shape=(1, 8, 8), local_lr=0.3, num_samples=20)
    run = loop.record(federation, rule, MemoryHistory(), max_rounds=15, server_lr=0.3)
    assert loop.test(federation, run.global_weights)["ter"] < 0.5
    assert model.training
