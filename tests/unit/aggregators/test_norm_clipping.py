from __future__ import annotations

import math

import pytest
import torch

from fedrec.aggregators import NormClipping
from fedrec.exceptions import ConfigurationError


@pytest.mark.parametrize("max_norm", [0, 0.0, -1.0, float("inf"), "mean", None, True])
def test_a_bad_bound_is_named(max_norm: object) -> None:
    with pytest.raises(ConfigurationError, match="Expected `max_norm` to be"):
        NormClipping(max_norm=max_norm)  # type: ignore[arg-type]


def test_bad_weighted_is_named() -> None:
    with pytest.raises(ConfigurationError, match="Expected `weighted` to be"):
        NormClipping(weighted=1)  # type: ignore[arg-type]


def test_short_updates_are_left_alone() -> None:
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4], [30.0, 40.0]])
    # The third becomes (3, 4).
    torch.testing.assert_close(NormClipping(max_norm=5.0)(x), torch.tensor([2.1, 2.8]))


def test_the_median_of_an_even_number_of_norms_is_the_mean_of_the_middle_two() -> None:
    # Norms 1, 2, 4, 90: clipped to 3. The lower median would clip to 2.
    x = torch.tensor([[1.0], [2.0], [-4.0], [90.0]])
    torch.testing.assert_close(NormClipping()(x), torch.tensor([(1 + 2 - 3 + 3) / 4]))


def test_clipping_does_not_raise_the_weight_of_the_others() -> None:
    x, sizes = torch.tensor([[1.0], [10.0]]), torch.tensor([100, 300])
    assert NormClipping(max_norm=2.0)(x, sizes).tolist() == [0.25 * 1 + 0.75 * 2]
    assert NormClipping(max_norm=2.0, weighted=False)(x, sizes).tolist() == [1.5]


def test_norms_that_float32_cannot_hold() -> None:
    x = torch.tensor([[3e38, 3e38], [1.0, 0.0]])
    expected = torch.tensor([(math.sqrt(0.5) + 1) / 2, math.sqrt(0.5) / 2])
    torch.testing.assert_close(NormClipping(max_norm=1.0)(x), expected)


def test_zeros_stay_zeros() -> None:
    assert NormClipping()(torch.zeros(3, 2)).tolist() == [0.0, 0.0]
