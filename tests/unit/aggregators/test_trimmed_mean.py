from __future__ import annotations

import pytest
import torch

from fedrec.aggregators import TrimmedMean
from fedrec.exceptions import AggregationError, ConfigurationError


@pytest.mark.parametrize("trim", [-1, -0.1, 0.5, 1.0, float("nan"), True, "0.2", None, [1]])
def test_bad_trim_is_named(trim: object) -> None:
    with pytest.raises(ConfigurationError, match="Expected `trim` to be"):
        TrimmedMean(trim=trim)  # type: ignore[arg-type]


def test_count_that_fits_no_longer_is_refused_before_aggregating() -> None:
    rule = TrimmedMean(trim=5)
    rule.check_cohort(11)
    message = "Cannot trim 2*5=10 of m=8 updates. HINT: lower `trim` or let more clients take part."
    with pytest.raises(AggregationError) as info:
        rule.check_cohort(8)
    assert str(info.value) == message
    with pytest.raises(AggregationError) as info:
        rule(torch.zeros(8, 2))
    assert str(info.value) == message


def test_a_fraction_fits_any_cohort() -> None:
    rule = TrimmedMean(trim=0.2)
    for m in range(1, 120):
        rule.check_cohort(m)
        assert rule.num_trim(m) == m // 5
        assert rule.max_byzantine(m) == m // 5


def test_a_fraction_of_numpy() -> None:
    import numpy as np

    assert TrimmedMean(trim=np.float64(0.29)).num_trim(100) == 29


def test_integers_are_counts_and_stay_so() -> None:
    assert TrimmedMean(trim=0).num_trim(10) == 0
    assert TrimmedMean(trim=20).num_trim(100) == 20
    assert TrimmedMean(trim=20).init_args() == {"trim": 20}
