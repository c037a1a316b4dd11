from __future__ import annotations

import random

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, random_split

from fedrec.data import DegreeOfNonIID, FederatedDataModule, IIDPartitioner
from fedrec.exceptions import ConfigurationError
from fedrec.models import MLP
from fedrec.random import numpy_generator


def dataset(size: int = 24, num_classes: int = 3) -> TensorDataset:
    """Sample i is (i, i + 0.5), its label i mod num_classes."""
    x = torch.arange(size, dtype=torch.float32)[:, None] + torch.tensor([0.0, 0.5])
    return TensorDataset(x, torch.arange(size) % num_classes)


class Numbers(FederatedDataModule):
    loads = 0

    def load(self) -> tuple[TensorDataset, TensorDataset]:
        self.loads += 1
        return dataset(24), dataset(6)


class Bad(FederatedDataModule):
    data: object = None

    def load(self):
        return self.data, dataset()


def ids(data: Dataset) -> list[int]:
    return [int(data[i][0][0]) for i in range(len(data))]


@pytest.mark.parametrize(
    ("num_clients", "first", "last"),
    [(1, "client-0", "client-0"), (10, "client-0", "client-9"), (11, "client-00", "client-10")],
)
def test_client_ids_are_padded_to_equal_width(num_clients: int, first: str, last: str) -> None:
    names = list(Numbers(num_clients=num_clients).client_datasets())
    assert (names[0], names[-1], len(names)) == (first, last, num_clients)
    assert names == sorted(names)
    assert tuple(names) == Numbers(num_clients=num_clients).client_ids


def test_nothing_is_loaded_before_it_is_needed_and_only_once() -> None:
    data = Numbers(num_clients=4)
    assert data.loads == 0
    data.prepare_data()
    data.setup("fit")
    first = data.client_datasets()
    data.setup("test")
    second = data.client_datasets()
    assert data.loads == 1
    assert all(first[c] is second[c] for c in first)
    first.clear()  # a caller's own dict
    assert len(data.client_datasets()) == 4


def test_the_split_is_what_the_partitioner_gives_for_the_seed() -> None:
    data = Numbers(num_clients=4, partitioner=DegreeOfNonIID(q=0.5), seed=3)
    labels = np.arange(24) % 3
    parts = DegreeOfNonIID(q=0.5)(labels, 4, numpy_generator(3, "partition"))
    assert [ids(d) for d in data.client_datasets().values()] == [p.tolist() for p in parts]
    for client in data.client_datasets().values():
        x, y = client.tensors
        assert torch.equal(x[:, 0].long() % 3, y)


def test_seeds() -> None:
    def split(seed: int) -> list[list[int]]:
        return [ids(d) for d in Numbers(num_clients=4, seed=seed).client_datasets().values()]

    assert split(0) == split(0)
    assert split(0) != split(1)


def test_clients_own_their_samples() -> None:
    data = Numbers(num_clients=4)
    client = data.client_datasets()["client-0"]
    client.tensors[0].fill_(-1)
    assert float(data.train_dataset.tensors[0].min()) == 0.0


def test_clients_train_on_data_that_require_a_gradient_for_many_steps() -> None:
    class Grown(FederatedDataModule):
        def load(self):
            x, y = dataset(8).tensors
            return TensorDataset(x.requires_grad_(), y), None

    (client,) = Grown(num_clients=1).client_datasets().values()
    weight = torch.ones(2, requires_grad=True)
    for _ in range(2):
        (client[:][0] * weight).sum().backward()
    assert weight.grad.tolist() == [2 * 28.0, 2 * 32.0]


def test_num_classes_counts_labels_of_test_data_too() -> None:
    class Rare(Numbers):
        def load(self):
            return dataset(24, num_classes=3), dataset(6, num_classes=5)

    assert Numbers(num_clients=2).num_classes == 3
    assert Rare(num_clients=2).num_classes == 5


