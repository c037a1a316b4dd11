from __future__ import annotations

import torch

from fedrec.aggregators import MultiKrum


def test_by_hand() -> None:
    # Scores over 3 neighbours: 21, 11, 9, 22, 35, 33, 105. The five lowest are averaged at once;
    # scored anew after every pick, 7 would be taken instead of 8.
    x = torch.tensor([[0.0], [1.0], [2.0], [4.0], [7.0], [8.0], [12.0]])
    assert MultiKrum(num_byzantine=2)(x).tolist() == [(0 + 1 + 2 + 4 + 8) / 5]


def test_of_equal_scores_the_earlier_rows() -> None:
    # Over 2 neighbours: 80, 32, 32, 32, 80. Four are averaged, one of the two at the ends.
    x = torch.tensor([[0.0], [4.0], [8.0], [12.0], [16.0]])
    assert MultiKrum(num_byzantine=1)(x).tolist() == [(0 + 4 + 8 + 12) / 4]
    assert MultiKrum(num_byzantine=1)(x.flip(0)).tolist() == [(16 + 12 + 8 + 4) / 4]


def test_without_malicious_clients_it_is_the_mean() -> None:
    x = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(MultiKrum(num_byzantine=0)(x), x.mean(dim=0))
