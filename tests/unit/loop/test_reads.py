"""How often a round reads a device, which makes the processor wait for it."""

from __future__ import annotations

import traceback
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fedrec import FederatedLoop, Federation, LightningClient
from fedrec.aggregators import FedAvg, Median
from fedrec.attacks import TrimAttack
from fedrec.callbacks import Callback
from fedrec.data import Digits
from fedrec.exceptions import AggregationError, UpdateError
from fedrec.functional.aggregation.order_statistics import use_kernel
from fedrec.history import MemoryHistory
from fedrec.loop.runtime import Runtime
from fedrec.models import MLP
from fedrec.recoverers import AnchoredLBFGS, FedRecover

# The processor by another name: equal to no other device, and what is on it is computed as ever.
DEVICE = torch.device("cpu", 0)
_HOST = (torch.device("cpu"), "cpu")
_READS = (
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__index__,
    Tensor.__array__,
    Tensor.item,
    Tensor.tolist,
    Tensor.cpu,
    Tensor.equal,
    Tensor.nonzero,
    Tensor.masked_select,
    Tensor.unique,
    torch.equal,
    torch.allclose,
    torch.nonzero,
    torch.masked_select,
    torch.unique,
)
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)


class Reads(TorchFunctionMode):
    """Notes what is made on `DEVICE`, all that is made of it, and who reads a value of that.

    Attributes:
        by_package: Reads by the package of fedrec that asks for a value: executors, attacks, ...
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_package: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs or {}))
        tensors = [value for value in given if isinstance(value, Tensor)]
        there = any(vars(tensor).get("is_there") for tensor in tensors)
        if func == Tensor.device.__get__:
            return DEVICE if there else func(*args)
        found = func(*args, **(kwargs or {}))
        named = [value for value in given if isinstance(value, torch.device | str)]
        fetched = func is Tensor.to and any(value in _HOST for value in named)
        by_mask = func in _INDEXING and any(t.dtype == torch.bool for t in tensors[1:])
        if there and (func in _READS or fetched or by_mask):
            self._note()
        if func is Tensor.cpu or fetched:
            found = found.detach()  # the processor's own, and not the same object
        if func is Tensor.copy_:
            there = vars(args[0]).get("is_there", False)
        if DEVICE in named or (there and func not in _READS and not fetched):
            for value in tree_leaves(found):
                if isinstance(value, Tensor):
                    vars(value)["is_there"] = True
        return found

    def _note(self) -> None:
        """Note the package that reads; functions that anybody may call do it for somebody."""
        files = [frame.filename for frame in traceback.extract_stack()]
        inner = [
            file.rpartition("/fedrec/")[2].partition("/")[0] for file in files if "/fedrec/" in file
        ]
        self.by_package[[name for name in inner if name != "functional"][-1]] += 1


class OfRounds(Callback):
    """Keeps what was read in each round."""

    def __init__(self, reads: Reads) -> None:
        self.reads, self.of = reads, {}

    def on_round_start(self, loop, ctx):
        self.reads.by_package.clear()

    def on_round_end(self, loop, ctx, metrics):
        self.of[ctx.round] = dict(self.reads.by_package)


@pytest.fixture
def _elsewhere(monkeypatch):
    """Every loop computes on `DEVICE`, as on a device that has no kernels of numba."""
    monkeypatch.setattr(Runtime, "device", DEVICE)
    with use_kernel("torch"):
        yield


def _federation(kind: type[LightningClient] = LightningClient) -> Federation:
    torch.manual_seed(0)
    module = MLP(in_features=64)
    for parameter in module.parameters():
        vars(parameter)["is_there"] = True  # a module is moved in place
    clients = [
        kind(client_id, module, samples, batch_size=6)
        for client_id, samples in Digits(num_clients=6).client_datasets().items()
    ]
    return Federation(clients, module, malicious=["client-0"])


def _loop(*callbacks: Callback) -> FederatedLoop:
    return FederatedLoop(
        accelerator="cpu", logger=False, enable_progress_bar=False, eval_every=100,
        callbacks=list(callbacks),
    )  # fmt: skip


@pytest.mark.usefixtures("_elsewhere")
@pytest.mark.parametrize(
    ("rule", "attack", "by_attack", "curvature_weight", "by_estimator"),
    [
        # The largest entry of each estimate, which says whom to ask: here curvature tells nothing.
        (FedAvg(), None, 0, "pooled", 1),
        # That, and what the weights of its pairs are computed from. The attack looks at its mask.
        (Median(), TrimAttack(), 3, 1.0, 3),
    ],
    ids=["FedAvg", "Median, TrimAttack"],
)
def test_the_loop_reads_a_device_once_a_round(
    rule, attack, by_attack, curvature_weight, by_estimator
):
    history = MemoryHistory()
    with Reads() as reads:
        rounds = OfRounds(reads)
        _loop(rounds).record(
            _federation(), rule, history, max_rounds=10, server_lr=0.1, attack=attack
        )
        found = rounds.of[7]
        assert found.pop("loop") == 1
        # What is stored: weights, updates and the aggregate.
        assert found.pop("history") == 3
        assert found.pop("attacks", 0) == by_attack
        # Labels, whether a step wrote to the weights, what was logged, and an audit.
        assert found == {"executors": 3, "clients": 1}
        rounds = OfRounds(reads)
        schedule = FedRecover(
            warmup_rounds=3,
            correction_period=5,
            final_rounds=1,
            estimator=AnchoredLBFGS(curvature_weight=curvature_weight),
        )
        _loop(rounds).recover(_federation(), history, schedule, exclude=["client-0"])
        assert rounds.of[5] == {"loop": 1, "recoverers": by_estimator}
        rounds = OfRounds(reads)
        schedule = FedRecover(
            warmup_rounds=3,
            correction_period=5,
            final_rounds=1,
            tolerance_rate=None,
            estimator="average",
        )
        _loop(rounds).recover(_federation(), history, schedule, exclude=["client-0"])
        # The largest entries alone, also if the estimates are aggregated once.
        assert rounds.of[5] == {"loop": 1, "recoverers": 1}


class Faulty(LightningClient):
    """Sends NaN in round 2."""

    def local_update(self, global_weights, ctx):
        found = super().local_update(global_weights, ctx)
        if ctx.round == 2 and self.client_id == "client-3":
            found.update[0] = float("nan")
        return found


class Failing(FedAvg):
    """Cannot work with NaN."""

    def aggregate(self, updates, client_weights=None, ctx=None):
        if updates.isnan().any():
            raise ValueError("NaN")
        return super().aggregate(updates, client_weights, ctx)


class Exploding(FedAvg):
    """Goes to infinity in round 2."""

    def aggregate(self, updates, client_weights=None, ctx=None):
        return super().aggregate(updates, client_weights, ctx) / (0.0 if ctx.round == 2 else 1.0)


@pytest.mark.parametrize("is_elsewhere", [False, True])
@pytest.mark.parametrize(
    ("kind", "rule", "attack", "error", "message"),
    [
        (Faulty, FedAvg(), None, UpdateError, "Refused updates: client 'client-3': the update has"),
        (
            Faulty,
            Failing(),
            None,
            UpdateError,
            "Refused updates: client 'client-3': the update has",
        ),
        (Faulty, FedAvg(), TrimAttack(), UpdateError, "Refused updates: client 'client-3': the up"),
        (LightningClient, Exploding(), None, AggregationError, "The server step of round 2 gave"),
    ],
    ids=["update", "rule fails", "attack", "weights"],
)
def test_what_is_not_finite_is_named_whenever_it_is_read(
    request, is_elsewhere, kind, rule, attack, error, message
):
    if is_elsewhere:
        request.getfixturevalue("_elsewhere")
    history = MemoryHistory()
    with Reads(), pytest.raises(error, match=message):
        _loop().record(_federation(kind), rule, history, max_rounds=4, server_lr=0.1, attack=attack)
    assert list(history.rounds()) == [0, 1]
