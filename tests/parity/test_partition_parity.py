"""The partition by degree of non-iid against the probabilities of Fang et al. (2020), section 4."""

from __future__ import annotations

import numpy as np
import pytest

from fedrec.data import DegreeOfNonIID


def group_probabilities(q: float, num_labels: int) -> np.ndarray:
    """Row y: where a sample of label y goes, q for group y and (1 - q) / (L - 1) for the others."""
    table = np.empty((num_labels, num_labels), dtype=np.float64)
    for y in range(num_labels):
        for group in range(num_labels):
            table[y, group] = q if group == y else (1.0 - q) / (num_labels - 1)
    return table


def counts(q: float, per_label: int, num_labels: int, num_clients: int, seed: int) -> np.ndarray:
    """How many samples of each label each client got, (n, L)."""
    labels = np.repeat(np.arange(num_labels), per_label)
    parts = DegreeOfNonIID(q=q)(labels, num_clients, np.random.default_rng(seed))
    return np.stack([np.bincount(labels[part], minlength=num_labels) for part in parts])


@pytest.mark.parametrize("q", [0.1, 0.3, 0.5, 0.95])
@pytest.mark.parametrize(("num_labels", "num_clients"), [(4, 4), (4, 12), (10, 20), (4, 6)])
def test_every_count_is_binomial_with_the_papers_probability(
    q: float, num_labels: int, num_clients: int
) -> None:
    per_label = 6000
    found = counts(q, per_label, num_labels, num_clients, seed=1)
    assert found.sum() == per_label * num_labels

    # Groups as equal as possible, the first ones larger. Which client is in which group is random:
    # find it from the data, then check every single count.
    sizes = [num_clients // num_labels + (g < num_clients % num_labels) for g in range(num_labels)]
    groups = group_probabilities(q, num_labels)
    expected = np.array([groups[:, g] / sizes[g] for g in range(num_labels)])  # (groups, labels)
    deviation = np.sqrt(per_label * expected * (1 - expected))
    scores = np.abs(found[:, None, :] - per_label * expected) / deviation  # (n, groups, labels)
    worst = scores.max(axis=2)
    group = worst.argmin(axis=1)
    # At most 20 * 10 counts: beyond 5 standard deviations with probability about 1e-4.
    assert worst.min(axis=1).max() < 5
    if q != 1 / num_labels:
        assert np.bincount(group, minlength=num_labels).tolist() == sizes


def test_one_over_l_is_iid() -> None:
    """Every client draws every label alike: Pearson's statistic is chi-squared."""
    per_label, num_labels, num_clients = 4000, 10, 20
    found = counts(1 / num_labels, per_label, num_labels, num_clients, seed=2)
    expected = per_label / num_clients
    statistic = ((found - expected) ** 2 / expected).sum()
    freedom = num_labels * (num_clients - 1)
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


def test_clients_are_permuted_uniformly() -> None:
    """With n = L = 3 and q = 1, each of the 6 assignments comes up in a sixth of the seeds."""
    orders = [tuple(counts(1.0, 5, 3, 3, seed).argmax(axis=1).tolist()) for seed in range(600)]
    frequency = {order: orders.count(order) for order in set(orders)}
    assert len(frequency) == 6
    deviation = np.sqrt(600 * (1 / 6) * (5 / 6))
    assert all(abs(count - 100) < 5 * deviation for count in frequency.values())


def test_samples_of_one_label_are_interchangeable() -> None:
    """Where a sample goes depends on its label, not on its place: halves of a label fare alike."""
    labels = np.repeat(np.arange(2), 4000)
    parts = DegreeOfNonIID(q=0.8)(labels, 2, np.random.default_rng(3))
    home = parts[0] if (labels[parts[0]] == 0).mean() > 0.5 else parts[1]
    first_half = (home < 2000).sum()
    second_half = ((home >= 2000) & (home < 4000)).sum()
    deviation = np.sqrt(2000 * 0.8 * 0.2)
    assert abs(first_half - 1600) < 5 * deviation
    assert abs(second_half - 1600) < 5 * deviation
