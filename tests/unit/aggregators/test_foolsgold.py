from __future__ import annotations

import math

import pytest
import torch

from fedrec.aggregators import AggregationContext, FoolsGold
from fedrec.exceptions import ConfigurationError, FedrecWarning
from fedrec.functional import foolsgold_weights
from fedrec.parameters import ParameterVector


def context(*client_ids: str, d: int = 2) -> AggregationContext:
    return AggregationContext(
        round=0,
        phase="record",
        client_ids=client_ids,
        global_weights=torch.zeros(d),
        layout=ParameterVector(torch.nn.Linear(d, 1, bias=False)),
    )


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ConfigurationError, match="Expected `confidence`"):
        FoolsGold(confidence=0.0)


def test_weights_by_hand() -> None:
    # c = 0.8 between 0 and 1, 0 otherwise: v = (0.8, 0.8, 0), alpha = (0.2, 0.2, 1).
    c = torch.eye(3, dtype=torch.float64)
    c[0, 1] = c[1, 0] = 0.8
    assert foolsgold_weights(c).tolist() == [0.0, 0.0, 1.0]  # ln(0.2 / 0.8) + 0.5 < 0
    c[0, 1] = c[1, 0] = 0.6
    weight = math.log(0.4 / 0.6) + 0.5
    assert foolsgold_weights(c).tolist() == pytest.approx([weight, weight, 1.0])


def test_an_honest_client_is_pardoned_for_its_likeness_to_sybils() -> None:
    # 0 and 1 are all but twins, 2 is like 0 by 0.7, 3 is like nobody. v = (0.9, 0.9, 0.7, 0), so
    # the cosine of 2 shrinks by 0.7 / 0.9, and alpha is (0.1, 0.1, 1 - 0.49 / 0.9, 1).
    c = torch.eye(4, dtype=torch.float64)
    c[0, 1] = c[1, 0] = 0.9
    c[0, 2] = c[2, 0] = 0.7
    alpha = 1 - 0.49 / 0.9
    weight = math.log(alpha / (1 - alpha)) + 0.5
    assert foolsgold_weights(c).tolist() == pytest.approx([0.0, 0.0, weight, 1.0])
    assert weight > 0.3  # and not ln(0.3 / 0.7) + 0.5 < 0


def test_itself_counts_as_zero_where_all_others_point_away() -> None:
    # All cosines are negative: without that, alpha would exceed 1.
    x = torch.tensor([[1.0, 0.0], [-0.5, 0.8], [-0.5, -0.8]])
    assert torch.equal(FoolsGold()(x), x.sum(dim=0))


def test_the_sum_is_not_divided() -> None:
    assert FoolsGold()(torch.eye(4)).tolist() == [1.0, 1.0, 1.0, 1.0]


def test_memory_is_by_client_whoever_takes_part() -> None:
    rule = FoolsGold()
    e1, e2 = torch.eye(2)
    rule(torch.stack([e1, e2]), None, context("a", "b"))
    rule(torch.stack([e2, e1]), None, context("b", "c"))
    state = rule.state_dict()
    assert state["client_ids"] == ["a", "b", "c"]
    assert state["sums"].tolist() == [[1.0, 0.0], [0.0, 2.0], [1.0, 0.0]]
    # "a" and "c" are twins by now, in whatever order they come.
    assert rule(torch.stack([e1, e2, e1]), None, context("c", "b", "a")).tolist() == [0.0, 1.0]


def test_memory_does_not_alias() -> None:
    x = torch.eye(2)
    rule, other = FoolsGold(), FoolsGold()
    rule(x)
    other.load_state_dict(rule.state_dict())
    other(x)
    assert rule.state_dict()["sums"].tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert torch.equal(x, torch.eye(2))


def test_sums_that_overflow_are_still_those_of_twins() -> None:
    rule, honest = FoolsGold(), torch.tensor([[0.0, 1.0]])
    twins = torch.tensor([[3e38, 0.0]]).repeat(2, 1)
    for _ in range(3):
        assert rule(torch.cat([twins, honest])).tolist() == [0.0, 1.0]


def test_everyone_alike_has_no_effect_and_says_so() -> None:
    with pytest.warns(FedrecWarning, match="a twin of each of 3 clients"):
        assert FoolsGold()(torch.ones(3, 2)).tolist() == [0.0, 0.0]


def test_updates_of_norm_zero_are_like_nobody() -> None:
    assert FoolsGold()(torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 1.0]])).tolist() == [3.0, 1.0]
