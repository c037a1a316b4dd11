"""What stands in for a client that does not answer in a recovery."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedrec.aggregators import FedAvg
from fedrec.exceptions import ConfigurationError
from fedrec.history import MemoryHistory
from fedrec.recoverers import FedRecover


def recover(grid: Any, joined: Any, make_loop: Any, on_missing: str) -> tuple[Any, Any]:
    """Recover without excluding anybody, while one client does not answer any more."""
    executor, federation = joined
    loop, history = make_loop(executor), MemoryHistory()
    recorded = loop.record(federation, FedAvg(), history, max_rounds=5, server_lr=0.5)
    grid.drop("client-1")
    # The paper's estimate is the recorded update where the weights are those of the recording.
    method = FedRecover(
        estimator="paired",
        warmup_rounds=3,
        correction_period=4,
        final_rounds=1,
        on_missing=on_missing,
    )
    recovered = loop.recover(federation, history, method, [], on_bad_update="drop")
    return recorded, recovered


@pytest.mark.parametrize("on_missing", ["historical", "estimate"])
def test_what_it_sent_stands_in_for_it(
    grid: Any, joined: Any, make_loop: Any, on_missing: str
) -> None:
    # Nobody is excluded, so recovered and recorded weights are equal in every round, and the
    # client's update would be what it was: the estimate at a distance of zero, too.
    recorded, recovered = recover(grid, joined, make_loop, on_missing)
    assert torch.equal(recovered.global_weights, recorded.global_weights)


def test_by_default_it_is_left_out(grid: Any, joined: Any, make_loop: Any) -> None:
    recorded, recovered = recover(grid, joined, make_loop, "drop")
    assert not torch.equal(recovered.global_weights, recorded.global_weights)
    assert recovered.global_weights.isfinite().all()


def test_without_estimates_nothing_can_stand_in() -> None:
    with pytest.raises(ConfigurationError, match="Expected `on_missing` to be 'drop'"):
        FedRecover(estimator=None, on_missing="historical")
