"""Splitting the data of any LightningDataModule over clients."""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from fedrec.clients.batches import check_map_style, form_of
from fedrec.clients.generators import generators_restored
from fedrec.clients.hooks import check_datamodule
from fedrec.data.datamodule import FederatedDataModule, check_dataset
from fedrec.data.partitioners.base import Partitioner
from fedrec.exceptions import ConfigurationError, FedrecWarning, expected
from fedrec.random import key

__all__ = ["FromDataModule", "selected_indices"]

_MOST_AT_ONCE = 256
_ARRAYS = (Tensor, np.ndarray)
_TARGETS = (*_ARRAYS, np.number, np.bool_, int, float)


@dataclass(frozen=True, eq=False)
class _Read:
    """The samples that a loader gives, with the loader and their indices in its data set."""

    data: TensorDataset
    loader: DataLoader[Any]
    indices: Sequence[int]


class FromDataModule(FederatedDataModule):
    """The data of another data module; made by `FederatedDataModule.from_datamodule`."""

    def __init__(
        self,
        datamodule: pl.LightningDataModule,
        *,
        num_clients: int,
        partitioner: Partitioner | None,
        seed: int,
        server_samples: int,
        server_beta: float | None,
    ) -> None:
        super().__init__(
            num_clients=num_clients,
            partitioner=partitioner,
            seed=seed,
            server_samples=server_samples,
            server_beta=server_beta,
        )
        # Checked by methods, not by class: a data module of `lightning.pytorch` will do, too.
        needed = ("prepare_data", "setup", "train_dataloader", "test_dataloader")
        usable = all(callable(getattr(datamodule, name, None)) for name in needed)
        if not usable or isinstance(datamodule, type):
            raise ConfigurationError(expected("datamodule", "a LightningDataModule", datamodule))
        check_datamodule(datamodule)
        self.datamodule = datamodule

    def load(self) -> tuple[TensorDataset, TensorDataset | None]:
        """Return the samples of the other data module's loaders."""
        return self._read[0].data, None if self._read[1] is None else self._read[1].data

    @property
    def client_batch_size(self) -> int | None:
        """Batch size of the training loader; `None` if its batches have different sizes."""
        loader = self._read[0].loader
        # A user's batch sampler may have no `batch_size`, or a list of sizes.
        size = getattr(loader.batch_sampler, "batch_size", None)
        return size if isinstance(size, int) else None

    @property
    def client_drop_last(self) -> bool:
        """Whether the training loader leaves out a smaller last batch."""
        return bool(getattr(self._read[0].loader.batch_sampler, "drop_last", False))

    @cached_property
    def _read(self) -> tuple[_Read, _Read | None]:
        data = self.datamodule
        with generators_restored(torch.device("cpu")), self._without_trainer():
            self._seed()
            data.prepare_data()
            self._setup("fit")
            train = self._read_loader("train_dataloader")
            if train is None:
                raise ConfigurationError(
                    f"Expected {self._named('train_dataloader')} to return one DataLoader, but "
                    "got None. HINT: there has to be something to train on."
                )
            test = self._read_test_loader()
        if test is not None:
            self._warn_of_overlap(train, test)
        return train, test

    def _read_test_loader(self) -> _Read | None:
        """Read the test loader, or else the validation loader; `None` if there is neither."""
        if self._writes("test_dataloader"):
            self._setup("test")
            test = self._read_loader("test_dataloader")
            if test is not None:
                return test
        test = self._read_loader("val_dataloader") if self._writes("val_dataloader") else None
        name = type(self.datamodule).__name__
        instead = (
            "there is no test data, and no error rate is computed"
            if test is None
            else f"the {len(test.data)} samples of its `val_dataloader` are the test data"
        )
        warnings.warn(f"{name} has no test loader: {instead}.", FedrecWarning, stacklevel=2)
        return test

    @contextmanager
    def _without_trainer(self) -> Iterator[None]:
        try:
            yield
        except AttributeError as error:
            if error.obj is not None or not hasattr(pl.Trainer, error.name or ""):
                raise
            raise ConfigurationError(
                f"{type(self.datamodule).__name__} reads `self.trainer.{error.name}`, but its data "
                "are split without a Trainer. HINT: give the data module what it needs when it is "
                "made, or ask `if self.trainer` first."
            ) from error

    def _setup(self, stage: str) -> None:
        # Seeded for each stage: a random split in `setup` has to be the same in all stages.
        self._seed()
        self.datamodule.setup(stage)

    def _seed(self) -> None:
        draws = key(self.seed, "datamodule") % 2**32
        torch.default_generator.manual_seed(draws)
        np.random.seed(draws)  # noqa: NPY002 - what the user's code may draw from
        random.seed(draws)

    def _named(self, method: str) -> str:
        return f"{type(self.datamodule).__name__}.{method}"

    def _writes(self, method: str) -> bool:
        """Whether the data module has its own version of a method, not Lightning's empty one."""
        own: Any = getattr(self.datamodule, method, None)
        # Compared by module name: a data module of `lightning.pytorch` has other base classes.
        return callable(own) and not own.__module__.endswith(".core.hooks")

    def _read_loader(self, name: str) -> _Read | None:
        """Read every sample of a loader into memory; return `None` if there is no loader."""
        method = self._named(name)
        if not self._writes(name):
            raise ConfigurationError(f"Cannot call {method}. HINT: write this method.")
        loader: Any = getattr(self.datamodule, name)()
        if loader is None:
            return None
        if not isinstance(loader, DataLoader):
            raise ConfigurationError(
                f"Expected {method} to return one DataLoader, but got {type(loader).__name__}. "
                "HINT: return one of them, or one over the ConcatDataset of their data sets."
            )
        dataset: Any = loader.dataset
        check_map_style(f"{method}().dataset", dataset)
        if loader.batch_sampler is None:
            raise ConfigurationError(
                f"Expected {method} to return a DataLoader that makes batches, but it has "
                "batch_size=None. HINT: give it a `batch_size`, and a data set of single samples."
            )
        indices = selected_indices(method, loader)
        self._warn_if_random(method, dataset, indices[0])
        if loader.collate_fn is not default_collate:
            inputs, labels = _uncollated(method, loader, indices)
        elif type(dataset) is TensorDataset and len(dataset.tensors) == 2:
            inputs, labels = dataset.tensors
            if len(indices) < len(dataset):
                index = torch.tensor(indices, dtype=torch.int64)
                inputs, labels = inputs[index], labels[index]
        else:
            inputs, labels = _stacked(method, [dataset[i] for i in indices])
        # torch's losses take no integer type but int64.
        labels = labels if labels.is_floating_point() else labels.long()
        # Detached, so that the graphs they were computed by are not kept in memory.
        data = TensorDataset(*(t if t.is_leaf else t.detach() for t in (inputs, labels)))
        check_dataset(method, data)
        return _Read(data, loader, indices)

    def _warn_if_random(self, method: str, dataset: Any, index: int) -> None:
        """Warn if a sample is another one whenever it is read: it is read once."""
        with generators_restored(torch.device("cpu")):
            first, again = (_values(dataset[index]) for _ in range(2))
        if first != again:
            warnings.warn(
                f"The samples of {method} are random, as with augmentation: each is read once, and "
                "stays as it was drawn in all rounds. HINT: augment in the module's "
                "`on_after_batch_transfer`, which is seeded for each client and round.",
                FedrecWarning,
                stacklevel=2,
            )

    def _warn_of_overlap(self, train: _Read, test: _Read) -> None:
        """Warn if test samples are training samples: by index in one data set, or by content."""
        (train_dataset, of_train), (test_dataset, of_test) = _origins(train), _origins(test)
        if train_dataset is test_dataset:
            shared, relation = len(set(of_test) & set(of_train)), "are training samples, too"
        else:
            known, relation = set(_contents(train.data)), "equal training samples"
            shared = sum(content in known for content in _contents(test.data))
        if shared:
            warnings.warn(
                f"{shared} of the {len(test.data)} test samples of "
                f"{type(self.datamodule).__name__} {relation}: the test error says little about "
                "samples that were not trained on.",
                FedrecWarning,
                stacklevel=2,
            )


