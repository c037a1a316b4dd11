from __future__ import annotations

import pytest
import torch

from fedrec.aggregators import CenteredClipping
from fedrec.exceptions import ConfigurationError


@pytest.mark.parametrize("kwargs", [{"tau": 0.0}, {"tau": -1.0}, {"tau": 1.0, "iterations": 0}])
def test_bad_arguments_are_named(kwargs: dict) -> None:
    with pytest.raises(ConfigurationError, match=r"Expected `(tau|iterations)`"):
        CenteredClipping(**kwargs)


def test_no_client_moves_the_centre_by_more_than_its_share_of_the_radius() -> None:
    x = torch.zeros(4, 3)
    x[0] = torch.tensor([0.0, 1e30, 0.0])
    assert CenteredClipping(tau=2.0)(x).tolist() == [0.0, 0.5, 0.0]
    # From 0.5, the three others pull back by 0.5 each.
    assert CenteredClipping(tau=2.0, iterations=2)(x).tolist() == [0.0, 0.625, 0.0]


def test_extreme_values_stay_finite() -> None:
    x = torch.full((4, 2), 3e38)
    x[0] = -x[0]
    rule = CenteredClipping(tau=1.0)
    for _ in range(3):
        assert torch.isfinite(rule(x)).all()


def test_memory_is_not_the_tensor_that_was_returned() -> None:
    rule, x = CenteredClipping(tau=10.0), torch.ones(3, 2)
    assert rule.state_dict() == {"centre": None}
    rule(x).zero_()
    assert torch.equal(rule.state_dict()["centre"], torch.ones(2))


def test_works_in_inference_mode() -> None:
    with torch.inference_mode():
        assert CenteredClipping(tau=10.0)(torch.ones(3, 2)).tolist() == [1.0, 1.0]
