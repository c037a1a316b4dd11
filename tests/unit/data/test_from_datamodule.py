"""What a LightningDataModule gives is what its loaders give, or refused by name."""

from __future__ import annotations

import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import FedAvg
from fedrec.data import DegreeOfNonIID, FederatedDataModule
from fedrec.exceptions import ConfigurationError, FedrecWarning
from fedrec.history import MemoryHistory
from fedrec.models import MLP

Pair = namedtuple("Pair", "x y")


def numbers(size: int = 20, first: int = 0) -> TensorDataset:
    """Sample i is the number `first + i`, its label that modulo 3."""
    x = torch.arange(first, first + size)
    return TensorDataset(x.float()[:, None], x % 3)


class Pairs(Dataset):
    """Samples of any kind, made of an index."""

    def __init__(self, size: int, make: Callable[[int], Any]) -> None:
        self.size, self.make = size, make

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Given(pl.LightningDataModule):
    """Hands out these loaders."""

    def __init__(self, train: Any, test: Any = None) -> None:
        super().__init__()
        self.loaders = (train, DataLoader(numbers(6, first=100)) if test is None else test)

    def train_dataloader(self) -> Any:
        return self.loaders[0]

    def test_dataloader(self) -> Any:
        return self.loaders[1]


def read(train: Any, test: Any = None, **kwargs: Any) -> FederatedDataModule:
    data = FederatedDataModule.from_datamodule(Given(train, test), num_clients=2, **kwargs)
    data.setup("fit")
    return data


def values(dataset: TensorDataset | None) -> list[int]:
    assert dataset is not None
    assert torch.equal(dataset.tensors[0].flatten().long() % 3, dataset.tensors[1])
    return dataset.tensors[0].flatten().int().tolist()


# --- samplers ----------------------------------------------------------------------------------


class Evens(Sampler):
    """Every second sample, from the end."""

    def __iter__(self):
        return iter(range(18, -1, -2))

    def __len__(self) -> int:
        return 10


class Batches(Sampler):
    """Two batches of sizes of their own."""

    def __iter__(self):
        return iter([[9, 1, 2], [4, 3]])

    def __len__(self) -> int:
        return 2


WHOLE = list(range(20))


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({"batch_size": 8}, WHOLE),
        ({"batch_size": 8, "shuffle": True, "drop_last": True}, WHOLE),
        ({"sampler": SubsetRandomSampler([7, 3, 19])}, [3, 7, 19]),
        ({"sampler": SubsetRandomSampler(torch.tensor([7, 3, 19]))}, [3, 7, 19]),
        ({"sampler": Evens()}, list(range(0, 20, 2))),
        ({"batch_sampler": Batches()}, [1, 2, 3, 4, 9]),
        ({"batch_sampler": BatchSampler(SequentialSampler(range(20)), 6, False)}, WHOLE),
        ({"sampler": [5, 2]}, [2, 5]),
    ],
)
@pytest.mark.parametrize("plain", [True, False])
def test_the_samples_of_the_sampler_in_the_order_of_the_data_set(options, chosen, plain) -> None:
    dataset = numbers() if plain else Subset(numbers(25), range(20))
    assert values(read(DataLoader(dataset, **options)).train_dataset) == chosen


def test_a_split_by_samplers_over_one_data_set_does_not_overlap() -> None:
    full = numbers()
    data = read(
        DataLoader(full, sampler=SubsetRandomSampler(range(16)), batch_size=8),
        DataLoader(full, sampler=SubsetRandomSampler(range(16, 20))),
    )
    assert values(data.train_dataset) == list(range(16))
    assert values(data.test_dataset) == [16, 17, 18, 19]


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield from range(20)


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0] * 20, 20),
        WeightedRandomSampler([1.0] * 20, 5, replacement=False),
        RandomSampler(range(20), replacement=True),
        RandomSampler(range(20), num_samples=30),
        Endless(),
        [1, 1],
        [],
    ],
)
def test_samplers_that_repeat_are_refused(sampler: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"Expected the {type(sampler).__name__} of Given"
    ) as caught:
        read(DataLoader(numbers(), sampler=sampler))
    assert "without replacement" in str(caught.value)


