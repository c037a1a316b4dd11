"""Fashion-MNIST, read from its original files."""

from __future__ import annotations

from typing import ClassVar

from fedrec.data.mnist import MNIST

__all__ = ["FashionMNIST"]


class FashionMNIST(MNIST):
    """60,000 training and 10,000 test images of clothes, 28 by 28 pixels, 10 classes.

    The files have the same names as those of MNIST: put them into `root/fashion_mnist`
    (`root/FashionMNIST/raw` and `root` itself are searched, too). Everything else is as in `MNIST`.

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
        - Xiao et al., Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
          Algorithms, arXiv:1708.07747, 2017.

    Examples:
        >>> FashionMNIST(root="data", num_clients=20).num_classes
        10
    """

    folders: ClassVar[tuple[str, ...]] = ("fashion_mnist", "FashionMNIST/raw", ".")
