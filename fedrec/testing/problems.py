"""Small federations for tests, whose updates can be computed by hand or are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fedrec.clients.base import Client
from fedrec.clients.lightning import LightningClient
from fedrec.federation import Federation
from fedrec.models import MLP
from fedrec.types import ClientUpdate, RoundContext

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "CountingClient",
    "QuadraticClient",
    "VectorModule",
    "classifying_federation",
    "quadratic_federation",
]


class VectorModule(pl.LightningModule):
    """A model that is nothing but a vector of parameters.

    Args:
        size: $d$.
    """

    def __init__(self, *, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


class QuadraticClient(Client):
    r"""A client with loss $\frac12 (w - c)^\top A (w - c)$, and so the update $A (w - c)$.

    Args:
        client_id: Unique name.
        hessian: $A$, shape $(d, d)$.
        centre: $c$, shape $(d,)$.
        num_samples: The client's weight.
    """

    def __init__(
        self, client_id: str, hessian: Tensor, centre: Tensor, *, num_samples: int = 1
    ) -> None:
        super().__init__(client_id, num_samples=num_samples)
        self.hessian = hessian
        self.centre = centre
        self.rounds_asked: list[int] = []

    def local_update(self, global_weights: Tensor, ctx: RoundContext) -> ClientUpdate:
        """Return the gradient, and note the round in `rounds_asked`."""
        self.rounds_asked.append(ctx.round)
        update = self.hessian @ (global_weights - self.centre)
        return ClientUpdate(update=update, num_samples=self.num_samples)


def quadratic_federation(
    num_clients: int = 5, size: int = 4, num_malicious: int = 1, seed: int = 0, **kwargs: Any
) -> Federation:
    """Return a federation of strongly convex quadratic clients.

    Eigenvalues lie between 0.5 and 2, so a `server_lr` up to 0.5 converges. The last
    `num_malicious` clients are marked as malicious.

    Args:
        num_clients: $n$.
        size: $d$.
        num_malicious: Number of malicious clients.
        seed: Seed of Hessians and centres.
        **kwargs: Further arguments of `Federation`.
    """
    generator = np.random.default_rng(seed)
    clients = []
    for i in range(num_clients):
        basis, _ = np.linalg.qr(generator.normal(size=(size, size)))
        hessian = basis @ np.diag(generator.uniform(0.5, 2.0, size)) @ basis.T
        centre = generator.normal(size=size)
        clients.append(
            QuadraticClient(
                f"q{i}",
                hessian=torch.from_numpy(hessian).float(),
                centre=torch.from_numpy(centre).float(),
                num_samples=1 + i,
            )
        )
    malicious = [c.client_id for c in clients[num_clients - num_malicious :]]
    return Federation(clients, VectorModule(size=size), malicious=malicious, **kwargs)


class CountingClient(LightningClient):
    """A LightningClient that notes the rounds in which it was asked, in `rounds_asked`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rounds_asked: list[int] = []

    def with_dataset(self, dataset: Dataset[Any]) -> Self:
        """Return a copy of the client with other data, and with a list of rounds of its own."""
        client = super().with_dataset(dataset)
        client.rounds_asked = []
        return client

    def local_update(self, global_weights: Tensor, ctx: RoundContext) -> ClientUpdate:
        """Train, and note the round in `rounds_asked`."""
        self.rounds_asked.append(ctx.round)
        return super().local_update(global_weights, ctx)


def classifying_federation(
    num_clients: int = 5, num_malicious: int = 1, seed: int = 0, **kwargs: Any
) -> Federation:
    """Return a federation of LightningClients with 12 samples of 3 classes each, 30 at the server.

    The last `num_malicious` clients are marked as malicious.

    Args:
        num_clients: $n$.
        num_malicious: Number of malicious clients.
        seed: Seed of data and initial weights.
        **kwargs: Further arguments of `Federation`.
    """
    generator = torch.Generator().manual_seed(seed)
    module = MLP(in_features=4, hidden=(5,), num_classes=3, lr=0.1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def samples(count: int) -> TensorDataset:
        x = torch.randn(count, 4, generator=generator)
        return TensorDataset(x, x[:, :3].argmax(dim=1))

    clients = [
        CountingClient(f"c{i}", module, samples(12), batch_size=4) for i in range(num_clients)
    ]
    malicious = [c.client_id for c in clients[num_clients - num_malicious :]]
    return Federation(clients, module, malicious=malicious, server_data=samples(30), **kwargs)