def selected_indices(method: str, loader: DataLoader[Any]) -> Sequence[int]:
    """Return the indices of the samples that a loader gives, in the order of its data set."""
    size = len(loader.dataset)  # type: ignore[arg-type]
    sampler: Any = loader.sampler
    if type(loader.batch_sampler) is not BatchSampler:  # a class of the user's
        sampler = loader.batch_sampler
        given: Iterator[Any] = (i for batch in sampler for i in batch)
    elif type(sampler) in (SequentialSampler, RandomSampler) and len(sampler) == size:
        if not getattr(sampler, "replacement", False):
            return range(size)
        given = iter(())
    elif type(sampler) is SubsetRandomSampler:
        given = iter(sampler.indices)
    else:
        given = iter(sampler)
    # A sampler that draws with replacement is refused even if this pass repeats no sample.
    # So is one that may choose others in every epoch.
    draws = getattr(sampler, "replacement", False) or isinstance(sampler, WeightedRandomSampler)
    indices = [] if draws else [int(i) for i in islice(given, size)]
    if not indices or len(set(indices)) < len(indices) or next(given, None) is not None:
        raise ConfigurationError(
            f"Expected the {type(sampler).__name__} of {method} to give one or more samples, each "
            "at most once, since a client has a sample or has it not. HINT: use a sampler without "
            "replacement that gives the same samples in every epoch; `shuffle=True` is one."
        )
    return sorted(indices)


