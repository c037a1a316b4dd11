"""Robust rules against float64 NumPy written from the papers, with loops, one line an equation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedrec.aggregators import (
    CAF,
    Aggregator,
    Bulyan,
    DnC,
    GeometricMedian,
    Krum,
    MeanAroundMedian,
    MultiKrum,
    NormClipping,
)
from fedrec.functional import krum_scores, pairwise_squared_distances, use_kernel
from fedrec.random import torch_generator

# (m, f, d): the fewest clients Bulyan takes, an even and an odd number, several blocks of columns.
SIZES = [(3, 0, 4), (7, 1, 1), (11, 2, 5), (20, 3, 700), (31, 7, 5000)]


def updates_of(m: int, f: int, d: int, *, outliers: float = 5.0, ties: bool = False) -> np.ndarray:
    """Benign updates around a common direction, and f malicious ones on the other side."""
    rng = np.random.default_rng(m + f + d)
    x = 0.3 + rng.standard_t(4, size=(m, d))
    x[:f] = -outliers * rng.random((f, d))
    if ties:
        x[rng.random((m, d)) < 0.3] = 0.0
    return x[rng.permutation(m)].astype(np.float32)


def run(rule: Aggregator, x: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    given = None if weights is None else torch.from_numpy(weights)
    return rule(torch.from_numpy(x), given).numpy()


# Blanchard et al. 2017, section 4: s(i) = sum over the n - f - 2 closest vectors of |V_i - V_j|^2.
def krum_scores_by_definition(x: list[np.ndarray], num_neighbours: int) -> list[float]:
    scores = []
    for i, a in enumerate(x):
        others = sorted(float(((a - b) ** 2).sum()) for j, b in enumerate(x) if j != i)
        scores.append(sum(others[:num_neighbours]))
    return scores


def bulyan_by_definition(x: np.ndarray, f: int) -> np.ndarray:
    """El Mhamdi et al. 2018, section 4: theta = n - 2f times Krum, then beta = theta - 2f."""
    left, selected = list(x), []
    while len(selected) < len(x) - 2 * f:
        k = max(len(left) - f - 2, 1)
        scores = krum_scores_by_definition(left, k)
        ties = krum_scores_by_definition(left, k + 1)
        best = min(range(len(left)), key=lambda i: (scores[i], ties[i]))
        selected.append(left.pop(best))
    return mean_around_median_by_definition(np.array(selected), len(selected) - 2 * f)


def mean_around_median_by_definition(x: np.ndarray, k: int) -> np.ndarray:
    """Xie et al. 2018, definition 5: the k values of a coordinate nearest to its median."""
    out = []
    for column in x.T:
        median = np.median(column)
        out.append(np.mean(sorted(column, key=lambda value: abs(value - median))[:k]))
    return np.array(out)


@pytest.mark.parametrize(("m", "f", "d"), SIZES)
def test_krum_scores(m: int, f: int, d: int) -> None:
    x = updates_of(m, f, d)
    got = krum_scores(pairwise_squared_distances(torch.from_numpy(x)), f)
    expected = krum_scores_by_definition(list(x.astype(np.float64)), m - f - 2)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize(("m", "f", "d"), SIZES)
def test_krum_returns_the_update_with_the_lowest_score(m: int, f: int, d: int) -> None:
    x = updates_of(m, f, d)
    scores = krum_scores_by_definition(list(x.astype(np.float64)), m - f - 2)
    np.testing.assert_array_equal(run(Krum(num_byzantine=f), x), x[np.argmin(scores)])


@pytest.mark.parametrize(("m", "f", "d"), SIZES)
def test_multi_krum_averages_the_m_minus_f_lowest(m: int, f: int, d: int) -> None:
    x = updates_of(m, f, d)
    scores = krum_scores_by_definition(list(x.astype(np.float64)), m - f - 2)
    expected = x.astype(np.float64)[np.argsort(scores)[: m - f]].mean(axis=0)
    np.testing.assert_allclose(run(MultiKrum(num_byzantine=f), x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("m", "f", "d"), SIZES)
def test_bulyan(m: int, f: int, d: int) -> None:
    x = updates_of(m, f, d)
    expected = bulyan_by_definition(x.astype(np.float64), f)
    np.testing.assert_allclose(run(Bulyan(num_byzantine=f), x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", ["numpy", "torch"])
@pytest.mark.parametrize(("m", "f", "d"), [*SIZES, (10, 4, 40), (6, 1, 2000)])
def test_mean_around_median(m: int, f: int, d: int, kernel: str) -> None:
    x = updates_of(m, f, d, ties=True)
    expected = mean_around_median_by_definition(x.astype(np.float64), m - f)
    with use_kernel(kernel):
        got = run(MeanAroundMedian(num_byzantine=f), x)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


def objective(z: np.ndarray, x: np.ndarray, weights: np.ndarray) -> float:
    return sum(w * math.sqrt(((row - z) ** 2).sum()) for w, row in zip(weights, x, strict=True))


def smoothed_weiszfeld(x: np.ndarray, weights: np.ndarray, nu: float, steps: int) -> np.ndarray:
    """Pillutla et al. 2022, algorithm 2, with the weighted mean to start from."""
    z = weights @ x
    for _ in range(steps):
        beta = [
            w / max(nu, math.sqrt(((row - z) ** 2).sum()))
            for w, row in zip(weights, x, strict=True)
        ]
        z = sum(b * row for b, row in zip(beta, x, strict=True)) / sum(beta)
    return z


@pytest.mark.parametrize(("m", "f", "d"), SIZES)
@pytest.mark.parametrize("steps", [1, 3])
def test_rfa_is_a_few_steps_of_smoothed_weiszfeld(m: int, f: int, d: int, steps: int) -> None:
    x = updates_of(m, f, d, outliers=1e3)
    sizes = np.random.default_rng(0).integers(1, 900, size=m)
    expected = smoothed_weiszfeld(x.astype(np.float64), sizes / sizes.sum(), 1e-6, steps)
    got = run(GeometricMedian(max_iterations=steps, tolerance=0.0), x, sizes)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("m", "f", "d"), SIZES[:-1])
def test_geometric_median_is_a_minimum(m: int, f: int, d: int) -> None:
    x = updates_of(m, f, d, outliers=1e3)
    sizes = np.random.default_rng(0).integers(1, 900, size=m)
    wide, weights = x.astype(np.float64), sizes / sizes.sum()
    got = run(GeometricMedian(), x, sizes).astype(np.float64)
    best = objective(smoothed_weiszfeld(wide, weights, 1e-6, 1000), wide, weights)
    assert objective(got, wide, weights) <= best * (1 + 1e-7)


def smallest_cost(x: np.ndarray, weights: np.ndarray) -> float:
    """The cost of the best client, or of where Weiszfeld's algorithm comes to rest."""
    z = weights @ x + 1e-6 * np.abs(x).max() * np.random.default_rng(0).normal(size=x.shape[1])
    for _ in range(5000):
        w = weights / np.maximum(np.linalg.norm(x - z, axis=1), 1e-300)
        z = w @ x / w.sum()
    return min(objective(y, x, weights) for y in [z, *x])


