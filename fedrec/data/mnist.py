"""MNIST, read from its original files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from fedrec._checks import check_int
from fedrec.data.datamodule import FederatedDataModule
from fedrec.data.idx import read_idx
from fedrec.data.partitioners.base import Partitioner
from fedrec.data.root import check_root, data_root
from fedrec.exceptions import ConfigurationError, expected
from fedrec.random import numpy_generator

__all__ = ["MNIST"]

_TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


class MNIST(FederatedDataModule):
    """60,000 training and 10,000 test images of handwritten digits, 28 by 28 pixels.

    Pixels are divided by 255, without any other normalisation; images have shape $(1, 28, 28)$.
    Nothing is downloaded: put the four IDX files, gzipped or not, into `root/mnist`
    (`root/MNIST/raw` and `root` itself are searched, too).

    Args:
        root: Data folder; `None` means the environment variable `FEDREC_DATA`, else `./data`.
        num_clients: Number of clients.
        partitioner: Splits the samples over clients; `None` for `IIDPartitioner()`.
        seed: Seed of the partition, and of the choice of `max_samples` and the server's samples.
        max_samples: Keep this many training samples at most, drawn at random; `None` keeps all.
        server_samples: Number of training samples for the server, see `FederatedDataModule`.
        server_beta: Label distribution of the server's samples, see `FederatedDataModule`.

    Raises:
        ConfigurationError: If an argument is out of range, or, on loading, if a file is missing or
            damaged.

    References:
        - LeCun et al., Gradient-Based Learning Applied to Document Recognition, Proc. IEEE 1998.

    Examples:
        >>> MNIST(root="data", num_clients=20, max_samples=6000).num_classes
        10
    """

    #: Folders below `root` that are searched for the files, in this order.
    folders: ClassVar[tuple[str, ...]] = ("mnist", "MNIST/raw", ".")

    def __init__(
        self,
        *,
        root: str | os.PathLike[str] | None = None,
        num_clients: int = 100,
        partitioner: Partitioner | None = None,
        seed: int = 0,
        max_samples: int | None = None,
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
        if max_samples is not None:
            max_samples = check_int("max_samples", max_samples, minimum=1)
        self.root = root
        self.max_samples = max_samples

    @property
    def num_classes(self) -> int:
        """10."""
        return 10

    def load(self) -> tuple[TensorDataset, TensorDataset]:
        """Return training and test images with their labels, read from the four files."""
        files = self._find()
        images, labels = self._read(files, _TRAIN)
        if self.max_samples is not None:
            order = numpy_generator(self.seed, "max_samples").permutation(len(labels))
            images, labels = (a[order[: self.max_samples]] for a in (images, labels))
        return _dataset(images, labels), _dataset(*self._read(files, _TEST))

    def _find(self) -> dict[str, Path]:
        """Return the path of each of the four files, by name without `.gz`."""
        root = data_root(self.root)
        missing: list[list[str]] = []
        for folder in self.folders:
            paths = {}
            for name in _TRAIN + _TEST:
                candidates = (root / folder / f"{name}.gz", root / folder / name)
                path = next((path for path in candidates if path.is_file()), None)
                if path is not None:
                    paths[name] = path
            if len(paths) == 4:
                return paths
            missing.append([name for name in _TRAIN + _TEST if name not in paths])
        nearest = min(range(len(missing)), key=lambda i: len(missing[i]))
        raise ConfigurationError(
            expected(
                "root",
                f"a folder with the files of {type(self).__name__}",
                str(root),
                hint=f"put {', '.join(f'{name}.gz' for name in missing[nearest])} (or the same "
                f"without .gz) into {root / self.folders[nearest]}, or set `root` or the "
                "environment variable FEDREC_DATA to the folder that holds "
                f"{self.folders[0]}.",
            )
        )

    @staticmethod
    def _read(
        files: dict[str, Path], names: tuple[str, str]
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        paths = [files[name] for name in names]
        images, labels = (read_idx(path) for path in paths)
        _check(paths[0], images, images.shape[1:] == (28, 28), "images of shape (N, 28, 28)")
        _check(paths[1], labels, labels.ndim == 1, "labels of shape (N,)")
        if not 0 < len(images) == len(labels):
            raise ConfigurationError(
                f"Expected as many images as labels, but got {len(images)} in `{paths[0]}` and "
                f"{len(labels)} in `{paths[1]}`. HINT: take both files from the same source."
            )
        if labels.max() > 9:
            raise ConfigurationError(
                f"Expected labels 0 to 9 in `{paths[1]}`, but got {labels.max()}."
            )
        return images, labels


def _check(path: Path, array: NDArray[Any], fits: bool, requirement: str) -> None:
    if array.dtype != np.uint8 or not fits:
        raise ConfigurationError(
            f"Expected `{path}` to hold {requirement}, one byte each, "
            f"but got {array.dtype} of shape {array.shape}."
        )


def _dataset(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> TensorDataset:
    x = torch.from_numpy(images.astype(np.float32)).div_(255).unsqueeze_(1)
    return TensorDataset(x, torch.from_numpy(labels.astype(np.int64)))
