"""The federations that the benchmarks work with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fedrec.data import MNIST, Digits, FederatedDataModule
from fedrec.exceptions import ConfigurationError
from fedrec.federation import Federation
from fedrec.models import CNN, HARMLP, MLP, Classifier, PurchaseMLP

__all__ = ["WORKLOADS", "workload"]


class Clusters(FederatedDataModule):
    """Gaussian clusters, one per class: a stand-in of the right shape where no data are at hand."""

    def __init__(
        self, shape: tuple[int, ...], num_classes: int, num_clients: int, samples: int = 200
    ) -> None:
        super().__init__(num_clients=num_clients)
        self.shape, self.classes, self.samples = shape, num_classes, samples

    def load(self) -> tuple[TensorDataset, TensorDataset]:
        """Draw training and test samples."""
        generator = torch.Generator().manual_seed(0)
        centres = torch.rand(self.classes, *self.shape, generator=generator)

        def draw(size: int) -> tuple[Tensor, Tensor]:
            labels = torch.randint(self.classes, (size,), generator=generator)
            noise = torch.randn(size, *self.shape, generator=generator)
            return centres[labels] + 0.5 * noise, labels

        return (
            TensorDataset(*draw(self.samples * self.num_clients)),
            TensorDataset(*draw(1000)),
        )


def _mnist(num_clients: int, shape: tuple[int, ...]) -> FederatedDataModule:
    """Return MNIST where it is (`FEDREC_DATA`), clusters elsewhere."""
    data = MNIST(num_clients=num_clients)
    try:
        _ = data.test_dataset
    except ConfigurationError:
        return Clusters(shape, 10, num_clients)
    return data


WORKLOADS = ("cnn", "mlp", "har", "purchase", "digits")


def workload(
    name: str, num_clients: int, *, malicious: float = 0.2, batch_size: int = 32
) -> Federation:
    """Make a federation: one mini-batch of plain SGD per client and round.

    Args:
        name: One of `WORKLOADS`: the paper's networks, a small one for MNIST, one for digits.
        num_clients: Number of clients.
        malicious: Fraction of malicious clients.
        batch_size: Samples per mini-batch.
    """
    data: FederatedDataModule
    model: Classifier
    torch.manual_seed(0)
    if name == "cnn":
        data, model = _mnist(num_clients, (1, 28, 28)), CNN()
    elif name == "mlp":
        data, model = _mnist(num_clients, (1, 28, 28)), MLP(in_features=784, hidden=[100])
    elif name == "har":
        data, model = Clusters((561,), 6, num_clients), HARMLP()
    elif name == "purchase":
        data, model = Clusters((600,), 100, num_clients), PurchaseMLP()
    else:
        data, model = Digits(num_clients=num_clients), MLP(in_features=64)
    return Federation.from_data(data, model, malicious=malicious, batch_size=batch_size)
