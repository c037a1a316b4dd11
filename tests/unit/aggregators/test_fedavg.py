from __future__ import annotations

import pytest
import torch

from fedrec.aggregators import FedAvg
from fedrec.exceptions import AggregationError, ConfigurationError, ShapeError

UPDATES = torch.tensor([[0.0, 3.0], [6.0, 0.0]])


def test_weighted_by_default_and_uniform_on_request() -> None:
    sizes = torch.tensor([1, 2])
    torch.testing.assert_close(FedAvg()(UPDATES, sizes), torch.tensor([4.0, 1.0]))
    torch.testing.assert_close(FedAvg(weighted=False)(UPDATES, sizes), torch.tensor([3.0, 1.5]))
    torch.testing.assert_close(FedAvg()(UPDATES), torch.tensor([3.0, 1.5]))


@pytest.mark.parametrize("weights", [[0.0, 0.0], [-1.0, 2.0], [1.0, float("nan")]])
def test_weights_that_cannot_be_are_refused(weights: list[float]) -> None:
    with pytest.raises(AggregationError, match="client_weights"):
        FedAvg()(UPDATES, torch.tensor(weights))


def test_weights_of_another_number_of_clients() -> None:
    with pytest.raises(ShapeError, match="client_weights"):
        FedAvg()(UPDATES, torch.ones(3))


def test_weighted_is_a_bool() -> None:
    with pytest.raises(ConfigurationError, match="weighted"):
        FedAvg(weighted=1)  # type: ignore[arg-type]


def test_makes_no_claim_to_be_robust() -> None:
    assert FedAvg().max_byzantine(100) is None
