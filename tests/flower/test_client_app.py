"""What a client trains on, given a LightningDataModule of its own."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from flwr.app import Context, RecordDict
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from fedrec.data import Digits
from fedrec.flower import FlowerExecutor, make_client_app
from fedrec.flower.client_app import client_id_of
from fedrec.models import MLP
from tests.flower.conftest import FakeGrid

X, Y = torch.arange(20.0).reshape(10, 2), torch.arange(10) % 2


class Own(pl.LightningDataModule):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(X, Y), **self.settings)


def make_module(context: Any = None) -> MLP:
    torch.manual_seed(0)
    return MLP(in_features=2, num_classes=2)


def joined(data: Any) -> tuple[FakeGrid, FlowerExecutor]:
    grid = FakeGrid()
    grid.add("a", app=make_client_app(make_module, lambda context: data))
    return grid, FlowerExecutor(grid, timeout=0.5)


@pytest.mark.parametrize("size", [4, 11, 50])
def test_partitions_of_a_simulation_are_the_clients_of_a_data_module(size: int) -> None:
    nodes = [{"partition-id": i, "num-partitions": size} for i in range(size)]
    assert tuple(map(_id_of, nodes)) == Digits(num_clients=size).client_ids


def test_settings_that_say_less_or_more_than_a_simulation() -> None:
    assert _id_of({"partition-id": 12}) == "client-12"
    assert _id_of({"partition-id": 3, "num-partitions": 50, "client-id": "ann"}) == "ann"
    assert _id_of({}) == ""


def _id_of(node: dict[str, Any]) -> str:
    return client_id_of(Context(1, 2, node, RecordDict(), {}))


def test_it_has_the_samples_that_its_sampler_gives() -> None:
    data = Own(batch_size=3, drop_last=True, sampler=SubsetRandomSampler([7, 1, 4, 2]))
    _, executor = joined(data)
    (client,) = executor.join(make_module(), num_clients=1)
    assert client.num_samples == 4
    assert client.card.training["batch_size"] == 3
    assert client.card.training["drop_last"] is True


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"sampler": WeightedRandomSampler([1.0] * 10, 10)}, "without replacement"),
        ({"batch_size": None}, "one DataLoader with a `batch_size`"),
    ],
)
def test_a_sampler_that_cannot_be_followed_is_refused(settings: Any, reason: str) -> None:
    grid, executor = joined(Own(**settings))
    with pytest.raises(Exception, match="0 are there"):
        executor.join(make_module(), num_clients=1)
    assert reason in next(iter(executor.nodes.refused.values()))
