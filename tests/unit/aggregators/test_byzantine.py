"""Rules that are told how many clients are malicious: counts, fractions, bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedrec.aggregators import CAF, Bulyan, DnC, Krum, MeanAroundMedian, MultiKrum
from fedrec.aggregators.byzantine import ByzantineAggregator
from fedrec.exceptions import AggregationError, ConfigurationError

BOUNDS = {Krum: (2, 3), MultiKrum: (2, 3), Bulyan: (4, 3), MeanAroundMedian: (2, 1)} | {
    DnC: (2, 1),
    CAF: (2, 1),
}
RULES = pytest.mark.parametrize("rule", BOUNDS, ids=lambda rule: rule.__name__)


@RULES
@pytest.mark.parametrize("value", [-1, -0.1, 0.5, 1.0, float("nan"), True, "0.2", None, [1]])
def test_a_bad_count_is_named(rule: type[ByzantineAggregator], value: object) -> None:
    with pytest.raises(ConfigurationError, match="Expected `num_byzantine` to be"):
        rule(num_byzantine=value)  # type: ignore[arg-type]


@RULES
@pytest.mark.parametrize("f", [0, 1, 4])
def test_one_client_too_few_is_refused_and_nothing_clamped(
    rule: type[ByzantineAggregator], f: int
) -> None:
    factor, offset = BOUNDS[rule]
    fewest = factor * f + offset
    rule(num_byzantine=f).check_cohort(fewest)
    assert rule(num_byzantine=f)(torch.zeros(fewest, 2)).tolist() == [0.0, 0.0]
    if fewest == 1:
        return
    with pytest.raises(AggregationError) as info:
        rule(num_byzantine=f)(torch.zeros(fewest - 1, 2))
    assert str(info.value) == (
        f"{rule.__name__} needs m >= {factor}f + {offset} client updates, but got m={fewest - 1} "
        f"with f={f}, which needs {fewest}. "
        "HINT: lower `num_byzantine` or let more clients take part."
    )


@pytest.mark.parametrize("rule", [Krum, MultiKrum, MeanAroundMedian, DnC, CAF])
def test_a_fraction_goes_on_when_clients_are_left_out(rule: type[ByzantineAggregator]) -> None:
    with pytest.raises(AggregationError, match="m=36 with f=20"):
        rule(num_byzantine=20).check_cohort(36)
    for m in range(3, 120):
        rule(num_byzantine=0.2).check_cohort(m)
        assert rule(num_byzantine=0.2).count(m) == m // 5


def test_a_fraction_is_the_decimal_number_as_written() -> None:
    assert 0.29 * 100 < 29
    assert Krum(num_byzantine=0.29).count(100) == 29
    assert Krum(num_byzantine=np.float64(0.29)).count(100) == 29
    assert Krum(num_byzantine=29).init_args() == {"num_byzantine": 29}
