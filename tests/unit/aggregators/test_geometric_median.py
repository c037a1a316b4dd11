from __future__ import annotations

import math

import pytest
import torch

from fedrec.aggregators import GeometricMedian
from fedrec.exceptions import ConfigurationError


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("smoothing", 0.0),
        ("smoothing", -1e-6),
        ("tolerance", -1.0),
        ("tolerance", float("nan")),
        ("max_iterations", 0),
        ("max_iterations", 2.5),
        ("weighted", "yes"),
    ],
)
def test_bad_arguments_are_named(argument: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"Expected `{argument}` to be"):
        GeometricMedian(**{argument: value})  # type: ignore[arg-type]


def test_of_a_line_it_is_the_median() -> None:
    x = torch.tensor([[0.0], [1.0], [2.0], [50.0], [100.0]])
    torch.testing.assert_close(GeometricMedian()(x), torch.tensor([2.0]))


def test_fermat_point_of_a_triangle() -> None:
    # All three sides are seen under 120 degrees from (1/sqrt(3), 0) on the axis of symmetry.
    x = torch.tensor([[0.0, 1.0], [0.0, -1.0], [4.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor([1 / math.sqrt(3), 0.0], dtype=torch.float64)
    torch.testing.assert_close(GeometricMedian()(x), expected, rtol=0, atol=1e-7)


def test_far_from_the_origin() -> None:
    x = 1e4 + torch.tensor([[0.0, 1.0], [0.0, -1.0], [4.0, 0.0]], dtype=torch.float64)
    expected = 1e4 + torch.tensor([1 / math.sqrt(3), 0.0], dtype=torch.float64)
    torch.testing.assert_close(GeometricMedian()(x), expected, rtol=0, atol=1e-7)


def test_a_client_with_half_of_the_weight_decides() -> None:
    x = torch.tensor([[1.0, 2.0], [9.0, 2.0], [1.0, -5.0]])
    weights = torch.tensor([3.0, 1.0, 1.0])
    torch.testing.assert_close(GeometricMedian()(x, weights), x[0], rtol=0, atol=1e-4)
    equal = GeometricMedian(weighted=False)(x, weights)
    torch.testing.assert_close(equal, GeometricMedian()(x))
    assert (equal - x[0]).norm() > 1  # no angle has 120 degrees: the median lies inside


def test_one_step_by_hand() -> None:
    # From the mean 3: distances 3, 2, 5, so shares 10, 15 and 6 of 31.
    x = torch.tensor([[0.0], [1.0], [8.0]])
    result = GeometricMedian(max_iterations=1)(x)
    torch.testing.assert_close(result, torch.tensor([(15 * 1 + 6 * 8) / 31]))


def test_starting_on_a_client_divides_by_the_smoothing_not_by_zero() -> None:
    x = torch.tensor([[-1.0], [0.0], [1.0]])
    torch.testing.assert_close(GeometricMedian()(x), torch.tensor([0.0]))


def test_a_minority_cannot_drag_it_away() -> None:
    x = torch.randn(11, 40, generator=torch.Generator().manual_seed(0))
    alone = GeometricMedian()(x)
    for size in (1e3, 1e10, 3e37):
        x[:5] = size
        assert (GeometricMedian()(x) - alone).norm() < 40
