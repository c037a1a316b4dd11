"""Rules that leave clients out, and RLR, which turns coordinates round."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedrec.aggregators import FLAME, RLR, DeepSight, FedAvg, SignGuard, TrimmedMean
from fedrec.exceptions import AggregationError, ConfigurationError, FedrecWarning
from fedrec.functional import largest_mode, majority_cluster
from fedrec.functional.aggregation.inspection import density_clusters


def angles(*degrees: float) -> torch.Tensor:
    radians = torch.tensor(degrees).deg2rad()
    return torch.stack([radians.cos(), radians.sin()], dim=1)


@pytest.mark.parametrize(
    ("rule", "kwargs", "name"),
    [
        (FLAME, {"noise_factor": -0.1}, "noise_factor"),
        (SignGuard, {"lower": 1.5}, "lower"),
        (SignGuard, {"upper": 0.5}, "upper"),
        (SignGuard, {"coordinate_fraction": 0.0}, "coordinate_fraction"),
        (RLR, {"rule": FedAvg(), "threshold": 0}, "threshold"),
        (RLR, {"rule": FedAvg(), "threshold": 1.5}, "threshold"),
        (RLR, {"rule": FedAvg(), "threshold": True}, "threshold"),
    ],
)
def test_bad_arguments_are_named(rule: type, kwargs: dict, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Expected `{name}`"):
        rule(**kwargs)


def test_defaults_are_those_of_the_papers() -> None:
    rule = SignGuard()
    assert (rule.lower, rule.upper, rule.coordinate_fraction) == (0.1, 3.0, 0.1)
    assert FLAME().noise_factor == 0.001


def test_the_majority_is_the_densest_group_of_more_than_half() -> None:
    def group(*values: float) -> list[bool]:
        x = torch.tensor(values)
        return majority_cluster((x[:, None] - x).abs()).tolist()

    assert group(1.0) == [True]
    assert group(1.0, 5.0) == [True, True]
    assert group(0.0, 0.1, 9.0) == [True, True, False]
    # A tighter group that is no majority, 0 to 0.2, counts for nothing.
    assert group(0.0, 0.1, 0.2, 5.0, 5.5, 6.0, 6.5) == [False] * 3 + [True] * 4
    # Gaps of 1 join all at once: nobody is left out.
    assert group(0.0, 1.0, 2.0, 3.0) == [True] * 4
    assert group(0.0, 0.0, 0.0, 0.0, 7.0) == [True] * 4 + [False]


def test_flame_by_hand() -> None:
    x = angles(0.0, 10.0, 20.0, 180.0, 185.0)
    x[0] *= 4.0
    x[3:] *= 8.0
    # Admitted are the first three; norms are 4, 1, 1, 8, 8, so the bound is 4.
    torch.testing.assert_close(FLAME(noise_factor=0.0)(x), x[:3].mean(dim=0))
    x[0] *= 100.0  # the median of 400, 1, 1, 8, 8 is 8
    expected = (x[0] * 8 / 400 + x[1] + x[2]) / 3
    torch.testing.assert_close(FLAME(noise_factor=0.0)(x), expected)


def test_flame_draws_the_same_noise_each_time_it_is_asked() -> None:
    x = angles(0.0, 10.0, 20.0)
    assert torch.equal(FLAME()(x), FLAME()(x))
    assert not torch.equal(FLAME()(x), FLAME(noise_factor=0.0)(x))


def test_mean_shift_by_hand() -> None:
    def cluster(*values: float) -> list[bool]:
        return largest_mode(torch.tensor(values)[:, None]).tolist()

    assert cluster(3.0) == [True]
    assert cluster(1.0, 1.0, 1.0) == [True] * 3
    # Of two clusters of three, it is the one of larger values, in whatever order they come.
    assert cluster(0.0, 0.1, 0.2, 5.0, 5.05, 5.1) == [False] * 3 + [True] * 3
    assert cluster(5.0, 5.05, 0.1, 5.1, 0.2, 0.0) == [True, True, False, True, False, False]
    assert cluster(0.0, 0.1, 0.2, 0.3, 5.0) == [True] * 4 + [False]


def test_signguard_by_hand() -> None:
    rule = SignGuard(coordinate_fraction=1.0)
    # Rows 0 to 3 have like signs; norms are 5, 5, 10, 0.05, 5, so the median is 5: row 2 is
    # clipped to it, row 3 below 0.1 of it, row 4 has other signs.
    x = torch.tensor([[3.0, 4.0], [4.0, 3.0], [6.0, 8.0], [0.03, 0.04], [-3.0, -4.0]])
    torch.testing.assert_close(rule(x), torch.tensor([10.0, 11.0]) / 3)


def test_signguard_counts_signs_of_the_drawn_coordinates_alone() -> None:
    x = torch.tensor([[1.0] * 8, [-1.0] * 8, [0.0] * 8])
    shares = SignGuard(coordinate_fraction=0.25)._sign_shares(x, None)
    assert shares.tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]  # positive, zero, negative


def test_every_client_that_is_alone_is_a_cluster_of_its_own() -> None:
    points = torch.tensor([0.0, 0.1, 0.1, -99.0, 5.0, 5.1, 5.1, 99.0])[:, None]
    labels = density_clusters(points, 3).tolist()
    assert labels[:3] == labels[:1] * 3
    assert labels[4:7] == labels[4:5] * 3
    assert len(set(labels)) == 4


def test_deepsight_divides_what_a_client_predicts_by_what_the_global_model_does() -> None:
    rule = DeepSight(input_shape=(1,), local_lr=0.5, num_samples=3, num_seeds=2)
    ctx: Any = SimpleNamespace(seed=0, round=0, global_weights=torch.tensor([0.25, 0.75]).log())
    # A step of local_lr leads to logits 0: both classes have 1/2, after 1/4 and 3/4.
    updates = 2 * ctx.global_weights[None]
    found = rule._division_differences(updates, ctx, lambda w, x: w.expand(len(x), 2))
    for answers in found:
        torch.testing.assert_close(answers, torch.tensor([[2, 2 / 3]], dtype=torch.float64))
    assert len(found) == 2


def test_signguard_with_nobody_left_has_no_effect_and_says_so() -> None:
    # Three of like signs are too long or too short; the others are each alone, or not alike.
    x = torch.tensor([[90.0, 90.0], [80.0, 80.0], [1e-3, 1e-3], [-3.0, 4.0], [-4.0, -3.0]])
    with pytest.warns(FedrecWarning, match="SignGuard trusts none of 5 updates"):
        assert SignGuard(coordinate_fraction=1.0)(x).tolist() == [0.0, 0.0]


def test_the_median_of_an_even_number_of_norms_is_the_mean_of_two() -> None:
    # Norms 1, 2, 4 and 9: clipped to 3, not to 2.
    x = torch.tensor([[1.0], [2.0], [4.0], [9.0]])
    expected = (1.0 + 2.0 + 3.0 + 3.0) / 4
    assert SignGuard()(x).item() == pytest.approx(expected)
    assert FLAME(noise_factor=0.0)(x).item() == pytest.approx(expected)


def test_rlr_by_hand() -> None:
    x = torch.tensor([[1.0, 1.0, 0.0], [1.0, -2.0, 0.0], [4.0, 4.0, 3.0]])
    # Votes are 3, 1 and 1.
    assert RLR(FedAvg(), threshold=3)(x).tolist() == [2.0, -1.0, -1.0]
    assert RLR(FedAvg(), threshold=1)(x).tolist() == [2.0, 1.0, 1.0]
    assert RLR(TrimmedMean(trim=1), threshold=0.5)(x).tolist() == [1.0, -1.0, -0.0]


def test_a_threshold_that_nobody_reaches_is_refused() -> None:
    rule = RLR(FedAvg(), threshold=4)
    with pytest.raises(AggregationError, match="RLR needs m >= threshold, but got m=3"):
        rule(torch.ones(3, 1))
    assert [RLR(FedAvg(), threshold=0.29).votes(m) for m in (3, 10, 100)] == [1, 3, 29]
    with pytest.raises(AggregationError, match="Cannot trim"):
        RLR(TrimmedMean(trim=2), threshold=1)(torch.ones(3, 1))
