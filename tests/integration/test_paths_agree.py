"""The fast path and one client after another end with the same test error rate."""

import pytest
import torch

from fedrec import FederatedLoop
from fedrec.aggregators import TrimmedMean
from fedrec.attacks import TrimAttack
from fedrec.data import Digits
from fedrec.executors import Executor, SequentialExecutor, VectorizedExecutor
from fedrec.federation import Federation
from fedrec.history import MemoryHistory
from fedrec.models import MLP
from fedrec.recoverers import FedRecover

ROUNDS = 60


def error_rates(executor: Executor, seed: int, path: str | None) -> list[float]:
    """Record under attack and recover; return the test error rates after each."""
    torch.manual_seed(seed)
    data, model = Digits(num_clients=10), MLP(in_features=64, hidden=[32])
    federation = Federation.from_data(data, model, malicious=2, batch_size=6)
    loop = FederatedLoop(executor=executor, seed=seed, logger=False, enable_progress_bar=False)
    history = MemoryHistory()
    recorded = loop.record(
        federation,
        TrimmedMean(trim=0.2),
        history,
        attack=TrimAttack(),
        max_rounds=ROUNDS,
        server_lr=0.1,
    )
    recovered = loop.recover(federation, history, FedRecover(), federation.malicious)
    assert recorded.execution.get("path") == path
    assert recovered.execution.get("path") == path
    tested = [loop.test(federation, result.global_weights) for result in (recorded, recovered)]
    return [float(one["ter"] or 0.0) for one in tested]


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_error_rates_agree_within_0_3_percentage_points(seed: int) -> None:
    fast = error_rates(VectorizedExecutor(), seed, "grouped")
    slow = error_rates(SequentialExecutor(), seed, None)
    assert fast == pytest.approx(slow, abs=0.003)
    assert fast[1] < 0.75  # they learned: chance is 0.9