def test_pooled_loaders() -> None:
    data = Numbers(num_clients=4)
    data.batch_size = 10
    batches = list(data.train_dataloader())
    assert [len(y) for _, y in batches] == [10, 10, 4]
    seen = torch.cat([x[:, 0] for x, _ in batches])
    assert torch.equal(seen.sort().values, torch.arange(24.0))
    assert not torch.equal(seen, torch.arange(24.0))
    again = torch.cat([x[:, 0] for x, _ in Numbers(num_clients=4).train_dataloader()])
    assert torch.equal(
        again, torch.cat([x[:, 0] for x, _ in Numbers(num_clients=9).train_dataloader()])
    )
    assert torch.equal(torch.cat([x[:, 0] for x, _ in data.test_dataloader()]), torch.arange(6.0))


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`")
@pytest.mark.filterwarnings("ignore:.*number of training batches")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's own use of torch
def test_lightning_trains_on_the_pooled_data() -> None:
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = MLP(in_features=2, hidden=(), num_classes=3, lr=1e-3)
    trainer.fit(module, datamodule=Numbers(num_clients=4))
    results = trainer.test(module, datamodule=Numbers(num_clients=4), verbose=False)
    assert trainer.global_step == 1  # 24 samples in one batch of 64
    assert results[0]["test_ter"] == pytest.approx(
        float((module(dataset(6).tensors[0]).argmax(1) != dataset(6).tensors[1]).float().mean())
    )


def test_printing_does_not_load() -> None:
    data = Numbers(num_clients=4, seed=2)
    assert str(data) == repr(data) == "Numbers(num_clients=4, partitioner=IIDPartitioner(), seed=2)"
    assert data.loads == 0


def test_empty_clients() -> None:
    with pytest.raises(ConfigurationError, match="Cannot split 24 samples over 25 clients"):
        Numbers(num_clients=25).client_datasets()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"num_clients": 0}, "num_clients"),
        ({"num_clients": 2.0}, "num_clients"),
        ({"num_clients": 2, "partitioner": "iid"}, "partitioner"),
        ({"num_clients": 2, "partitioner": IIDPartitioner}, "partitioner"),
        ({"num_clients": 2, "seed": None}, "seed"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Expected `{name}`"):
        Numbers(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, "but got NoneType"),
        (TensorDataset(torch.zeros(3, 2)), r"\(3, 2\)"),
        (TensorDataset(torch.zeros(0, 2), torch.zeros(0).long()), r"\(0, 2\)"),
        (TensorDataset(torch.zeros(1, 2), torch.tensor([-1])), "label -1"),
    ],
)
def test_what_load_returns_is_checked(value: object, found: str) -> None:
    data = Bad(num_clients=2)
    data.data = value
    with pytest.raises(ConfigurationError, match=rf"Expected Bad.load to give .*{found}"):
        data.setup("fit")


def test_load_has_to_be_written() -> None:
    with pytest.raises(TypeError, match="load"):
        FederatedDataModule(num_clients=2)  # type: ignore[abstract]


# --- from_datamodule ---------------------------------------------------------------------------


class Pairs(Dataset):
    """A map-style data set whose labels are plain integers."""

    def __init__(self, size: int = 24) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, object]:
        return torch.full((1, 2, 2), float(index)), index % 3


class Plain(pl.LightningDataModule):
    def __init__(self, train: object, test: object = None) -> None:
        super().__init__()
        self.given = (train, test if test is not None else dataset(6))
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)
        if stage == "fit":
            self.train = self.given[0]
        else:
            self.test = self.given[1]

    def train_dataloader(self) -> object:
        return DataLoader(self.train, batch_size=7)

    def test_dataloader(self) -> object:
        return DataLoader(self.test, batch_size=7)


def test_from_a_plain_datamodule() -> None:
    plain = Plain(Pairs())
    data = FederatedDataModule.from_datamodule(
        plain, num_clients=3, partitioner=DegreeOfNonIID(q=1.0), seed=4
    )
    assert plain.calls == []
    clients = data.client_datasets()
    assert plain.calls == ["prepare_data", "fit", "test"]
    assert data.num_classes == 3
    assert data.train_dataset.tensors[0].shape == (24, 1, 2, 2)
    assert torch.equal(data.train_dataset.tensors[1], torch.arange(24) % 3)
    assert data.train_dataset.tensors[1].dtype == torch.int64
    assert sorted(len(c) for c in clients.values()) == [8, 8, 8]
    assert all(len(c.tensors[1].unique()) == 1 for c in clients.values())


def test_tensor_datasets_are_taken_as_they_are() -> None:
    given = TensorDataset(torch.zeros(5, 2), torch.tensor([0, 1, 0, 1, 1], dtype=torch.uint8))
    data = FederatedDataModule.from_datamodule(Plain(given), num_clients=2)
    assert data.train_dataset.tensors[0] is given.tensors[0]
    assert data.train_dataset.tensors[1].dtype == torch.int64


def test_subsets_and_from_datasets() -> None:
    subset = torch.utils.data.Subset(dataset(24), [3, 1, 2])
    plain = pl.LightningDataModule.from_datasets(train_dataset=subset, test_dataset=Pairs(4))
    data = FederatedDataModule.from_datamodule(plain, num_clients=3)
    assert ids(data.train_dataset) == [3, 1, 2]
    assert len(data.test_dataset) == 4


def test_a_random_split_comes_out_the_same_whatever_was_drawn_before() -> None:
    class Drawn(Plain):
        def setup(self, stage: str) -> None:
            super().setup(stage)
            self.noise = (random.random(), np.random.random(), torch.rand(()).item())  # noqa: NPY002
            self.train, _ = random_split(dataset(24), [16, 8])

    def draw(seed: int) -> tuple[list[int], object]:
        torch.rand(3), np.random.random(3), random.random()  # noqa: NPY002
        plain = Drawn(None, Pairs(6))
        data = FederatedDataModule.from_datamodule(plain, num_clients=2, seed=seed)
        return ids(data.train_dataset), plain.noise

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)


def test_reading_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    first = torch.rand(1)
    FederatedDataModule.from_datamodule(Plain(Pairs()), num_clients=2).setup("fit")
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


class Custom(Dataset):
    def __init__(self, *samples: object) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> object:
        return self.samples[index]


ONE = torch.zeros(2)


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        (Stream(), "map-style"),
        (Custom({"x": ONE, "y": 0}), "pairs of a tensor or array and a label"),
        (Custom((ONE, 0, 1)), "pairs of a tensor or array and a label"),
        (Custom(([0.0, 1.0], 0)), "a transform that makes tensors"),
        (Custom((ONE, "cat")), "pairs of a tensor or array and a label"),
        (Custom((ONE, 0), (torch.zeros(3), 1)), r"\[\(\(2,\), \(\)\), \(\(3,\), \(\)\)\]"),
        (TensorDataset(ONE, ONE.long(), ONE), "pairs of a tensor or array and a label"),
    ],
)
def test_other_samples_are_refused(train: object, reason: str) -> None:
    data = FederatedDataModule.from_datamodule(Plain(train), num_clients=2)
    with pytest.raises(ConfigurationError, match=rf"Plain.train_dataloader.*{reason}"):
        data.setup("fit")


def test_several_loaders_are_refused() -> None:
    class Several(Plain):
        def train_dataloader(self) -> object:
            return [super().train_dataloader()]

    data = FederatedDataModule.from_datamodule(Several(Pairs()), num_clients=2)
    with pytest.raises(ConfigurationError, match=r"Several\.train_dataloader to return one Data"):
        data.setup("fit")


def test_something_else_than_a_datamodule() -> None:
    with pytest.raises(ConfigurationError, match="Expected `datamodule` to be a LightningDataMod"):
        FederatedDataModule.from_datamodule(Pairs(), num_clients=2)  # type: ignore[arg-type]