ODD_POINTS = {
    "tiny": lambda x, rng: 1e-12 * x,
    "huge": lambda x, rng: 1e12 * x,
    "far": lambda x, rng: 1e4 + 0.1 * x,
    "equal": lambda x, rng: x[rng.integers(0, len(x), size=len(x))],
    "on a line": lambda x, rng: x[:, :1] * x[0],
    "outliers": lambda x, rng: np.concatenate([x, 1e9 * x[: len(x) // 2]]),
    "close majority": lambda x, rng: np.concatenate([1e-6 * x, x[: len(x) // 2]]),
    "half at one point": lambda x, rng: np.concatenate([0 * x, 1e9 * x]) + x[0],
}


@pytest.mark.parametrize("kind", ODD_POINTS)
def test_geometric_median_of_odd_points(kind: str) -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        m, d = int(rng.integers(3, 30)), int(rng.integers(1, 40))
        x = ODD_POINTS[kind](rng.normal(size=(m, d)), rng).astype(np.float32)
        wide, weights = x.astype(np.float64), np.full(len(x), 1 / len(x))
        got = run(GeometricMedian(), x).astype(np.float64)
        # The result is rounded to float32, by 5e-4 in 1e4.
        rounding = math.sqrt(d) * np.abs(np.median(wide, axis=0)).max() * 2.0**-24
        best = smallest_cost(wide - wide[0], weights)
        assert objective(got, wide, weights) <= best * (1 + 1e-6) + rounding


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("max_norm", [0.5, 100.0, "median"])
def test_norm_clipping(max_norm: float | str, weighted: bool) -> None:
    """Sun et al. 2019, section 4: the mean of w_k / max(1, |w_k| / M)."""
    x = updates_of(12, 3, 900)
    sizes = np.random.default_rng(0).integers(1, 900, size=12)
    norms = [math.sqrt((row.astype(np.float64) ** 2).sum()) for row in x]
    bound = np.median(norms) if max_norm == "median" else max_norm
    clipped = [row / max(1, norm / bound) for row, norm in zip(x, norms, strict=True)]
    expected = np.average(clipped, axis=0, weights=sizes if weighted else None)
    rule = NormClipping(max_norm=max_norm, weighted=weighted)  # type: ignore[arg-type]
    np.testing.assert_allclose(run(rule, x, sizes), expected, rtol=1e-5, atol=1e-6)


def dnc_by_definition(
    x: np.ndarray, coordinates: list[np.ndarray], num_good: int
) -> tuple[np.ndarray, set[int]]:
    """Shejwalkar and Houmansadr 2021, algorithm 2."""
    good = set(range(len(x)))
    for some in coordinates:
        centered = x[:, some] - x[:, some].mean(axis=0)
        v = np.linalg.svd(centered, full_matrices=False)[2][0]
        scores = [float(row @ v) ** 2 for row in centered]
        good &= set(np.argsort(scores)[:num_good].tolist())
    return x[sorted(good)].mean(axis=0), good


@pytest.mark.parametrize(("m", "f", "d"), SIZES)
@pytest.mark.parametrize(("c", "iterations"), [(1.0, 1), (1.5, 3)])
def test_dnc(m: int, f: int, d: int, c: float, iterations: int) -> None:
    x = updates_of(m, f, d)
    b = max(d // 2, 1)
    generator = torch_generator(0, "DnC", 0)
    coordinates = [
        torch.randperm(d, generator=generator)[:b].numpy() if b < d else np.arange(d)
        for _ in range(iterations)
    ]
    expected, good = dnc_by_definition(
        x.astype(np.float64), coordinates, math.floor(m - round(10 * c) * f / 10)
    )
    assert good
    rule = DnC(num_byzantine=f, filter_factor=c, num_coordinates=b, iterations=iterations)
    np.testing.assert_allclose(run(rule, x), expected, rtol=1e-5, atol=1e-6)


def caf_by_definition(x: np.ndarray, f: int) -> np.ndarray:
    """Allouah et al. 2025, algorithm 2, with the covariance matrix itself."""
    c = np.ones(len(x))
    smallest, best = math.inf, x.mean(axis=0)
    for _ in range(2 * f):
        mu = c @ x / c.sum()
        covariance = sum(w * np.outer(row - mu, row - mu) for w, row in zip(c, x, strict=True))
        values, vectors = np.linalg.eigh(covariance / c.sum())
        if values[-1] < smallest:
            smallest, best = values[-1], mu
        tau = np.array([float(vectors[:, -1] @ (row - mu)) ** 2 for row in x])
        c = np.where(c > 0, c * (1 - tau / tau[c > 0].max()), 0)
        if c.sum() <= len(x) - 2 * f:
            break
    return best


@pytest.mark.parametrize(("m", "f", "d"), [size for size in SIZES if size[2] <= 700])
def test_caf(m: int, f: int, d: int) -> None:
    x = updates_of(m, f, min(d, 60))
    expected = caf_by_definition(x.astype(np.float64), f)
    np.testing.assert_allclose(run(CAF(num_byzantine=f), x), expected, rtol=1e-5, atol=1e-6)


def caf_by_multiplicity(x: np.ndarray, f: int) -> np.ndarray:
    """The same, with equal rows as one point that weighs as much as they do together."""
    points, counts = np.unique(x, axis=0, return_counts=True)
    c = np.ones(len(points))
    smallest, best = math.inf, x.mean(axis=0)
    while (c * counts).sum() > len(x) - 2 * f:
        shares = c * counts / (c * counts).sum()
        mu = shares @ points
        # The right singular vectors are the eigenvectors of the covariance.
        _, s, v = np.linalg.svd(np.sqrt(shares)[:, None] * (points - mu), full_matrices=False)
        if s[0] ** 2 < smallest:
            smallest, best = s[0] ** 2, mu
        tau = ((points - mu) @ v[0]) ** 2
        if tau[c > 0].max() < 1e-20 * (points**2).max():
            break
        c = np.where(c > 0, c * np.maximum(0, 1 - tau / tau[c > 0].max()), 0)
    return best


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("distance", [0.8, 3.0, 100.0])
def test_caf_with_equal_attackers(distance: float, scale: float) -> None:
    rng = np.random.default_rng(int(distance))
    for _ in range(15):
        m, d = int(rng.integers(6, 90)), int(rng.integers(1, 60))
        f = int(rng.integers(1, (m + 1) // 2))
        x = rng.normal(size=(m, d))
        x[rng.permutation(m)[:f]] = distance * rng.normal(size=d)
        x = (scale * (x + 2)).astype(np.float32)
        expected = caf_by_multiplicity(x.astype(np.float64), f)
        np.testing.assert_allclose(
            run(CAF(num_byzantine=f), x), expected, atol=2e-6 * np.linalg.norm(expected), rtol=0
        )


MOVABLE = [
    Krum(num_byzantine=2),
    MultiKrum(num_byzantine=2),
    Bulyan(num_byzantine=2),
    MeanAroundMedian(num_byzantine=2),
    GeometricMedian(),
    DnC(num_byzantine=2, num_coordinates=20),
    CAF(num_byzantine=2),
]


@pytest.mark.parametrize("rule", MOVABLE, ids=lambda rule: type(rule).__name__)
def test_moves_and_scales_with_the_updates(rule: Aggregator) -> None:
    x = torch.from_numpy(updates_of(13, 2, 50)).double()
    shift = torch.linspace(-3, 5, 50, dtype=torch.float64)
    torch.testing.assert_close(rule(x + shift), rule(x) + shift, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(rule(-4 * x), -4 * rule(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", MOVABLE, ids=lambda rule: type(rule).__name__)
def test_order_of_rows_does_not_matter(rule: Aggregator) -> None:
    x = torch.from_numpy(updates_of(13, 2, 50))
    order = torch.randperm(13, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(rule(x[order]), rule(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "rule",
    [*MOVABLE, NormClipping(max_norm="median")],
    ids=lambda rule: type(rule).__name__,
)
@pytest.mark.parametrize("size", [1e9, 1e30])
def test_two_huge_updates_leave_it_near_the_benign_mean(rule: Aggregator, size: float) -> None:
    x = torch.from_numpy(updates_of(13, 2, 50))
    x[0], x[5] = size, -0.7 * size
    benign = x[[i for i in range(13) if i not in (0, 5)]]
    spread = (benign - benign.mean(dim=0)).norm(dim=1).max()
    assert (rule(x) - benign.mean(dim=0)).norm() <= spread
