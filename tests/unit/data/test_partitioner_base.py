from __future__ import annotations

import numpy as np
import pytest

from fedrec.data import Partitioner
from fedrec.exceptions import ConfigurationError, ShapeError

LABELS = np.array([0, 1, 0, 1, 0, 1])


class Fixed(Partitioner):
    """Returns the parts it was given."""

    def __init__(self, parts: list[list[int]]) -> None:
        self.parts = parts

    def split(self, labels, num_clients, generator):
        return [np.array(part, dtype=int) for part in self.parts]


def call(parts: list[list[int]], num_clients: int = 2, labels: np.ndarray = LABELS):
    return Fixed(parts)(labels, num_clients, np.random.default_rng(0))


def test_indices_come_sorted() -> None:
    parts = call([[5, 0, 3], [4, 2, 1]])
    assert [part.tolist() for part in parts] == [[0, 3, 5], [1, 2, 4]]
    assert all(part.dtype == np.int64 for part in parts)


class Sorts(Partitioner):
    """Sorts the labels that it is given, in place."""

    def split(self, labels, num_clients, generator):
        labels.sort()
        return np.array_split(np.arange(len(labels)), num_clients)


def test_labels_of_the_data_stay_as_they_are() -> None:
    labels = LABELS.copy()
    assert [p.tolist() for p in Sorts()(labels, 2, np.random.default_rng(0))] == [
        [0, 1, 2],
        [3, 4, 5],
    ]
    assert labels.tolist() == [0, 1, 0, 1, 0, 1]


def test_lost_samples_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="each of 6 samples to exactly one client"):
        call([[0, 1], [2, 3]])


def test_repeated_samples_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="lost or repeated"):
        call([[0, 1, 2, 3], [3, 4, 5]])


def test_another_number_of_parts_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="to return 2 parts, but got 3"):
        call([[0, 1], [2, 3], [4, 5]])


def test_empty_clients_are_counted_and_a_way_out_is_given() -> None:
    with pytest.raises(ConfigurationError, match=r"left 2 of 4 clients .* HINT: lower `num_cl"):
        call([[0, 1, 2], [], [3, 4, 5], []], num_clients=4)


def test_more_clients_than_samples() -> None:
    with pytest.raises(ConfigurationError, match="Cannot split 6 samples over 7 clients"):
        call([], num_clients=7)


def test_number_of_clients_is_positive() -> None:
    with pytest.raises(ConfigurationError, match="num_clients"):
        call([], num_clients=0)


@pytest.mark.parametrize("labels", [LABELS.astype(float), LABELS.reshape(2, 3)])
def test_labels_are_a_vector_of_integers(labels: np.ndarray) -> None:
    with pytest.raises(ShapeError, match=r"integers of shape \(N,\)"):
        call([], labels=labels)