def _values(sample: Any) -> list[bytes]:
    """Return the values of a sample's tensors and arrays."""
    parts = sample if isinstance(sample, (tuple, list)) else [sample]
    tensors = [torch.as_tensor(part).detach() for part in parts if isinstance(part, _ARRAYS)]
    return [tensor.cpu().float().numpy().tobytes() for tensor in tensors]


def _stacked(method: str, samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Return the inputs and the targets of pairs as two tensors."""
    for sample in samples:
        pair = type(sample) in (tuple, list) and len(sample) == 2
        if not pair or not isinstance(sample[0], _ARRAYS) or not isinstance(sample[1], _TARGETS):
            raise ConfigurationError(
                f"Expected the samples of {method} to be pairs of a tensor or array and a label "
                f"or number, but got {sample!r}. HINT: give the dataset a transform that makes "
                "tensors."
            )
    shapes = sorted({(tuple(np.shape(x)), tuple(np.shape(y))) for x, y in samples})
    if len(shapes) != 1:
        raise ConfigurationError(
            f"Expected the samples of {method} to be of one shape, but got those of inputs and "
            f"targets {shapes[:5]}. HINT: give the dataset a transform that makes them equal."
        )
    inputs, targets = default_collate([(x, y) for x, y in samples])
    return inputs, targets


def _uncollated(
    method: str, loader: DataLoader[Any], indices: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return inputs and labels, read in batches through the loader's `collate_fn` and joined."""
    dataset: Any = loader.dataset
    inputs, labels = [], []
    size = getattr(loader.batch_sampler, "batch_size", None)
    size = size if isinstance(size, int) else _MOST_AT_ONCE
    for start in range(0, len(indices), size):
        chosen = indices[start : start + size]
        batch = loader.collate_fn([dataset[i] for i in chosen])
        pair = type(batch) in (tuple, list) and len(batch) == 2
        rows = (len(chosen),)
        if not pair or not all(isinstance(x, Tensor) and x.shape[:1] == rows for x in batch):
            raise ConfigurationError(
                f"Expected the `collate_fn` of {method} to give pairs of tensors with a row for "
                f"each sample, which can be split again, but got {form_of(batch)} for "
                f"{len(chosen)} samples. HINT: make a LightningClient(collate_fn=...) of each part "
                "of the data set yourself."
            )
        inputs.append(batch[0])
        labels.append(batch[1])
    for parts in (inputs, labels):
        forms = sorted({f"{x.dtype} {tuple(x.shape[1:])}" for x in parts})
        if len(forms) > 1:
            raise ConfigurationError(
                f"Expected the `collate_fn` of {method} to give samples of one shape and type in "
                f"all batches, but got {forms[:5]}. HINT: let it pad all batches to one length."
            )
    return torch.cat(inputs), torch.cat(labels)


def _origins(read: _Read) -> tuple[object, Sequence[int]]:
    """Return the data set that samples come from, below any `Subset`, and their indices in it."""
    dataset: Any = read.loader.dataset
    indices = list(read.indices)
    while type(dataset) is Subset:
        indices = [int(dataset.indices[i]) for i in indices]
        dataset = dataset.dataset
    return dataset, indices


def _contents(data: TensorDataset) -> Iterator[bytes]:
    """Yield a hash of every sample's values, shapes and types."""
    arrays = [tensor.detach().cpu().contiguous().numpy() for tensor in data.tensors]
    form = repr([(array.dtype, array.shape[1:]) for array in arrays]).encode()
    for row in zip(*arrays, strict=True):
        yield hashlib.blake2b(form + b"".join(x.tobytes() for x in row), digest_size=16).digest()
