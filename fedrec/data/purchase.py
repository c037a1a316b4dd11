"""Purchase: records of what customers bought, and a synthetic stand-in of the same shape."""

from __future__ import annotations

import os
import zipfile
from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from fedrec._checks import check_int
from fedrec.data.datamodule import FederatedDataModule
from fedrec.data.partitioners.base import Partitioner
from fedrec.data.root import check_root, data_root
from fedrec.exceptions import ConfigurationError, expected
from fedrec.random import numpy_generator, torch_generator

__all__ = ["Purchase", "PurchaseSynthetic"]

_FEATURES, _CLASSES = 600, 100
_RECORDS, _TRAIN = 197_324, 180_000
_NAMES = ("dataset_purchase", "dataset_purchase.csv", "purchase100.npz")

# The distance between the classes of the stand-in, and the spread of their sizes.
_SIGNAL, _IMBALANCE = 0.45, 0.6


class _Records(FederatedDataModule):
    """A data set of binary features, kept as bytes and given to clients as float32."""

    def __init__(
        self,
        *,
        num_clients: int,
        partitioner: Partitioner | None,
        seed: int,
        num_train: int,
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
        self.num_train = check_int("num_train", num_train, minimum=1)

    @abstractmethod
    def records(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return features $(N, 600)$ and labels $(N,)$ of all records."""

    @property
    def num_classes(self) -> int:
        """100."""
        return _CLASSES

    def load(self) -> tuple[TensorDataset, TensorDataset]:
        """Return training and test records; training records are chosen at random."""
        features, labels = self.records()
        if len(labels) <= self.num_train:
            raise ConfigurationError(
                expected(
                    "num_train", f"fewer than the {len(labels)} records there are", self.num_train
                )
            )
        order = numpy_generator(self.seed, "train-samples").permutation(len(labels))
        train, test = (np.sort(part) for part in np.split(order, [self.num_train]))
        return _dataset(features, labels, train), _floats(_dataset(features, labels, test))

    @cached_property
    def _clients(self) -> dict[str, TensorDataset | Subset[Any]]:
        return {name: _floats(dataset) for name, dataset in super()._clients.items()}

    @cached_property
    def server_dataset(self) -> TensorDataset | None:
        """The clean data at the server, which no client holds; `None` without `server_samples`."""
        dataset = super().server_dataset
        return None if dataset is None else _floats(dataset)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return a shuffling loader of all clients' training data together."""
        return DataLoader(
            _floats(self.train_dataset),
            batch_size=self.batch_size,
            shuffle=True,
            generator=torch_generator(self.seed, "pooled-loader"),
        )


class Purchase(_Records):
    """197,324 records of what customers bought, 600 binary features, 100 classes.

    180,000 records chosen at random are training data, the others test data. Nothing is downloaded:
    put one of two files into `root/purchase` (`root` itself is searched, too). `dataset_purchase`,
    as distributed for membership inference, has a line a record: the class from 1 to 100, then 600
    times 0 or 1, with commas between. `purchase100.npz` has arrays `features` and `labels`, the
    labels as numbers from 0 or one-hot. Other files named Purchase have other classes.

    Features are kept as bytes (118 MB) and become float32 (432 MB) on the clients.

    Args:
        root: Data folder; `None` means the environment variable `FEDREC_DATA`, else `./data`.
        num_clients: Number of clients.
        partitioner: Who holds what; `None` means `IIDPartitioner()`, equal parts.
        seed: Seed of the choice of training records, of the partition, and of the choice of the
            server's records.
        num_train: Records to train on; the others are for testing.
        server_samples: Number of training records for the server, see `FederatedDataModule`.
        server_beta: Label distribution of the server's records, see `FederatedDataModule`.

    Raises:
        ConfigurationError: If an argument is out of range, or, on loading, if the file is missing
            or does not hold records of Purchase.

    References:
        - Shokri et al., Membership Inference Attacks Against Machine Learning Models, IEEE S&P
          2017.
        - Cao et al., FedRecover, IEEE S&P 2023.

    Examples:
        >>> Purchase(root="data", num_clients=100).num_classes
        100
    """

    def __init__(
        self,
        *,
        root: str | os.PathLike[str] | None = None,
        num_clients: int = 100,
        partitioner: Partitioner | None = None,
        seed: int = 0,
        num_train: int = _TRAIN,
        server_samples: int = 0,
        server_beta: float | None = None,
    ) -> None:
        super().__init__(
            num_clients=num_clients,
            partitioner=partitioner,
            seed=seed,
            num_train=num_train,
            server_samples=server_samples,
            server_beta=server_beta,
        )
        check_root(root)
        self.root = root

    def records(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the records of the file."""
        root = data_root(self.root)
        paths = [folder / name for folder in (root / "purchase", root) for name in _NAMES]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise ConfigurationError(
                expected(
                    "root",
                    "a folder with the file of Purchase",
                    str(root),
                    hint=f"put `{_NAMES[0]}` or `{_NAMES[-1]}` into {root / 'purchase'}, or set "
                    "`root` or the environment variable FEDREC_DATA to the folder that holds "
                    "purchase. `PurchaseSynthetic` is a stand-in that needs no file.",
                )
            )
        features, labels = _read_npz(path) if path.suffix == ".npz" else _read_lines(path)
        if features.shape[1:] != (_FEATURES,) or labels.shape != features.shape[:1]:
            raise _other(path, f"features {features.shape} and labels {labels.shape}")
        if not len(labels) or features.max() > 1:
            raise _other(path, "no record" if not len(labels) else f"a {features.max()}")
        if not 0 <= labels.min() <= labels.max() < _CLASSES:
            raise _other(path, f"classes {labels.min()} to {labels.max()}, counted from 0")
        return features, labels


class PurchaseSynthetic(_Records):
    r"""A synthetic stand-in for `Purchase`, of the same shape: not real data.

    Use it where the file of Purchase is not at hand. Results say that the data are synthetic; they
    do not apply to Purchase itself. A record of class $c$ has feature $j$ with probability
    $\sigma(a_j + 0.45\, z_{cj})$, independently. The popularity $a_j \sim N(-1.5, 1)$ of a feature
    and the taste $z_{cj} \sim N(0, 1)$ of a class are drawn once. The sizes of the classes are
    proportional to $\exp(0.6\, N(0, 1))$. The records are the same for every seed.

    Args:
        num_clients: Number of clients.
        partitioner: Who holds what; `None` means `IIDPartitioner()`, equal parts.
        seed: Seed of the choice of training records, of the partition, and of the choice of the
            server's records.
        num_train: Records to train on; the others are for testing.
        num_records: Records in all. A smaller number gives the first records of a larger one.
        server_samples: Number of training records for the server, see `FederatedDataModule`.
        server_beta: Label distribution of the server's records, see `FederatedDataModule`.

    Raises:
        ConfigurationError: If an argument is out of range.

    Examples:
        >>> data = PurchaseSynthetic(num_clients=4, num_train=80, num_records=100)
        >>> data.client_datasets()["client-0"].tensors[0].shape, data.synthetic
        (torch.Size([20, 600]), True)
    """

    synthetic: ClassVar[bool] = True

    def __init__(
        self,
        *,
        num_clients: int = 100,
        partitioner: Partitioner | None = None,
        seed: int = 0,
        num_train: int = _TRAIN,
        num_records: int = _RECORDS,
        server_samples: int = 0,
        server_beta: float | None = None,
    ) -> None:
        super().__init__(
            num_clients=num_clients,
            partitioner=partitioner,
            seed=seed,
            num_train=num_train,
            server_samples=server_samples,
            server_beta=server_beta,
        )
        self.num_records = check_int("num_records", num_records, minimum=2)

    def records(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Draw the records."""
        draw = numpy_generator(0, "purchase-classes")
        popularity = draw.normal(-1.5, 1.0, _FEATURES)
        taste = draw.normal(0.0, 1.0, (_CLASSES, _FEATURES))
        probability = (1 / (1 + np.exp(-popularity - _SIGNAL * taste))).astype(np.float32)
        sizes = np.exp(_IMBALANCE * draw.normal(0.0, 1.0, _CLASSES))
        ends = np.cumsum(sizes / sizes.sum())[:-1]
        labels = np.searchsorted(
            ends, numpy_generator(0, "purchase-labels").random(self.num_records), side="right"
        )
        features = np.empty((self.num_records, _FEATURES), dtype=np.uint8)
        draw = numpy_generator(0, "purchase-features")
        for start in range(0, self.num_records, 10_000):  # chunks: the draws are four times larger
            chunk = slice(start, start + 10_000)
            below = probability[labels[chunk]]
            features[chunk] = draw.random(below.shape, dtype=np.float32) < below
        return features, labels.astype(np.int64)


def _read_lines(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    rows, labels = [], []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            label, _, rest = line.strip().partition(b",")
            # Every other byte is a digit: ten times as fast as parsing numbers.
            row = np.frombuffer(rest, dtype=np.uint8)
            whole = len(row) == 2 * _FEATURES - 1 and (row[1::2] == ord(",")).all()
            if not (whole and label.strip(b'"').isdigit() and len(label) < 8):
                raise _other(path, f"{line[:40]!r}... in line {number}")
            rows.append(row[::2] - np.uint8(ord("0")))
            labels.append(int(label.strip(b'"')) - 1)
    features = np.array(rows, dtype=np.uint8).reshape(len(rows), -1 if rows else _FEATURES)
    return features, np.array(labels, dtype=np.int64)


def _read_npz(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            stored, labels = archive["features"], archive["labels"]
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise _other(path, f"no arrays `features` and `labels` ({error})") from error
    if labels.ndim == 2 and labels.shape[1] == _CLASSES and (labels.sum(axis=1) == 1).all():
        labels = labels.argmax(axis=1)
    features = stored.astype(np.uint8)
    if stored.dtype.kind not in "buif" or labels.dtype.kind not in "iu":
        raise _other(path, f"features of {stored.dtype} and labels of {labels.dtype}")
    if not np.array_equal(features, stored):
        raise _other(path, "features that are neither 0 nor 1")
    return features, labels.astype(np.int64)


def _other(path: Path, content: str) -> ConfigurationError:
    """Return the error for a file with other content than records of Purchase."""
    return ConfigurationError(
        f"Expected `{path}` to hold records of a class, of {_CLASSES}, and {_FEATURES} features of "
        f"0 or 1, but got {content}. HINT: use the file with 600 features and 100 classes."
    )


def _dataset(features: Any, labels: Any, index: NDArray[np.int64]) -> TensorDataset:
    return TensorDataset(torch.from_numpy(features[index]), torch.from_numpy(labels[index]))


def _floats(dataset: Any) -> TensorDataset:
    features, labels = dataset.tensors
    return TensorDataset(features.float(), labels)
