from __future__ import annotations

import torch

from fedrec.aggregators import Krum
from fedrec.functional import krum_scores, pairwise_squared_distances


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def test_by_hand() -> None:
    # m - f - 2 = 4 neighbours. Of 6: 4 + 9 + 16 + 25 = 54; of 8: 1 + 4 + 4 + 49 = 58.
    # Five neighbours give 9, distances that are not squared 8, and itself as a neighbour 8.
    x = column(1, 6, 8, 9, 10, 18, 23)
    scores = krum_scores(pairwise_squared_distances(x), num_byzantine=1)
    assert scores.tolist() == [219, 54, 58, 75, 85, 270, 615]
    assert Krum(num_byzantine=1)(x).tolist() == [6]


def test_a_client_with_a_twin_is_no_neighbour_of_itself() -> None:
    # Two neighbours: 0 + 1, 0 + 1, 1 + 1, 4 + 9, 49 + 81.
    scores = krum_scores(pairwise_squared_distances(column(0, 0, 1, 3, 10)), num_byzantine=1)
    assert scores.tolist() == [1, 1, 2, 13, 130]


def test_large_updates_do_not_hide_who_is_near() -> None:
    # In float32, all products of 1e4 are equal, and the zero distance to itself is one of many.
    x = 1e4 + column(0, 1, 2.5, 3, 20)
    assert Krum(num_byzantine=1)(x).tolist() == [1e4 + 2.5]


def test_of_equal_scores_the_first_row() -> None:
    assert Krum(num_byzantine=0)(column(0, 1, 5)).tolist() == [0]
    assert Krum(num_byzantine=0)(column(5, 1, 0)).tolist() == [1]


def test_the_result_is_an_update_to_the_last_bit_in_its_own_memory() -> None:
    x = torch.randn(9, 500, generator=torch.Generator().manual_seed(0))
    result = Krum(num_byzantine=2)(x)
    assert sum(torch.equal(result, row) for row in x) == 1
    assert result.data_ptr() not in [row.data_ptr() for row in x]
