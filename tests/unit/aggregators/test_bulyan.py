from __future__ import annotations

import torch

from fedrec.aggregators import Bulyan
from fedrec.functional import bulyan_selection, pairwise_squared_distances

# Among seven, over 4 neighbours: 46, 27, 18, 23, 30, 74, 8294: 2.
# Among 0 1 4 5 7 50, over 3: 42, 26, 19, 21, 49, ...: 4.
# Among 0 1 5 7 50, over 2: 26, 17, 20, 40, ...: 1.
# Among 0 5 7 50, over 1: 25, 4, 4, ...: 5 and 7 are each other's nearest, 5 is nearer to the next.
# Among 0 7 50, over 1: 49, 49, ...: again, and 7 is nearer to the next.
VALUES = [0.0, 1.0, 2.0, 4.0, 5.0, 7.0, 50.0]


def test_selection_by_hand() -> None:
    x = torch.tensor(VALUES)[:, None]
    picked = bulyan_selection(pairwise_squared_distances(x), num_byzantine=1)
    assert x[picked, 0].tolist() == [1, 2, 4, 5, 7]


def test_by_hand() -> None:
    # Nearest to the median 4 of what was picked: 4, 5 and 2.
    x = torch.tensor(VALUES)[:, None]
    torch.testing.assert_close(Bulyan(num_byzantine=1)(x), torch.tensor([11 / 3]))


def test_each_coordinate_has_its_own_median() -> None:
    x = torch.tensor(VALUES)[:, None]
    both = Bulyan(num_byzantine=1)(torch.cat([x, -2 * x], dim=1))
    torch.testing.assert_close(both, torch.tensor([11 / 3, -22 / 3]))


def test_mutual_neighbours_do_not_depend_on_the_order_of_rows() -> None:
    x = torch.tensor(VALUES)[:, None]
    for seed in range(20):
        order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
        picked = bulyan_selection(pairwise_squared_distances(x[order]), num_byzantine=1)
        assert sorted(x[order][picked, 0].tolist()) == [1, 2, 4, 5, 7]


def test_without_malicious_clients_it_is_the_mean() -> None:
    x = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(Bulyan(num_byzantine=0)(x), x.mean(dim=0))
