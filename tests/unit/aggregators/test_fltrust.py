from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.data import TensorDataset

from fedrec import FederatedLoop, Federation, LightningClient
from fedrec.aggregators import AggregationContext, FedAvgM, FLTrust, Median
from fedrec.data import Digits
from fedrec.exceptions import AggregationError, ConfigurationError, FedrecWarning
from fedrec.history import LMDBHistory, MemoryHistory
from fedrec.models import MLP
from fedrec.parameters import ParameterVector
from fedrec.recipe import load_recipe, run
from fedrec.recipe.schema import build_parts
from fedrec.recoverers import TrainFromScratch
from fedrec.testing.problems import quadratic_federation
from fedrec.types import RoundContext


def trusting(*server_update: float) -> AggregationContext:
    d = len(server_update)
    return AggregationContext(
        round=0,
        phase="record",
        client_ids=("a", "b", "c"),
        global_weights=torch.zeros(d),
        layout=ParameterVector(torch.nn.Linear(d, 1, bias=False)),
        server_update=torch.tensor(server_update),
    )


def test_by_hand() -> None:
    # Cosines with (2, 0): 0.6, 1, and -1, which counts as 0. All are scaled to length 2.
    x = torch.tensor([[3.0, 4.0], [0.5, 0.0], [-9.0, 0.0]])
    expected = (0.6 * torch.tensor([1.2, 1.6]) + 1.0 * torch.tensor([2.0, 0.0])) / 1.6
    torch.testing.assert_close(FLTrust()(x, None, trusting(2.0, 0.0)), expected)


def test_nobody_trusted_has_no_effect_and_says_so() -> None:
    x = torch.tensor([[-1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    with pytest.warns(FedrecWarning, match="none of 3 updates to point"):
        assert FLTrust()(x, None, trusting(1.0, 0.0)).tolist() == [0.0, 0.0]
    with pytest.warns(FedrecWarning, match="none of 3"):
        assert FLTrust()(x, None, trusting(0.0, 0.0)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("size", [1e-44, 1e30, 3e38])
def test_extreme_updates_stay_finite(size: float) -> None:
    x = torch.tensor([[size, size], [1.0, 0.0], [1.0, 0.0]])
    result = FLTrust()(x, None, trusting(1.0, 0.0))
    assert torch.isfinite(result).all()
    assert result.norm() <= 1.0 + 1e-6


def test_an_update_of_the_server_is_needed() -> None:
    with pytest.raises(AggregationError, match="FLTrust needs an update of the server"):
        FLTrust()(torch.ones(3, 2))
    fields = {f.name: getattr(trusting(1.0), f.name) for f in dataclasses.fields(RoundContext)}
    with pytest.raises(AggregationError, match="FLTrust needs an update of the server"):
        FLTrust()(torch.ones(3, 2), None, RoundContext(**fields))


# -- in the loop ----------------------------------------------------------------------------------


def samples(seed: int, count: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def federation(server: TensorDataset | None, **kwargs) -> Federation:
    torch.manual_seed(0)
    module = MLP(in_features=5, hidden=(4,), num_classes=3)
    arguments = {"batch_size": 8, "local_steps": 3, **kwargs}
    clients = [LightningClient(f"c{i}", module, samples(i), **arguments) for i in range(4)]
    return Federation(clients, module, malicious=["c3"], server_data=server)


def loop(**kwargs) -> FederatedLoop:
    return FederatedLoop(accelerator="cpu", enable_progress_bar=False, seed=5, **kwargs)


class Kept(FLTrust):
    """Keeps what it was given."""

    seen: list[torch.Tensor]

    def aggregate(self, updates, client_weights=None, ctx=None):
        type(self).seen.append(ctx.server_update)
        return super().aggregate(updates, client_weights, ctx)


def test_the_server_trains_as_its_clients_do() -> None:
    Kept.seen = []
    clients = federation(samples(99))
    history = MemoryHistory()
    loop().record(clients, Kept(), history, max_rounds=2, server_lr=0.1)
    # A client with this id, the server's data and the same arguments sends the very same.
    twin = LightningClient("server", clients.module, samples(99), batch_size=8, local_steps=3)
    both = MemoryHistory()
    loop(executor="sequential").record(
        Federation([twin], clients.module), Median(), both, max_rounds=1, server_lr=0.1
    )
    assert torch.equal(both.read_round(0).updates[0], Kept.seen[0])
    assert not torch.equal(Kept.seen[0], Kept.seen[1])


@pytest.mark.parametrize("wrapped", [False, True])
def test_recovery_costs_clients_nothing_for_the_server(wrapped: bool) -> None:
    rule = FedAvgM(FLTrust(), momentum=0.5) if wrapped else FLTrust()
    clients, history = federation(samples(99)), MemoryHistory()
    whole = loop().record(clients, rule, history, max_rounds=4, server_lr=0.1)
    again = loop().recover(clients, history, TrainFromScratch(), [])
    assert torch.equal(again.global_weights, whole.global_weights)
    assert sorted(again.ledger.num_rounds) == ["c0", "c1", "c2", "c3"]


def test_data_at_the_server_and_a_client_to_copy_are_needed() -> None:
    record = loop().record
    with pytest.raises(ConfigurationError, match=r"FLTrust needs clean data.*server_data="):
        record(federation(None), FLTrust(), MemoryHistory(), max_rounds=1, server_lr=0.1)
    empty = federation(samples(9, count=0))
    with pytest.raises(ConfigurationError, match="FLTrust needs clean data"):
        record(empty, FLTrust(), MemoryHistory(), max_rounds=1, server_lr=0.1)
    others = quadratic_federation(server_data=samples(9))
    with pytest.raises(ConfigurationError, match="none of them is a LightningClient"):
        record(others, FLTrust(), MemoryHistory(), max_rounds=1, server_lr=0.1)


def test_a_recipe_puts_samples_aside_for_the_server(tmp_path) -> None:
    path = tmp_path / "fltrust.yaml"
    path.write_text(
        """
data: {class_path: Digits, init_args: {num_clients: 3, server_samples: 40, server_beta: 0.5}}
model: {class_path: MLP, init_args: {in_features: 64, hidden: [4]}}
federation: {malicious: 1, batch_size: 8}
aggregator: FLTrust
record: {max_rounds: 2, server_lr: 0.5}
loop: {accelerator: cpu, enable_progress_bar: false, logger: false}
"""
    )
    recipe = load_recipe(path)
    run(recipe, folder=tmp_path / "run")
    with LMDBHistory(tmp_path / "run" / "history") as recorded:
        weights = recorded.read_round(1).global_weights
    parts, kept = build_parts(recipe), MemoryHistory()
    data = Digits(num_clients=3, server_samples=40, server_beta=0.5, seed=0)
    by_hand = Federation.from_data(data, parts.model, malicious=1, batch_size=8)
    FederatedLoop(accelerator="cpu", enable_progress_bar=False, seed=0).record(
        by_hand, FLTrust(), kept, max_rounds=2, server_lr=0.5
    )
    assert torch.equal(kept.read_round(1).global_weights, weights)