def test_random_samples_are_warned_of() -> None:
    noisy = Pairs(4, lambda i: (torch.full((1,), float(i)) + torch.rand(1), i % 3))
    with pytest.warns(FedrecWarning, match=r"samples of Given\.train_dataloader are random"):
        read(DataLoader(noisy), DataLoader(numbers(2, 90)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(DataLoader(Pairs(4, lambda i: (torch.ones(1), i % 3))), DataLoader(numbers(2, 90)))


# --- collate_fn --------------------------------------------------------------------------------


def padded(samples: list[Any]) -> list[torch.Tensor]:
    """Zeros up to a length of 3; labels from text."""
    rows = [torch.nn.functional.pad(x, (0, 3 - len(x))) for x, _ in samples]
    return [torch.stack(rows), torch.tensor(["abc".index(y) for _, y in samples])]


def test_samples_are_read_through_the_collate_fn() -> None:
    text = Pairs(5, lambda i: (torch.full((1 + i % 3,), float(i)), "abc"[i % 3]))
    data = read(DataLoader(text, batch_size=2, collate_fn=padded), DataLoader(numbers(2)))
    x, y = data.train_dataset.tensors
    assert x.tolist() == [[0, 0, 0], [1, 1, 0], [2, 2, 2], [3, 0, 0], [4, 4, 0]]
    assert y.tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("collate_fn", "reason"),
    [
        (lambda s: {"x": torch.zeros(len(s))}, "with a row for each sample.*but got {'x': float32"),
        (lambda s: Pair(torch.zeros(len(s)), torch.zeros(len(s))), r"but got Pair\(float32"),
        (
            lambda s: (torch.zeros(1), torch.zeros(len(s))),
            r"but got \(float32 of shape \(1,\), float32",
        ),
        (lambda s: (torch.zeros(len(s), len(s)), torch.zeros(len(s))), "one shape and type in all"),
    ],
)
def test_batches_that_cannot_be_split_again_are_refused(collate_fn: Any, reason: str) -> None:
    loader = DataLoader(numbers(5), batch_size=2, collate_fn=collate_fn)
    with pytest.raises(
        ConfigurationError, match=rf"`collate_fn` of Given.train_dataloader.*{reason}"
    ):
        read(loader)


# --- what clients get from the loader -----------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "given", "expected"),
    [
        ({"batch_size": 4, "drop_last": True}, {}, (4, True)),
        ({"batch_size": 4}, {"batch_size": 3, "drop_last": True}, (3, True)),
        ({"batch_size": 4, "drop_last": True}, {"drop_last": False}, (4, False)),
        ({"batch_sampler": Batches()}, {}, (None, False)),
    ],
)
def test_clients_batches_are_the_loaders_unless_others_are_asked_for(
    options: Any, given: Any, expected: tuple[int | None, bool]
) -> None:
    data = read(DataLoader(numbers(), **options))
    client = Federation.from_data(data, MLP(in_features=1, num_classes=3), **given).clients[0]
    assert (client.batch_size, client.drop_last) == expected


def test_other_data_modules_give_the_full_batch() -> None:
    class Own(FederatedDataModule):
        def load(self):
            return numbers(), numbers(3)

    client = Federation.from_data(Own(num_clients=2), MLP(in_features=1, num_classes=3)).clients[0]
    assert (client.batch_size, client.drop_last) == (None, False)


# --- splits, overlaps, missing loaders ----------------------------------------------------------


class Split(Given):
    """Splits in `setup`, which is called for each stage."""

    def __init__(self, make: Callable[[], Any] = numbers) -> None:
        super().__init__(None)
        self.make, self.stages = make, []

    def setup(self, stage: str) -> None:
        self.stages.append(stage)
        parts = random_split(self.make(), [15, 5])
        self.loaders = tuple(DataLoader(part, batch_size=2) for part in parts)


@pytest.mark.parametrize("made_anew", [False, True])
def test_a_split_in_setup_is_the_same_for_training_and_testing(made_anew: bool) -> None:
    full = numbers()
    split = Split(numbers if made_anew else lambda: full)
    data = FederatedDataModule.from_datamodule(split, num_clients=2)
    assert sorted(values(data.train_dataset) + values(data.test_dataset)) == WHOLE
    assert split.stages == ["fit", "test"]


