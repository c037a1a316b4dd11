from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from fedrec.aggregators import DnC
from fedrec.exceptions import AggregationError, ConfigurationError
from fedrec.parameters import ParameterVector
from fedrec.types import RoundContext

# Of every coordinate alone, another client is the outlier.
DIAGONAL = torch.eye(8) * 9 + torch.arange(8.0)[:, None] / 100


def context(t: int, seed: int = 0) -> RoundContext:
    return RoundContext(
        round=t,
        phase="record",
        client_ids=tuple("abcdefgh"),
        global_weights=torch.zeros(8),
        layout=ParameterVector(nn.Linear(8, 1, bias=False)),
        seed=seed,
    )


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("filter_factor", 0.0),
        ("filter_factor", -1.0),
        ("num_coordinates", 0),
        ("num_coordinates", 0.5),
        ("iterations", 0),
    ],
)
def test_bad_arguments_are_named(argument: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"Expected `{argument}` to be"):
        DnC(num_byzantine=1, **{argument: value})  # type: ignore[arg-type]


def test_by_hand() -> None:
    # Centred at (3, 3): the direction is (1, 1), the projections are 6, 4, 2 and 12 over root 2.
    x = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [9.0, 9.0]])
    assert DnC(num_byzantine=1)(x).tolist() == [1.0, 1.0]
    # c = 2: two are removed, (0, 0) as well.
    assert DnC(num_byzantine=1, filter_factor=2.0)(x).tolist() == [1.5, 1.5]


def test_how_many_are_good_is_computed_exactly() -> None:
    assert 60 - 2.2 * 25 < 5
    assert DnC(num_byzantine=25, filter_factor=2.2).num_good(60) == 5
    assert DnC(num_byzantine=3).num_good(10) == 7
    assert DnC(num_byzantine=3, filter_factor=0.5).num_good(10) == 8  # 8.5 at most


def test_removing_everybody_is_refused() -> None:
    with pytest.raises(AggregationError, match="got m=10 client updates with f=4 and c=2"):
        DnC(num_byzantine=4, filter_factor=2.5).check_cohort(10)


def test_coordinates_are_a_function_of_seed_and_round() -> None:
    rule = DnC(num_byzantine=1, num_coordinates=1)
    removed = {}
    for t in range(30):
        result = rule(DIAGONAL, None, context(t))
        removed[t] = int(result.argmin())  # the outlier's coordinate has no 9 in it
        ctx = context(t)
        ctx.generator.manual_seed(99)  # what others draw in this round does not matter
        assert torch.equal(rule(DIAGONAL, None, ctx), result)
        assert torch.equal(rule(DIAGONAL, None, ctx), result)
        recovering = dataclasses.replace(context(t), phase="recover")
        assert torch.equal(rule(DIAGONAL, None, recovering), result)
    assert len(set(removed.values())) == 8
    other = {t: int(rule(DIAGONAL, None, context(t, seed=1)).argmin()) for t in range(30)}
    assert other != removed


def test_good_is_who_is_good_in_every_iteration() -> None:
    # 60 draws of one of 8 coordinates leave out none: each client is removed once.
    with pytest.raises(AggregationError, match="removed each of m=8 clients in one of 60"):
        DnC(num_byzantine=1, num_coordinates=1, iterations=60)(DIAGONAL)
    # With two coordinates that have an outlier, the others are left.
    x = DIAGONAL.clone()
    x[:, 2:] = torch.arange(8.0)[:, None] / 100
    x[6, 2:] = 5
    rule = DnC(num_byzantine=1, num_coordinates=1, iterations=60)
    torch.testing.assert_close(rule(x), x[[2, 3, 4, 5, 7]].mean(dim=0))


def test_no_more_coordinates_than_there_are() -> None:
    x = torch.randn(7, 20, generator=torch.Generator().manual_seed(0))
    every = DnC(num_byzantine=2, num_coordinates=20)(x)
    assert torch.equal(DnC(num_byzantine=2, num_coordinates=10_000)(x), every)
