"""What calling a rule checks, whatever the rule."""

from __future__ import annotations

import pytest
import torch

from fedrec.aggregators import Aggregator, FedAvg, Median, TrimmedMean
from fedrec.exceptions import AggregationError, ShapeError


class Widened(Aggregator):
    def aggregate(self, updates, client_weights=None, ctx=None):
        return updates.double().mean(dim=0)


class Centred(Aggregator):
    def aggregate(self, updates, client_weights=None, ctx=None):
        updates[0] -= 1.0  # a view of the rows is changed, not the tensor itself
        return updates.mean(dim=0)


def test_a_result_of_another_dtype_is_refused() -> None:
    updates = torch.ones(3, 2)
    with pytest.raises(
        ShapeError, match=r"Widened\.aggregate to return torch\.float32.*got torch\.float64"
    ):
        Widened()(updates)
    assert Widened()(updates.double()).dtype == torch.float64


def test_a_rule_that_changes_the_updates_is_named() -> None:
    with pytest.raises(AggregationError, match=r"Centred\.aggregate to leave `updates`.*clone"):
        Centred()(torch.ones(3, 2))


def test_updates_made_in_inference_mode_are_aggregated_too() -> None:
    with torch.inference_mode():
        updates = torch.tensor([[1.0], [2.0], [9.0]])
        for rule, value in ((FedAvg(), 4.0), (Median(), 2.0), (TrimmedMean(trim=1), 2.0)):
            assert rule(updates).tolist() == [value]


def test_finite_values_whose_sum_overflows_are_fine() -> None:
    updates = torch.full((3, 8), 3e38)
    updates[1] = -updates[1]
    assert torch.equal(Median()(updates), updates[0])
    updates[2, 5] = float("inf")
    with pytest.raises(AggregationError, match=r"rows of clients \[2\] have NaN or infinity"):
        Median()(updates)