@pytest.mark.parametrize(
    ("test", "count"),
    [
        (lambda full: Subset(Subset(full, range(10, 20)), [0, 5, 9]), "2 of the 3 .* are training"),
        (lambda full: ConcatDataset([numbers(3), numbers(4, first=50)]), "3 of the 7 .* equal"),
    ],
)
def test_test_samples_that_were_trained_on_are_counted(test: Any, count: str) -> None:
    full = numbers()
    train = DataLoader(full, sampler=SubsetRandomSampler(range(16)))
    with pytest.warns(FedrecWarning, match=rf"{count}"):
        read(train, DataLoader(test(full)))


def test_equal_samples_at_other_places_of_one_data_set_are_no_overlap() -> None:
    twins = TensorDataset(torch.zeros(6, 1), torch.zeros(6).long())
    data = read(DataLoader(Subset(twins, [0, 1, 2])), DataLoader(Subset(twins, [3, 4, 5])))
    assert len(data.test_dataset) == 3  # and no warning, which would be an error here


class Validated(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(numbers())

    def val_dataloader(self) -> Any:
        return DataLoader(numbers(4, first=50))


def test_validation_data_take_the_place_of_missing_test_data() -> None:
    data = FederatedDataModule.from_datamodule(Validated(), num_clients=2)
    with pytest.warns(FedrecWarning, match="Validated has no test loader: the 4 samples of its"):
        data.setup("fit")
    assert values(data.test_dataset) == [50, 51, 52, 53]


def test_a_test_loader_that_is_none_is_missing() -> None:
    class Sometimes(Validated):
        def test_dataloader(self) -> Any:
            return None

    data = FederatedDataModule.from_datamodule(Sometimes(), num_clients=2)
    with pytest.warns(FedrecWarning, match="Sometimes has no test loader"):
        assert values(data.test_dataset) == [50, 51, 52, 53]


def test_without_any_test_data_everything_but_testing_works() -> None:
    class Only(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(numbers(), batch_size=5)

    data = FederatedDataModule.from_datamodule(Only(), num_clients=2)
    with pytest.warns(FedrecWarning, match="Only has no test loader: there is no test data"):
        data.setup("fit")
    assert data.test_dataset is None
    assert data.num_classes == 3
    with pytest.raises(ConfigurationError, match="has no test data"):
        data.test_dataloader()
    federation = Federation.from_data(data, MLP(in_features=1, num_classes=3))
    loop = FederatedLoop(logger=False, enable_progress_bar=False)
    result = loop.record(federation, FedAvg(), MemoryHistory(), max_rounds=1, server_lr=0.1)
    assert result.curve == []
    with pytest.raises(ConfigurationError, match="test_dataset"):
        loop.test(federation, result.global_weights)


# --- refusals ----------------------------------------------------------------------------------


class NoTraining(pl.LightningDataModule):
    pass


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Given(None), r"Given\.train_dataloader to return one DataLoader, but got None"),
        (NoTraining(), r"Cannot call NoTraining\.train_dataloader\. HINT: write this method"),
        (
            Given([DataLoader(numbers())] * 2),
            r"one DataLoader, but got list\. HINT: .*ConcatDataset",
        ),
        (Given({"a": DataLoader(numbers())}), "but got dict"),
        (
            Given(DataLoader(numbers()), [DataLoader(numbers())]),
            r"Given\.test_dataloader.* got list",
        ),
        (Given(DataLoader(numbers(), batch_size=None)), "batch_size=None"),
        (
            Given(DataLoader(Pairs(4, lambda i: Pair(torch.ones(1), 0)))),
            "pairs of a tensor or array and a",
        ),
    ],
)
def test_loaders_that_are_refused(module: Any, reason: str) -> None:
    data = FederatedDataModule.from_datamodule(module, num_clients=2)
    with pytest.raises(ConfigurationError, match=reason):
        data.setup("fit")


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "on_after_batch_transfer"])
def test_hooks_that_change_batches_are_refused_by_name(hook: str) -> None:
    hooked = type("Hooked", (Given,), {hook: lambda self, batch, idx: batch})
    with pytest.raises(ConfigurationError, match=f"Hooked overrides `{hook}`"):
        FederatedDataModule.from_datamodule(hooked(DataLoader(numbers())), num_clients=2)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, int, torch.tensor])
