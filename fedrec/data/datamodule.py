"""The base of data modules whose training data are split over clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from fedrec._checks import check_float, check_int
from fedrec.data.draw import draw_samples
from fedrec.data.partitioners.base import Partitioner
from fedrec.data.partitioners.iid import IIDPartitioner
from fedrec.data.partitioners.partition import Partition
from fedrec.exceptions import ConfigurationError, expected
from fedrec.random import numpy_generator, torch_generator

__all__ = ["FederatedDataModule", "check_dataset", "class_labels", "client_ids"]


class FederatedDataModule(pl.LightningDataModule, ABC):
    """Training data split over clients, and test data.

    A subclass writes `load`. Loading and splitting happen once, on first use; the split is a
    function of the seed, the labels and the partitioner. The class is also a LightningDataModule of
    the pooled data, so that `pl.Trainer` can train a central model for comparison.

    Args:
        num_clients: Number of clients, at least 1.
        partitioner: Splits the samples over clients; `None` for `IIDPartitioner()`.
        seed: Seed of the partition, and of the choice of the server's samples.
        server_samples: Number of training samples that the server holds as clean data
            (`server_dataset`). The training data are split first; then the server's samples are
            taken away from the clients that hold them. No sample is in two places.
        server_beta: Concentration of the Dirichlet distribution that the label distribution of the
            server's samples is drawn from, above 0 (small: few labels); `None` draws them uniformly
            from the training data.

    Attributes:
        batch_size: Samples a batch of the pooled loaders; clients have batch sizes of their own.
        synthetic: Whether the data are made up and only stand in for a real data set; results of
            such data say so.

    Raises:
        ConfigurationError: If an argument is out of range; or, on first use, if `load` does not
            return tensor data sets, or the data cannot be split.

    Examples:
        >>> class Coins(FederatedDataModule):
        ...     def load(self):
        ...         x = torch.arange(8.0).reshape(8, 1)
        ...         dataset = TensorDataset(x, (x[:, 0] > 3).long())
        ...         return dataset, dataset
        >>> coins = Coins(num_clients=4)
        >>> [f"{name}: {len(dataset)}" for name, dataset in coins.client_datasets().items()]
        ['client-0: 2', 'client-1: 2', 'client-2: 2', 'client-3: 2']
        >>> coins.num_classes, len(coins.test_dataset)
        (2, 8)
        >>> coins.partition.counts.sum(axis=0)  # samples of each label
        array([4, 4])
        >>> with_server = Coins(num_clients=2, server_samples=2)
        >>> len(with_server.train_dataset), len(with_server.server_dataset)
        (6, 2)
    """

    batch_size: int = 64
    synthetic: ClassVar[bool] = False

    def __init__(
        self,
        *,
        num_clients: int,
        partitioner: Partitioner | None = None,
        seed: int = 0,
        server_samples: int = 0,
        server_beta: float | None = None,
    ) -> None:
        super().__init__()
        self.num_clients = check_int("num_clients", num_clients, minimum=1)
        if not isinstance(partitioner, Partitioner | None):
            raise ConfigurationError(
                expected(
                    "partitioner",
                    "a Partitioner or None",
                    partitioner,
                    hint="`IIDPartitioner()` or `DegreeOfNonIID(q=0.5)`, for instance.",
                )
            )
        self.partitioner = partitioner if partitioner is not None else IIDPartitioner()
        self.seed = check_int("seed", seed)
        self.server_samples = check_int("server_samples", server_samples, minimum=0)
        if server_beta is not None:
            server_beta = check_float("server_beta", server_beta, minimum=0, open_minimum=True)
        self.server_beta = server_beta

    @abstractmethod
    def load(self) -> tuple[TensorDataset, TensorDataset | None]:
        """Return training and test data, each of inputs $(N, ...)$ and targets $(N, ...)$.

        Targets are class labels if they are integers $(N,)$ or $(N, 1)$, or 0 and 1 of any type.
        Other targets, such as numbers to regress on or several labels a sample, cannot be split by
        a partitioner that uses labels. Samples of a subclass of TensorDataset are read one by one.

        Without test data (`None`) no error rate is computed.

        `load` is called once. It must return the same data in every process.
        """

    @staticmethod
    def from_datamodule(
        datamodule: pl.LightningDataModule,
        *,
        num_clients: int,
        partitioner: Partitioner | None = None,
        seed: int = 0,
        server_samples: int = 0,
        server_beta: float | None = None,
    ) -> FederatedDataModule:
        """Split the training data of any LightningDataModule over clients.

        The module's `prepare_data`, `setup`, `train_dataloader` and `test_dataloader` are called.
        Every sample that a loader's sampler chooses is read once, in the order of the data set,
        through the loader's `collate_fn`, and kept in memory. Without a test loader, the validation
        loader takes its place, with a warning.

        Random number generators are seeded before each `setup`. So a random split is the same for
        training and for testing, and draws are the same in every process. A warning counts test
        samples that are also training samples.

        Clients have the batch size and `drop_last` of the training loader, unless
        `Federation.from_data` is given others.

        Args:
            datamodule: A data module whose samples, or batches, are pairs of a tensor and labels.
            num_clients: Number of clients.
            partitioner: Splits the samples over clients; `None` for `IIDPartitioner()`.
            seed: Seed of the partition and of whatever the data module draws.
            server_samples: Number of training samples for the server, see `FederatedDataModule`.
            server_beta: Label distribution of the server's samples, see `FederatedDataModule`.

        Raises:
            ConfigurationError: On first use, if the loaders or samples are of another kind, a
                sampler repeats samples, or hooks of the data module change batches.
        """
        from fedrec.data.lightning import FromDataModule  # it is a subclass of this class

        return FromDataModule(
            datamodule,
            num_clients=num_clients,
            partitioner=partitioner,
            seed=seed,
            server_samples=server_samples,
            server_beta=server_beta,
        )

    @cached_property
    def _datasets(self) -> tuple[TensorDataset, TensorDataset | None]:
        train, test = self.load()
        for dataset in (train,) if test is None else (train, test):
            check_dataset(f"{type(self).__name__}.load", dataset)
        return train, test

    @cached_property
    def _labels(self) -> NDArray[np.int64]:
        """The class of every training sample; 0 for all samples if targets are no classes."""
        labels = class_labels(self._datasets[0].tensors[1])
        return np.zeros(len(self._datasets[0]), dtype=np.int64) if labels is None else labels

    def _require_labels(self, user: str) -> None:
        """Raise an error that names the user of labels, if targets are no class labels."""
        if not self.has_classes:
            targets = self._datasets[0].tensors[1]
            raise ConfigurationError(
                f"{user} goes by class labels, but the targets of {type(self).__name__} are "
                f"{targets.dtype} of shape {tuple(targets.shape)}. HINT: class labels are integers "
                "of shape (N,); `IIDPartitioner`, `QuantitySkew` and `ByUser` split any data."
            )

    @cached_property
    def _of_server(self) -> NDArray[np.int64]:
        """Indices of the loaded training samples that the server holds."""
        labels = self._labels
        if self.server_beta is not None:
            self._require_labels(f"`server_beta={self.server_beta}`")
        if self.server_samples >= len(labels):
            requirement = f"fewer than the {len(labels)} training samples"
            raise ConfigurationError(expected("server_samples", requirement, self.server_samples))
        generator = numpy_generator(self.seed, "server-data")
        return draw_samples(labels, self.server_samples, self.server_beta, generator)

    @cached_property
    def train_dataset(self) -> TensorDataset | Subset[Any]:
        """The training data of all clients together."""
        train = self._datasets[0]
        if self.server_samples == 0:
            return train
        of_clients = np.ones(len(train), dtype=bool)
        of_clients[self._of_server] = False
        return _rows(train, np.flatnonzero(of_clients))

    @cached_property
    def server_dataset(self) -> TensorDataset | Subset[Any] | None:
        """The clean data at the server, which no client holds; `None` without `server_samples`."""
        if self.server_samples == 0:
            return None
        return _rows(self._datasets[0], self._of_server)

    @cached_property
    def partition(self) -> Partition:
        """The training samples of every client; `plot()` draws them."""
        if self.partitioner.needs_labels:
            self._require_labels(repr(self.partitioner))
        labels = self._labels
        generator = numpy_generator(self.seed, "partition")
        parts = self.partitioner(labels, self.num_clients, generator)
        if self.server_samples:
            # All samples were split, so that a partitioner may name samples by their position.
            of_clients = np.ones(len(labels), dtype=bool)
            of_clients[self._of_server] = False
            position = np.cumsum(of_clients) - 1
            parts = [position[part[of_clients[part]]] for part in parts]
            labels = labels[of_clients]
            self._check_sizes(parts)
        return Partition(self.client_ids, parts, labels)

    def _check_sizes(self, parts: Sequence[NDArray[np.int64]]) -> None:
        least = self.partitioner.min_samples
        short = [c for c, part in zip(self.client_ids, parts, strict=True) if len(part) < least]
        if short:
            raise ConfigurationError(
                f"The server's {self.server_samples} samples leave clients {short[:10]} fewer than "
                f"{least}. HINT: lower `server_samples`, or let the partitioner give every client "
                "more (`min_samples`)."
            )

    @cached_property
    def _clients(self) -> dict[str, TensorDataset | Subset[Any]]:
        parts = zip(self.client_ids, self.partition.parts, strict=True)
        return {client_id: _rows(self.train_dataset, part) for client_id, part in parts}

    @property
    def client_ids(self) -> tuple[str, ...]:
        """The ids of all clients, in order."""
        return client_ids(self.num_clients)

    @property
    def test_dataset(self) -> TensorDataset | None:
        """The test data, which belong to no client; `None` if there are none."""
        return self._datasets[1]

    @property
    def num_classes(self) -> int:
        """Number of classes: one more than the largest label.

        Raises:
            ConfigurationError: If targets are no class labels.
        """
        self._require_labels("`num_classes`")
        datasets = [dataset for dataset in self._datasets if dataset is not None]
        return 1 + max(int(dataset.tensors[1].max()) for dataset in datasets)

    @property
    def has_classes(self) -> bool:
        """Whether the targets of the training data are class labels, one a sample."""
        return class_labels(self._datasets[0].tensors[1]) is not None

    @property
    def client_batch_size(self) -> int | None:
        """Default batch size of clients; `None` for the full batch."""
        return None

    @property
    def client_drop_last(self) -> bool:
        """Whether clients leave out a smaller last batch by default."""
        return False

    def client_datasets(self) -> dict[str, TensorDataset | Subset[Any]]:
        """Return every client's training data, by client id, in order."""
        return dict(self._clients)

    def setup(self, stage: str) -> None:
        """Load the data, if that has not happened yet."""
        self._datasets  # noqa: B018 - a cached property that loads

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return a shuffling loader of all clients' training data together."""
        return DataLoader(
            self.train_dataset,
            batch_size=self.batch_size,
            shuffle=True,
            generator=torch_generator(self.seed, "pooled-loader"),
        )

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return a loader of the test data.

        Raises:
            ConfigurationError: If there are no test data.
        """
        if self.test_dataset is None:
            raise ConfigurationError(f"{self!r} has no test data. HINT: let `load` return some.")
        return DataLoader(self.test_dataset, batch_size=self.batch_size)

    def __repr__(self) -> str:
        server = f", server_samples={self.server_samples}" if self.server_samples else ""
        if self.server_beta is not None:
            server += f", server_beta={self.server_beta}"
        return (
            f"{type(self).__name__}(num_clients={self.num_clients}, "
            f"partitioner={self.partitioner!r}, seed={self.seed}{server})"
        )

    __str__ = __repr__  # Lightning's would load the data to print it


def client_ids(num_clients: int) -> tuple[str, ...]:
    """Return `client-00`, `client-01`, ...: zero-padded, so that they sort by their numbers."""
    width = len(str(num_clients - 1))
    return tuple(f"client-{i:0{width}d}" for i in range(num_clients))


def class_labels(targets: Tensor) -> NDArray[np.int64] | None:
    """Return the class of every sample, shape $(N,)$; `None` if targets are no class labels."""
    if targets.numel() != len(targets):
        return None
    flat = targets.detach().flatten()
    if flat.is_floating_point() and not bool(((flat == 0) | (flat == 1)).all()):
        return None
    return flat.cpu().long().numpy()


def _rows(
    dataset: TensorDataset | Subset[Any], index: NDArray[np.integer[Any]]
) -> TensorDataset | Subset[Any]:
    """Return some samples of a data set."""
    # A subclass of `TensorDataset` may change samples in its `__getitem__`.
    if type(dataset) is not TensorDataset:
        return Subset(dataset, index.tolist())
    rows = torch.from_numpy(index)
    # Detached: of a tensor that requires a gradient, all steps would share one graph.
    return TensorDataset(*(tensor.detach()[rows] for tensor in dataset.tensors))


def check_dataset(source: str, dataset: object) -> None:
    """Raise `ConfigurationError` unless a data set has tensors of inputs and targets, and samples.

    `source` names the function that gave the data set.
    """
    form: object = type(dataset).__name__
    if isinstance(dataset, TensorDataset):
        form = [(t.dtype, tuple(t.shape)) for t in dataset.tensors]
        if len(dataset.tensors) == 2 and len(dataset) > 0:
            labels = class_labels(dataset.tensors[1])
            if labels is None or int(labels.min()) >= 0:
                return
            form = f"label {int(labels.min())}"
    raise ConfigurationError(
        f"Expected {source} to give a TensorDataset with inputs (N, ...) and targets (N, ...), "
        f"class labels of 0 or more among them, N >= 1, but got {form}."
    )
