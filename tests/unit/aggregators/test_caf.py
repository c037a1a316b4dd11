from __future__ import annotations

import torch

from fedrec.aggregators import CAF


def test_by_hand() -> None:
    # The mean is 23.25. Relative to 90, which is furthest, the others are off by 23.25, 22.25 and
    # 21.25 of 66.75. What is left after that varies least: another pass would leave too little.
    x = torch.tensor([[0.0], [1.0], [2.0], [90.0]], dtype=torch.float64)
    c = [1 - (off / 66.75) ** 2 for off in (23.25, 22.25, 21.25)]
    expected = (c[1] + 2 * c[2]) / sum(c)
    torch.testing.assert_close(CAF(num_byzantine=1)(x), torch.tensor([expected]).double())


def test_without_malicious_clients_it_is_the_mean() -> None:
    x = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(CAF(num_byzantine=0)(x), x.mean(dim=0))


def test_a_client_that_is_out_does_not_slow_down_the_rest() -> None:
    # Were the far client still the measure of distance, the others would keep their weights.
    x = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0], [1e6]], dtype=torch.float64)
    # Then 0 and 4 go, then 1 and 3 would: the weights before that are 0.75, 1, 0.75.
    torch.testing.assert_close(
        CAF(num_byzantine=2)(x), torch.tensor([2.0]).double(), rtol=0, atol=1e-4
    )


def test_only_the_direction_of_the_outliers_matters() -> None:
    # Nine clients vary along the first axis, one is off along the second.
    x = torch.zeros(10, 2)
    x[:9, 0] = torch.linspace(-1, 1, 9)
    x[9, 1] = 30
    torch.testing.assert_close(CAF(num_byzantine=1)(x), torch.zeros(2), rtol=0, atol=1e-5)


def test_equal_updates() -> None:
    assert CAF(num_byzantine=2)(torch.full((7, 3), 2.0)).tolist() == [2.0, 2.0, 2.0]