def test_labels_of_any_integer_type(kind: Any) -> None:
    dataset = Pairs(6, lambda i: (torch.tensor([float(i)]), kind(i % 3)))
    labels = read(DataLoader(dataset)).train_dataset.tensors[1]
    assert labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert labels.dtype == torch.int64


# --- targets of other kinds ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda i: (torch.tensor([float(i)]), torch.tensor([i % 2])),
        lambda i: (torch.tensor([float(i)]), torch.tensor([float(i % 2)])),
        lambda i: (np.array([i], dtype=np.float32), np.float32(i % 2)),
        lambda i: (torch.tensor([float(i)]), float(i % 2)),
    ],
    ids=["(N, 1)", "float (N, 1)", "arrays", "floats"],
)
def test_labels_keep_shape_and_number_type_and_are_split_by(make: Any) -> None:
    source = Pairs(12, make)
    data = FederatedDataModule.from_datamodule(
        Given(DataLoader(source)), num_clients=2, partitioner=DegreeOfNonIID(q=1.0)
    )
    expected = default_collate([source[i] for i in range(12)])[1]
    found = data.train_dataset.tensors[1]
    assert torch.equal(found, expected)
    assert found.dtype == expected.dtype
    assert [len(c.tensors[1].unique()) for c in data.client_datasets().values()] == [1, 1]
    assert data.num_classes == 3  # of the test data


@pytest.mark.parametrize("shape", [(12,), (12, 3)])
def test_data_without_classes(shape: tuple[int, ...]) -> None:
    targets = torch.arange(float(np.prod(shape))).reshape(shape)
    train = DataLoader(TensorDataset(torch.arange(12.0)[:, None], targets))
    data = read(train, server_samples=2)
    kept = [d.tensors[1] for d in (*data.client_datasets().values(), data.server_dataset)]
    assert torch.equal(torch.cat(kept).flatten().sort().values, targets.flatten())
    assert [len(k) for k in kept] == [5, 5, 2]
    with pytest.raises(ConfigurationError, match="`num_classes` goes by class labels"):
        _ = data.num_classes
    by_label = read(train, partitioner=DegreeOfNonIID(q=0.5))
    with pytest.raises(ConfigurationError, match=r"DegreeOfNonIID\(q=0.5\) goes by class labels"):
        by_label.client_datasets()
    skewed = read(train, server_samples=2, server_beta=0.5)
    with pytest.raises(ConfigurationError, match=r"`server_beta=0\.5` goes by class labels"):
        _ = skewed.server_dataset


def test_a_data_set_that_changes_its_samples_does_so_for_clients_and_server() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            x, y = super().__getitem__(index)
            return 2 * x, y

    class Own(FederatedDataModule):
        def load(self):
            return Doubled(*numbers().tensors), numbers(3)

    data = Own(num_clients=2, server_samples=4)
    held = [*data.client_datasets().values(), data.server_dataset]
    assert sorted(int(x) for d in held for x, _ in d) == list(range(0, 40, 2))


# --- without a trainer ---------------------------------------------------------------------------


def test_a_data_module_that_reads_its_trainer_is_named() -> None:
    class Asking(Given):
        def train_dataloader(self) -> Any:
            return DataLoader(numbers(), batch_size=8 // self.trainer.world_size)

    data = FederatedDataModule.from_datamodule(Asking(None), num_clients=2)
    with pytest.raises(
        ConfigurationError, match=r"reads `self\.trainer\.world_size`, but its data"
    ):
        data.setup("fit")


def test_a_class_is_no_data_module() -> None:
    with pytest.raises(ConfigurationError, match="`datamodule` to be a LightningDataModule"):
        FederatedDataModule.from_datamodule(Given, num_clients=2)  # type: ignore[arg-type]


def test_samples_lose_what_they_were_computed_from() -> None:
    weight = torch.ones(1, requires_grad=True)
    loader = DataLoader(Pairs(4, lambda i: (weight * i, i % 3)), batch_size=2)
    train = read(loader).train_dataset
    assert values(train) == [0, 1, 2, 3]
    assert not train.tensors[0].requires_grad
