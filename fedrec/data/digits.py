"""Scikit-learn's bundled digits."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import TensorDataset

from fedrec._checks import check_float
from fedrec.data.datamodule import FederatedDataModule
from fedrec.data.partitioners.base import Partitioner
from fedrec.random import numpy_generator

__all__ = ["Digits"]


class Digits(FederatedDataModule):
    """1,797 images of handwritten digits, 8 by 8 pixels, that come with scikit-learn.

    The data set for quick starts and tests: small, and installed with fedrec. Pixels are in [0, 1],
    images have shape $(1, 8, 8)$. The choice of test data depends on `test_fraction` only, so that
    runs with different seeds are tested on the same images.

    Args:
        num_clients: Number of clients.
        partitioner: Splits the samples over clients; `None` for `IIDPartitioner()`.
        test_fraction: Fraction of the samples kept for testing, in (0, 1).
        seed: Seed of the partition, and of the choice of the server's samples.
        server_samples: Number of training samples for the server, see `FederatedDataModule`.
        server_beta: Label distribution of the server's samples, see `FederatedDataModule`.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
          Repository, 1998.

    Examples:
        >>> digits = Digits(num_clients=4)
        >>> [len(dataset) for dataset in digits.client_datasets().values()]
        [337, 337, 337, 337]
        >>> len(digits.test_dataset), digits.num_classes
        (449, 10)
    """

    def __init__(
        self,
        *,
        num_clients: int = 20,
        partitioner: Partitioner | None = None,
        test_fraction: float = 0.25,
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
        self.test_fraction = check_float(
            "test_fraction",
            test_fraction,
            minimum=0.0,
            maximum=1.0,
            open_minimum=True,
            open_maximum=True,
        )

    @property
    def num_classes(self) -> int:
        """10."""
        return 10

    def load(self) -> tuple[TensorDataset, TensorDataset]:
        """Return training and test images with their labels."""
        from sklearn.datasets import load_digits  # takes a second to import

        pixels, labels = load_digits(return_X_y=True)
        images = torch.from_numpy((pixels / 16).astype(np.float32)).reshape(-1, 1, 8, 8)
        targets = torch.from_numpy(labels.astype(np.int64))
        order = torch.from_numpy(numpy_generator(0, "digits").permutation(len(targets)))
        num_test = min(max(round(len(order) * self.test_fraction), 1), len(order) - 1)
        test, train = order[:num_test], order[num_test:]
        return (
            TensorDataset(images[train], targets[train]),
            TensorDataset(images[test], targets[test]),
        )
