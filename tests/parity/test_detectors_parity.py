"""Detectors by scores against float64 NumPy, written naively from their definitions."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
import torch

from fedrec.detectors import (
    Auror,
    CosineOutlier,
    CrossRoundConsistency,
    Mahalanobis,
    NormOutlier,
    ScoreDetector,
    Spectral,
    SybilSimilarity,
    UpdateAutoencoder,
)
from fedrec.functional.detection.outliers import modified_z_scores, robust_distances
from fedrec.functional.detection.two_means import two_means
from fedrec.random import numpy_generator
from fedrec.types import CohortUpdates, RoundRecord

M, D, T, WINDOW = 9, 14, 7, 3
IDS = tuple(f"c{i}" for i in range(M))


def rounds(seed: int) -> np.ndarray:
    """Updates of T rounds, (T, M, D): benign around a mean, three clients apart."""
    rng = np.random.default_rng(seed)
    g = rng.normal(size=D) + 0.5 * rng.normal(size=(T, M, D))
    g[:, :3] += 4 * rng.normal(size=D)
    return g


def watch(detector: ScoreDetector, g: np.ndarray) -> ScoreDetector:
    for t, updates in enumerate(g):
        detector.observe(
            RoundRecord(
                round=t,
                global_weights=torch.zeros(D, dtype=torch.float64),
                sent=CohortUpdates(
                    client_ids=IDS,
                    updates=torch.from_numpy(updates.copy()),
                    num_samples=torch.ones(M, dtype=torch.int64),
                ),
                aggregate=torch.zeros(D, dtype=torch.float64),
            )
        )
    return detector


def z_scores(values: list[float]) -> list[float]:
    middle = statistics.median(values)
    away = [abs(v - middle) for v in values]
    spread = statistics.median(away) * 1.482602218505602
    if spread == 0:
        spread = statistics.mean(away) * math.sqrt(math.pi / 2)
    return [(v - middle) / spread for v in values]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(
        sum(x * x for x in a) * sum(y * y for y in b)
    )


def check(detector: ScoreDetector, g: np.ndarray, by_round: dict[int, list[float]]) -> None:
    """Scores of every round, their means over the window, and who is flagged when."""
    result = watch(detector, g).result()
    assert sorted(result.round_scores) == sorted(by_round)
    for t, expected in by_round.items():
        got = [result.round_scores[t][c] for c in IDS]
        np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)
    flagged: dict[str, tuple[int, float]] = {}
    scored = sorted(by_round)
    for end in range(WINDOW, len(scored) + 1):
        for i, client in enumerate(IDS):
            mean = sum(by_round[t][i] for t in scored[end - WINDOW : end]) / WINDOW
            mean = abs(mean) if detector.two_sided else mean
            if client not in flagged and mean > detector.threshold:
                flagged[client] = (scored[end - 1], mean)
    assert result.malicious == tuple(sorted(flagged))
    assert result.round == min((t for t, _ in flagged.values()), default=None)
    for client, (_, mean) in flagged.items():
        assert result.scores[client] == pytest.approx(mean, rel=1e-9)


def test_modified_z_scores() -> None:
    values = np.random.default_rng(0).normal(size=10).tolist()  # even: mean of the middle two
    np.testing.assert_allclose(modified_z_scores(torch.tensor(values)), z_scores(values), rtol=1e-5)
    exact = torch.tensor(values, dtype=torch.float64)
    np.testing.assert_allclose(modified_z_scores(exact), z_scores(values), rtol=1e-12)
    # Most are equal: the mean absolute deviation, 8 / 4, times sqrt(pi / 2).
    few = modified_z_scores(torch.tensor([1.0, 1.0, 1.0, 9.0]))
    np.testing.assert_allclose(few, [0, 0, 0, 8 / (2 * math.sqrt(math.pi / 2))], rtol=1e-12)
    assert modified_z_scores(torch.full((4,), 3.0)).tolist() == [0.0] * 4
    some = modified_z_scores(torch.tensor([1.0, torch.nan, 2.0, 3.0]))
    assert bool(some[1].isnan())
    np.testing.assert_allclose(some[[0, 2, 3]], [-0.6744897501960817, 0, 0.6744897501960817])


@pytest.mark.parametrize("two_sided", [False, True])
def test_norm_outlier(two_sided: bool) -> None:
    g = rounds(0)
    norms = {t: [math.sqrt(sum(x * x for x in row)) for row in g[t]] for t in range(T)}
    detector = NormOutlier(window=WINDOW, threshold=1.5, two_sided=two_sided)
    check(detector, g, {t: z_scores(n) for t, n in norms.items()})
    assert detector.result().malicious  # the example has some


def test_cosine_outlier() -> None:
    g = rounds(1)
    expected = {}
    for t in range(T):
        median = [statistics.median(g[t, :, j]) for j in range(D)]
        expected[t] = z_scores([1 - cosine(row, np.array(median)) for row in g[t]])
    detector = CosineOutlier(window=WINDOW, threshold=2.0)
    check(detector, g, expected)
    assert detector.result().malicious


@pytest.mark.parametrize("num_coordinates", [None, 5])
def test_spectral(num_coordinates: int | None) -> None:
    g = rounds(2)
    expected = {}
    for t in range(T):
        x = g[t]
        if num_coordinates is not None:
            draw = numpy_generator(4, "spectral", t)
            x = x[:, draw.choice(D, size=num_coordinates, replace=False)]
        centred = x - x.mean(axis=0)
        direction = np.linalg.svd(centred)[2][0]
        expected[t] = z_scores([abs(float(row @ direction)) for row in centred])
    detector = Spectral(num_coordinates=num_coordinates, window=WINDOW, threshold=1.0, seed=4)
    check(detector, g, expected)


def smallest_determinant(x: np.ndarray) -> np.ndarray:
    """Distances by the best of all subsets of h points."""
    m, k = x.shape
    best: tuple[float, np.ndarray] = (math.inf, np.zeros(m))
    for subset in itertools.combinations(range(m), (m + k + 1) // 2):
        sample = x[list(subset)]
        covariance = np.cov(sample.T, bias=True).reshape(k, k)
        determinant = float(np.linalg.det(covariance))
        if determinant < best[0]:
            away = x - sample.mean(axis=0)
            squares = np.einsum("ij,jk,ik->i", away, np.linalg.inv(covariance), away)
            best = (determinant, np.sqrt(squares))
    return best[1]


@pytest.mark.parametrize(("m", "k"), [(9, 1), (9, 2), (11, 3)])
def test_robust_distances_by_brute_force(m: int, k: int) -> None:
    rng = np.random.default_rng(m + k)
    for scale in (1.0, 1e-6):  # distances have no unit
        x = rng.normal(size=(m, k)) * scale
        x[:3] += 8 * scale
        got = robust_distances(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(got, smallest_determinant(x), rtol=1e-6)
        assert got[:3].min() > got[3:].max()


def test_mahalanobis_on_principal_components() -> None:
    g = rounds(3)
    expected = {}
    for t in range(T):
        centred = g[t] - g[t].mean(axis=0)
        projected = centred @ np.linalg.svd(centred)[2][:2].T
        expected[t] = z_scores([math.log(d) for d in smallest_determinant(projected)])
    result = watch(Mahalanobis(num_components=2, window=WINDOW), g).result()
    for t in range(T):
        got = [result.round_scores[t][c] for c in IDS]
        np.testing.assert_allclose(got, expected[t], rtol=1e-5, atol=1e-6)


def two_clusters(
    values: np.ndarray, labelings: list[np.ndarray]
) -> tuple[float, float, np.ndarray]:
    """The best of some ways to label the values: distance, spread, who is in the upper one."""
    best = (math.inf, 0.0, np.zeros(len(values), dtype=bool))
    for up in labelings:
        low, high = values[~up], values[up]
        within = ((low - low.mean()) ** 2).sum() + ((high - high.mean()) ** 2).sum()
        if within < best[0]:
            best = (within, high.mean() - low.mean(), up)
    return best[1], math.sqrt(best[0] / len(values)), best[2]


def test_two_means_by_brute_force() -> None:
    x = np.random.default_rng(5).normal(size=(8, 6)) + 1000.0
    distance, spread, upper = two_means(torch.from_numpy(x))
    labelings = [np.array(up) for up in itertools.product([False, True], repeat=8)][1:-1]
    for j in range(6):
        expected = two_clusters(x[:, j], labelings)
        if expected[0] < 0:  # the same clusters, named the other way round
            expected = (-expected[0], expected[1], ~expected[2])
        assert float(distance[j]) == pytest.approx(expected[0], rel=1e-9)
        assert float(spread[j]) == pytest.approx(expected[1], rel=1e-9)
        assert (upper[:, j].numpy() == expected[2]).all()


def above_a_cut(values: np.ndarray) -> tuple[float, float, np.ndarray]:
    return two_clusters(values, [values > cut for cut in sorted(values)[:-1]])


def test_auror() -> None:
    g, find, alpha = rounds(6), 3, 6.0
    g[:, :3, 7:] = g[:, 3:6, 7:] + 0.1  # no difference there
    clusters = [[above_a_cut(g[t, :, j]) for j in range(D)] for t in range(T)]
    apart = [sum(clusters[t][j][0] / clusters[t][j][1] for t in range(find)) for j in range(D)]
    indicative = [j for j in range(D) if apart[j] / find >= alpha]
    assert 0 < len(indicative) < D
    expected = {}
    for t in range(find, T):
        counts = np.zeros(M)
        for j in indicative:
            up = clusters[t][j][2]
            counts += up if up.sum() < M / 2 else ~up
        expected[t] = (counts / len(indicative)).tolist()
    detector = Auror(alpha=alpha, find_rounds=find, window=WINDOW, threshold=0.5)
    check(detector, g, expected)
    assert detector.result().malicious == IDS[:3]


def test_sybil_similarity() -> None:
    g = rounds(7)
    g[:, 1] = g[:, 0] + 0.01 * g[:, 1]
    expected = {}
    for t in range(T):
        sums = g[: t + 1].sum(axis=0)
        largest = [max(cosine(sums[i], sums[j]) for j in range(M) if j != i) for i in range(M)]
        expected[t] = z_scores([math.atanh(v) for v in largest])
    detector = SybilSimilarity(window=WINDOW, threshold=2.0)
    check(detector, g, expected)
    assert {"c0", "c1"} <= set(detector.result().malicious)


def test_a_client_may_be_unlike_all_others() -> None:
    rng = np.random.default_rng(7)
    g = rng.normal(size=D) + 0.3 * rng.normal(size=(T, M, D))
    g[:, 8] = -g[:, :8].mean(axis=1)
    expected = {}
    for t in range(T):
        sums = g[: t + 1].sum(axis=0)
        largest = [max(cosine(sums[i], sums[j]) for j in range(M) if j != i) for i in range(M)]
        assert largest[8] < -0.5
        expected[t] = z_scores([math.atanh(v) for v in largest])
    check(SybilSimilarity(window=WINDOW, threshold=2.0), g, expected)


@pytest.mark.parametrize("measure", ["cosine", "sign"])
def test_cross_round_consistency(measure: str) -> None:
    g = rounds(8)
    g[:, 4] = np.random.default_rng(0).normal(size=(T, D))
    expected = {}
    for t in range(1, T):
        agreement = [
            cosine(g[t - 1, i], g[t, i])
            if measure == "cosine"
            else np.mean(np.sign(g[t - 1, i]) == np.sign(g[t, i]))
            for i in range(M)
        ]
        expected[t] = z_scores([1 - a for a in agreement])
    detector = CrossRoundConsistency(measure=measure, window=WINDOW, threshold=2.0)
    check(detector, g, expected)
    assert "c4" in detector.result().malicious


def test_update_autoencoder() -> None:
    """Surrogates, what it is trained on, and errors; the weights are those that training gave."""
    g, train, p = rounds(9), 3, 6
    detector = UpdateAutoencoder(
        num_features=p, hidden=5, code=2, train_rounds=train, epochs=20, window=WINDOW, seed=1
    )
    seen: list[torch.Tensor] = []
    trained = detector._train
    detector._train = lambda examples: trained(seen.append(examples) or examples)
    result = watch(detector, g).result()

    chosen = numpy_generator(1, "surrogates").choice(D, size=p, replace=False)
    surrogates = []
    for t in range(T):
        x = g[t][:, chosen]
        surrogates.append(x / statistics.median([math.sqrt((row**2).sum()) for row in x]))
    examples = []
    for x in surrogates[:train]:
        away = ((x - np.median(x, axis=0)) ** 2).sum(axis=1)
        examples.append(x[np.argsort(away)[:5]])
    np.testing.assert_allclose(seen[0].numpy(), np.concatenate(examples), rtol=1e-6, atol=1e-7)

    weights = [w.detach().double().numpy() for w in detector._model.parameters()]
    for t in range(train, T):
        x = surrogates[t]
        hidden = np.maximum(x @ weights[0].T + weights[1], 0)
        code = hidden @ weights[2].T + weights[3]
        hidden = np.maximum(code @ weights[4].T + weights[5], 0)
        errors = (((hidden @ weights[6].T + weights[7]) - x) ** 2).mean(axis=1)
        got = [result.round_scores[t][c] for c in IDS]
        np.testing.assert_allclose(got, z_scores(np.log(errors).tolist()), rtol=1e-3, atol=1e-4)
