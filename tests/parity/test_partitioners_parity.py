"""Dirichlet partitions against the moments that their papers' distributions have."""

from __future__ import annotations

import numpy as np
import pytest

from fedrec.data import Dirichlet, QuantitySkew


def shares(partitioner, labels: np.ndarray, num_clients: int, draws: int) -> np.ndarray:
    """Counts of every label of every client, over many seeds, (draws, n, L)."""
    found = []
    for seed in range(draws):
        parts = partitioner(labels, num_clients, np.random.default_rng(seed))
        found.append([np.bincount(labels[p], minlength=labels.max() + 1) for p in parts])
    return np.array(found, dtype=np.float64)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 5.0])
def test_by_label_shares_have_dirichlet_moments(alpha: float) -> None:
    """Yurochkin et al.: p_l ~ Dir_n(alpha); each share is Beta(alpha, (n-1) alpha)."""
    n, size, draws = 4, 2000, 400
    labels = np.repeat(np.arange(3), size)
    p = shares(Dirichlet(alpha=alpha, min_samples=0), labels, n, draws) / size
    samples = p.transpose(1, 0, 2).reshape(n, -1)  # (n, draws * L)
    count = samples.shape[1]
    variance = (1 / n) * (1 - 1 / n) / (n * alpha + 1)
    np.testing.assert_allclose(samples.mean(axis=1), 1 / n, atol=5 * np.sqrt(variance / count))
    assert samples.var(axis=1) == pytest.approx(np.full(n, variance), rel=0.25)
    # Two clients' shares of one label compete: covariance -a_i a_j / (a^2 (a + 1)).
    covariance = np.cov(samples)[0, 1]
    assert covariance == pytest.approx(-(1 / n**2) / (n * alpha + 1), rel=0.35)


@pytest.mark.parametrize("alpha", [0.5, 4.0])
def test_balanced_counts_are_dirichlet_multinomial(alpha: float) -> None:
    """Hsu et al.: q ~ Dir(alpha p), m samples from q; exact for the first client, by its moments.

    A count is beta-binomial: mean m p, variance m p (1-p) (alpha + m) / (alpha + 1). Labels have
    to be plentiful, so that none runs out.
    """
    m, draws = 20, 400
    frequencies = np.array([0.5, 0.25, 0.25])
    labels = np.repeat(np.arange(3), (frequencies * 20 * m).astype(int))
    partitioner = Dirichlet(alpha=alpha, balanced=True)
    first = []
    for seed in range(draws):
        part = partitioner(labels, 20, np.random.default_rng(seed))[0]
        first.append(np.bincount(labels[part], minlength=3))
    found = np.array(first, dtype=np.float64)
    variance = m * frequencies * (1 - frequencies) * (alpha + m) / (alpha + 1)
    deviation = np.sqrt(variance / draws)
    assert (abs(found.mean(axis=0) - m * frequencies) < 5 * deviation).all()
    assert found.var(axis=0) == pytest.approx(variance, rel=0.25)


def test_skewed_sizes_have_dirichlet_moments() -> None:
    n, total, alpha, draws = 5, 1000, 0.5, 1000
    partitioner = QuantitySkew(alpha=alpha, min_samples=0)
    labels = np.zeros(total, dtype=int)
    p = shares(partitioner, labels, n, draws)[:, :, 0] / total
    variance = (1 / n) * (1 - 1 / n) / (n * alpha + 1)
    np.testing.assert_allclose(p.mean(axis=0), 1 / n, atol=5 * np.sqrt(variance / draws))
    assert p.var(axis=0) == pytest.approx(np.full(n, variance), rel=0.2)
