"""FLDetector against float64 NumPy written from the papers, with dense BFGS matrices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans

from fedrec.detectors import FLDetector
from fedrec.functional import consistency_scores, gap_statistic
from fedrec.functional.detection.fldetector import upper_cluster
from fedrec.random import numpy_generator
from fedrec.types import CohortUpdates, RoundRecord

M, D, T = 6, 5, 30


def dense_bfgs(pairs: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The BFGS recursion from sigma I, sigma of the last pair, oldest pair first."""
    s, y = pairs[-1]
    b = (s @ y) / (s @ s) * np.eye(len(s))
    for s, y in pairs:
        b = b - np.outer(b @ s, b @ s) / (s @ b @ s) + np.outer(y, y) / (y @ s)
    return b


def recording(seed: int) -> list[RoundRecord]:
    """Noisy quadratic clients in float64; jumps of the aggregate give pairs without curvature."""
    rng = np.random.default_rng(seed)
    curvature, centres, w = np.linspace(0.5, 3, D), rng.normal(size=(M, D)), np.full(D, 2.0)
    records = []
    for t in range(T):
        g = curvature * (w - centres) + 0.4 * rng.normal(size=(M, D))
        a = g.mean(axis=0) * (3 if t % 5 == 0 else 1)
        records.append(
            RoundRecord(
                round=t,
                global_weights=torch.from_numpy(w),
                sent=CohortUpdates(
                    client_ids=tuple(f"c{i}" for i in range(M)),
                    updates=torch.from_numpy(g),
                    num_samples=torch.ones(M),
                ),
                aggregate=torch.from_numpy(a),
            )
        )
        w = w - 0.2 * a
    return records


def scores_by_definition(
    records: list[RoundRecord], window: int, buffer_size: int, start_round: int
) -> np.ndarray:
    w = [r.global_weights.numpy() for r in records]
    g = [r.updates.numpy() for r in records]
    a = [r.aggregate.numpy() for r in records]
    skipped = 0
    rows = []
    for t in range(start_round, T):
        recent = range(max(t - buffer_size, 1), t)
        pairs = [(w[r] - w[r - 1], a[r] - a[r - 1]) for r in recent]
        pairs = [(s, y) for s, y in pairs if s @ y > 1e-8 * (s @ s)]
        skipped += len(recent) - len(pairs)
        hvp = dense_bfgs(pairs) @ (w[t] - w[t - 1]) if pairs else np.zeros(D)
        distance = np.linalg.norm(g[t - 1] + hvp - g[t], axis=1)
        rows.append(distance / distance.sum())
    assert skipped > 0, "the example should have a pair without curvature"
    return np.sum(rows[-window:], axis=0)


@pytest.mark.parametrize("buffer_size", [2, 10])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_scores_are_window_sums_of_normalised_distances(seed: int, buffer_size: int) -> None:
    window, start_round = 4, 3
    records = recording(seed)
    detector = FLDetector(
        window=window, buffer_size=buffer_size, start_round=start_round, standard_errors=1e6
    )
    for record in records:
        detector.observe(record)
    got = np.array([detector.result().scores[f"c{i}"] for i in range(M)])
    expected = scores_by_definition(records, window, buffer_size, start_round)
    # Ours are relative to the mean over clients and averaged over rounds.
    np.testing.assert_allclose(got / M * window, expected, rtol=1e-7)


def test_distances_are_from_the_prediction() -> None:
    rng = np.random.default_rng(0)
    old, new, hvp = rng.normal(size=(M, D)), rng.normal(size=(M, D)), rng.normal(size=D)
    distance = np.sqrt(((old + hvp - new) ** 2).sum(axis=1))
    np.testing.assert_allclose(
        consistency_scores(*(torch.from_numpy(x) for x in (old, new, hvp))).numpy(),
        distance / distance.sum(),
        rtol=1e-12,
    )


def best_dispersion(values: np.ndarray, k: int) -> float:
    """The smallest within-cluster sum of squares over all ways to label the values."""
    best = np.inf
    for labels in itertools.product(range(k), repeat=len(values)):
        groups = [
            [x for x, label in zip(values, labels, strict=True) if label == c] for c in range(k)
        ]
        if all(groups):
            spread = (sum((x - sum(group) / len(group)) ** 2 for x in group) for group in groups)
            best = min(best, sum(spread))
    return best


def test_gap_statistic_by_brute_force() -> None:
    n, b, top = 6, 5, 4
    clusters = range(1, top + 1)
    references = numpy_generator(3, "gap-statistic").random((b, n))
    w_ref = {k: np.array([best_dispersion(x, k) for x in references]) for k in clusters}
    rng = np.random.default_rng(1)
    found = set()
    for scores in (
        rng.random(n),
        rng.normal(size=n),
        np.concatenate([rng.random(4) * 0.1, 0.9 + rng.random(2) * 0.1]),
        np.array([0.0, 0.01, 0.3, 0.32, 1.0, 1.01]),
    ):
        values = (scores - scores.min()) / (scores.max() - scores.min())
        w = {k: best_dispersion(values, k) for k in clusters}
        gap = {k: np.log(w_ref[k].mean()) - np.log(w[k]) for k in clusters}
        s = {k: np.sqrt(1 + 1 / b) * np.log(w_ref[k]).std() for k in clusters}
        for c in (0.0, 1.0, 3.0):
            enough = [k for k in range(1, top) if gap[k] - gap[k + 1] + c * s[k + 1] >= 0]
            expected = min(enough, default=top)
            assert gap_statistic(torch.from_numpy(scores), top, b, c, seed=3) == expected
            found.add(expected)
    assert len(found) >= 3


def test_upper_cluster_is_that_of_k_means() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = rng.normal(size=15) + 3 * (rng.random(15) < 0.3)
        model = KMeans(n_clusters=2, n_init=20, random_state=0).fit(scores[:, None])
        ours = upper_cluster(torch.from_numpy(scores)).numpy()
        spread = sum(((x - x.mean()) ** 2).sum() for x in (scores[ours], scores[~ours]))
        assert spread <= model.inertia_ * (1 + 1e-9)
        if spread >= model.inertia_ * (1 - 1e-9):
            top = int(model.cluster_centers_[:, 0].argmax())
            assert (ours == (model.labels_ == top)).all()


@pytest.mark.parametrize(
    ("c", "low", "high"), [(1.0, 0.12, 0.25), (2.0, 0.02, 0.09), (3.0, 0, 0.03)]
)
def test_false_alarms_on_uniform_scores_are_as_stated(c: float, low: float, high: float) -> None:
    draws = np.random.default_rng(0).random((500, 20))
    alarms = [gap_statistic(torch.from_numpy(x), standard_errors=c) > 1 for x in draws]
    assert low <= np.mean(alarms) <= high
