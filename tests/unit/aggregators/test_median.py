from __future__ import annotations

import pytest
import torch

from fedrec.aggregators import Median


def test_each_coordinate_has_its_own_median() -> None:
    x = torch.tensor([[1.0, 9.0, 5.0], [2.0, 8.0, 4.0], [3.0, 7.0, -1e9]])
    assert Median()(x).tolist() == [2.0, 8.0, 4.0]


def test_client_weights_are_ignored() -> None:
    x = torch.tensor([[1.0], [2.0], [4.0]])
    assert Median()(x, torch.tensor([1, 1, 1000])).tolist() == [2.0]


@pytest.mark.parametrize(("m", "f"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (100, 49)])
def test_withstands_any_minority(m: int, f: int) -> None:
    assert Median().max_byzantine(m) == f
    x = torch.zeros(m, 1)
    x[:f] = 1e9
    assert Median()(x).item() == 0.0
    # One more can move the result away, so the claim is tight.
    x[: f + 1] = 1e9
    assert Median()(x).item() > 0
