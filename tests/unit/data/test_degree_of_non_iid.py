from __future__ import annotations

import numpy as np
import pytest

from fedrec.data import DegreeOfNonIID
from fedrec.exceptions import ConfigurationError


def split(q: float, labels: np.ndarray, num_clients: int, seed: int = 0) -> list[np.ndarray]:
    return DegreeOfNonIID(q=q)(labels, num_clients, np.random.default_rng(seed))


def test_at_one_every_client_holds_a_single_label() -> None:
    labels = np.repeat(np.arange(5), 200)
    held = [np.unique(labels[part]).tolist() for part in split(1.0, labels, 10)]
    assert sorted(held) == [[0], [0], [1], [1], [2], [2], [3], [3], [4], [4]]


def test_at_zero_two_labels_swap_groups() -> None:
    labels = np.repeat([0, 1], 100)
    held = [np.unique(labels[part]).tolist() for part in split(0.0, labels, 2)]
    assert sorted(held) == [[0], [1]]


def test_at_zero_no_client_holds_its_groups_label() -> None:
    labels = np.repeat(np.arange(3), 300)
    for part in split(0.0, labels, 6):
        assert len(np.unique(labels[part])) == 2


def test_remaining_clients_join_the_groups_of_the_smallest_labels() -> None:
    labels = np.repeat([3, 5, 9], 200)
    held = [int(labels[part][0]) for part in split(1.0, labels, 8)]
    assert np.bincount(held)[[3, 5, 9]].tolist() == [3, 3, 2]


def test_which_client_belongs_to_which_group_is_random() -> None:
    labels = np.repeat(np.arange(4), 50)
    orders = {tuple(labels[p[0]] for p in split(1.0, labels, 4, seed)) for seed in range(20)}
    assert len(orders) > 5  # of 24 permutations


def test_a_single_label_is_one_group() -> None:
    parts = split(0.3, np.full(100, 7), 4)
    assert sorted(np.concatenate(parts).tolist()) == list(range(100))


def test_fewer_clients_than_labels() -> None:
    with pytest.raises(
        ConfigurationError, match=r"10 groups, one per label, of 9 .* HINT: use at least 10 cl"
    ):
        split(0.5, np.arange(100) % 10, 9)


def test_too_few_samples_leave_clients_empty_and_say_so() -> None:
    # 12 samples, all of one label, fall on 12 of 12 clients with probability 12!/12^12 = 5e-5.
    with pytest.raises(ConfigurationError, match=r"DegreeOfNonIID\(q=1.0\) left \d of 12 clients"):
        split(1.0, np.zeros(12, dtype=int), 12)


@pytest.mark.parametrize("q", [-0.1, 1.1, float("nan"), "half", True])
def test_q_is_a_probability(q: object) -> None:
    with pytest.raises(ConfigurationError, match=r"Expected `q` to be a finite number in \[0, 1\]"):
        DegreeOfNonIID(q=q)  # type: ignore[arg-type]
