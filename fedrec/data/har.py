"""Human activity recognition with smartphones, read from the files of the UCI repository."""

from __future__ import annotations

import io
import os
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from fedrec.data.datamodule import FederatedDataModule
from fedrec.data.partitioners.base import Partitioner
from fedrec.data.partitioners.by_user import ByUser
from fedrec.data.root import check_root, data_root
from fedrec.exceptions import ConfigurationError, expected
from fedrec.random import numpy_generator

__all__ = ["HAR"]

_FEATURES = 561
_FOLDER = "UCI HAR Dataset"
_OUTER = "human+activity+recognition+using+smartphones.zip"
_FILES = tuple(
    f"{part}/{x}_{part}.txt" for part in ("train", "test") for x in ("X", "y", "subject")
)

# A folder on the disk or in an archive.
_Place = Path | zipfile.Path


class _Samples(NamedTuple):
    inputs: NDArray[np.float32]
    labels: NDArray[np.int64]
    people: NDArray[np.int64]


class HAR(FederatedDataModule):
    r"""10,299 windows of smartphone signals of 30 people, 561 features each, 6 activities.

    The training and test data of the UCI repository are put together and split anew. Of every
    person's $m$ samples, $\lceil 0.75\, m \rceil$ are chosen at random as training data; the
    remaining samples of all people are the test data. By default every person is a client, in the
    order of their numbers. Features are used as shipped; activities 1 to 6 are labels 0 to 5.

    Nothing is downloaded: put `UCI HAR Dataset.zip`, or the folder in it, into `root/har` (`root`
    itself is searched, too). The repository's download,
    `human+activity+recognition+using+smartphones.zip`, has this archive inside, and may be put
    there as it is.

    Args:
        root: Data folder; `None` means the environment variable `FEDREC_DATA`, else `./data`.
        num_clients: Number of clients; with fewer than 30, a client stands for several people.
        partitioner: Splits the samples over clients; `None` keeps every person's samples together
            (`ByUser`).
        seed: Seed of the choice of training samples, of the partition, and of the choice of the
            server's samples.
        server_samples: Number of training samples for the server, see `FederatedDataModule`.
        server_beta: Label distribution of the server's samples, see `FederatedDataModule`.

    Raises:
        ConfigurationError: If an argument is out of range, or, on loading, if a file is missing or
            does not hold samples of HAR.

    References:
        - Anguita et al., A Public Domain Dataset for Human Activity Recognition Using Smartphones,
          ESANN 2013.
        - Cao et al., FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping,
          NDSS 2021 (people as clients, three quarters of the samples for training).

    Examples:
        >>> data = HAR(root="data")
        >>> data.num_clients, data.num_classes
        (30, 6)
    """

    def __init__(
        self,
        *,
        root: str | os.PathLike[str] | None = None,
        num_clients: int = 30,
        partitioner: Partitioner | None = None,
        seed: int = 0,
        server_samples: int = 0,
        server_beta: float | None = None,
    ) -> None:
        super().__init__(
            num_clients=num_clients,
            partitioner=partitioner,
            seed=seed,
            server_samples=server_samples,
            server_beta=server_beta,
        )
        check_root(root)
        self.root = root
        self._by_person = partitioner is None

    @property
    def num_classes(self) -> int:
        """6: walking, walking upstairs, walking downstairs, sitting, standing, laying."""
        return 6

    def load(self) -> tuple[TensorDataset, TensorDataset]:
        """Read the six files and split every person's samples."""
        samples = _read(self._find())
        is_train = np.zeros(len(samples.people), dtype=bool)
        for person in np.unique(samples.people).tolist():
            rows = np.flatnonzero(samples.people == person)
            draw = numpy_generator(self.seed, "train-samples", client_id=str(person))
            is_train[draw.permutation(rows)[: -(-3 * len(rows) // 4)]] = True
        if self._by_person:
            self.partitioner = ByUser(users=samples.people[is_train].tolist())
        inputs = torch.from_numpy(samples.inputs)
        labels = torch.from_numpy(samples.labels - 1)
        return (
            TensorDataset(inputs[is_train], labels[is_train]),
            TensorDataset(inputs[~is_train], labels[~is_train]),
        )

    def _find(self) -> _Place:
        """Return the folder that the files lie in."""
        root = data_root(self.root)
        for folder in (root / "har", root):
            for name in (f"{_FOLDER}.zip", _OUTER):
                if (folder / name).is_file():
                    return _open(folder / name)
            for place in (folder / _FOLDER, folder):
                if (place / "train").is_dir():
                    return place
        raise ConfigurationError(
            expected(
                "root",
                "a folder with the files of HAR",
                str(root),
                hint=f"put `{_FOLDER}.zip` of the UCI repository, or the folder in it, into "
                f"{root / 'har'}, or set `root` or the environment variable FEDREC_DATA to the "
                "folder that holds har.",
            )
        )

    def __repr__(self) -> str:
        text = super().__repr__()
        return text.replace(repr(self.partitioner), "None") if self._by_person else text

    __str__ = __repr__


def _open(archive: Path) -> zipfile.Path:
    """Return the folder of the files in an archive, or in the archive inside it."""
    try:
        inside = zipfile.Path(archive)
        if archive.name == _OUTER:
            inside = zipfile.Path(io.BytesIO((inside / f"{_FOLDER}.zip").read_bytes()))
        return inside / _FOLDER
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigurationError(
            f"Expected `{archive}` to be the archive of the UCI repository, but it cannot be read "
            f"({error}). HINT: copy the file again."
        ) from error


def _read(place: _Place) -> _Samples:
    missing = [name for name in _FILES if not (place / name).is_file()]
    if missing:
        raise ConfigurationError(
            f"Expected `{place}` to hold the {len(_FILES)} files of HAR, but there is no "
            f"{', '.join(missing)}. HINT: take all of them from the UCI repository's archive."
        )
    parts = []
    for x, y, subject in (_FILES[:3], _FILES[3:]):
        inputs = _numbers(place / x, np.float32, _FEATURES)
        labels, people = (_numbers(place / name, np.int64, 1)[:, 0] for name in (y, subject))
        if not 0 < len(inputs) == len(labels) == len(people):
            raise ConfigurationError(
                f"Expected as many lines in `{place / x}` as in `{place / y}` and "
                f"`{place / subject}`, and at least one, but got {len(inputs)}, {len(labels)} and "
                f"{len(people)}. HINT: take all three files from the same source."
            )
        if not 1 <= labels.min() <= labels.max() <= 6:
            raise ConfigurationError(
                f"Expected labels 1 to 6 in `{place / y}`, but got {labels.min()} to "
                f"{labels.max()}. HINT: use the files as the UCI repository has them."
            )
        parts.append((inputs, labels, people))
    return _Samples(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _numbers(file: _Place, dtype: type[np.generic], columns: int) -> NDArray[Any]:
    """Read a table of finite numbers with `columns` columns."""
    problem: object
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # an empty file is refused by the caller
            table = np.loadtxt(io.BytesIO(file.read_bytes()), dtype=dtype, ndmin=2)
    except (OSError, ValueError, OverflowError, zipfile.BadZipFile, zlib.error) as error:
        problem = error
    else:
        if not len(table):
            return table.reshape(0, columns)
        if table.shape[1] == columns and np.isfinite(table).all():
            return table
        problem = f"the shape {table.shape}"
        if table.shape[1] == columns:
            problem = "numbers that are not finite"
    raise ConfigurationError(
        f"Expected `{file}` to hold a line of {columns} finite number{'s' if columns > 1 else ''} "
        f"for every sample, but got {problem}. HINT: use the file as the UCI repository has it."
    )
