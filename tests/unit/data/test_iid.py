from __future__ import annotations

import numpy as np
import pytest

from fedrec.data import IIDPartitioner


@pytest.mark.parametrize(("num_samples", "num_clients"), [(10, 4), (100, 100), (7, 1), (23, 5)])
def test_sizes_differ_by_at_most_one(num_samples: int, num_clients: int) -> None:
    labels = np.zeros(num_samples, dtype=int)
    sizes = [len(p) for p in IIDPartitioner()(labels, num_clients, np.random.default_rng(0))]
    assert sum(sizes) == num_samples
    assert set(sizes) <= {num_samples // num_clients, -(-num_samples // num_clients)}


def test_samples_are_shuffled() -> None:
    parts = IIDPartitioner()(np.zeros(100, dtype=int), 2, np.random.default_rng(0))
    # Unshuffled, the first client would hold 0..49, all below 50; 25 are expected.
    assert 15 <= (parts[0] < 50).sum() <= 35


def test_labels_are_spread_evenly() -> None:
    labels = np.repeat(np.arange(10), 1000)
    for part in IIDPartitioner()(labels, 10, np.random.default_rng(0)):
        counts = np.bincount(labels[part], minlength=10)
        # Hypergeometric with mean 100 and standard deviation 9.
        assert np.all(np.abs(counts - 100) < 45)


def test_repr_and_spec() -> None:
    assert repr(IIDPartitioner()) == "IIDPartitioner()"
    assert IIDPartitioner().spec()["init_args"] == {}
