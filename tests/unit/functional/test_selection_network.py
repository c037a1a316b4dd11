from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedrec.functional.kernels.selection_network import GROUP, SORT_GROUP, selection_network


def through(comparators: list[tuple[int, int]], rows: np.ndarray, first: int = 0) -> None:
    for i, j in comparators:
        a, b = rows[first + i].copy(), rows[first + j].copy()
        rows[first + i], rows[first + j] = np.minimum(a, b), np.maximum(a, b)


def select(values: np.ndarray, k: int) -> np.ndarray:
    """Return the rows in between, as the kernel gets them."""
    rows = values.copy()
    for first in range(0, len(rows) // GROUP * GROUP, GROUP):
        through(list(SORT_GROUP), rows, first)
    network, kept = selection_network(len(rows), k)
    through(network, rows)
    return rows[kept]


def all_zeros_and_ones(m: int) -> np.ndarray:
    return (np.arange(2**m) >> np.arange(m)[:, None] & 1).astype(np.int8)


def test_a_group_is_sorted() -> None:
    # What sorts all zeros and ones sorts everything (Knuth, 5.3.4, theorem Z).
    rows = all_zeros_and_ones(GROUP)
    through(list(SORT_GROUP), rows)
    assert (np.diff(rows, axis=0) >= 0).all()
    assert len(SORT_GROUP) == 60


@pytest.mark.parametrize("m", range(1, 18))
def test_every_input_of_zeros_and_ones_is_selected_right(m: int) -> None:
    values = all_zeros_and_ones(m)
    ones = values.sum(axis=0, dtype=int)
    for k in range((m + 1) // 2):
        kept = select(values, k)
        assert len(kept) == m - 2 * k
        # Of `ones` ones the largest k are trimmed; what is left holds at most m - 2k.
        expected = np.clip(ones - k, 0, m - 2 * k)
        np.testing.assert_array_equal(kept.sum(axis=0, dtype=int), expected)


@pytest.mark.parametrize("m", [*range(18, 41), 64, 80, 99, 100, 101, 130, 257])
def test_random_values_of_larger_cohorts(m: int) -> None:
    values = np.random.default_rng(m).standard_normal((m, 40))
    ordered = np.sort(values, axis=0)
    for k in {0, 1, m // 5, m // 4, m // 3, (m - 1) // 2}:
        np.testing.assert_array_equal(np.sort(select(values, k), axis=0), ordered[k : m - k])


def test_all_orders_of_six_values() -> None:
    values = np.array(list(itertools.permutations(range(6)))).T
    for k in range(3):
        expected = np.arange(k, 6 - k)[:, None].repeat(values.shape[1], axis=1)
        np.testing.assert_array_equal(np.sort(select(values, k), axis=0), expected)


def test_needless_comparators_are_left_out() -> None:
    # 100 values are sorted with 1077 comparators; six groups of 16 are sorted with 360 beforehand.
    assert len(selection_network(100, 20)[0]) + 6 * 60 == 794
    assert len(selection_network(100, 49)[0]) + 6 * 60 == 868
    # Nothing is trimmed: nothing has to be compared.
    assert selection_network(100, 0) == ([], list(range(100)))
