"""What server and clients share: the model, the data, and how clients train."""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import Context

from fedrec.attacks import LabelFlip
from fedrec.data import Digits
from fedrec.models import MLP
from fedrec.random import key

#: Local training of every client: one step of SGD on 32 samples a round.
TRAINING: dict[str, Any] = {"batch_size": 32, "local_steps": 1}


def make_module(context: Context | None = None) -> MLP:
    """Return the model, with the initial weights that a recipe with seed 0 gives it."""
    torch.manual_seed(key(0, "model") % 2**63)
    return MLP(in_features=64)


def make_data(context: Context | None = None) -> Digits:
    """Return the data.

    Replace it: on a client by that client's own data set or LightningDataModule, on the server by
    test data. Here all clients have a part of one bundled data set.
    """
    if context is not None and context.node_config.get("flip-labels"):
        return FlippedLabels(str(context.node_config["client-id"]))
    return Digits(num_clients=5)


class FlippedLabels(Digits):
    """The data as a client with wrong labels has them: an attacker to try the recovery with."""

    def __init__(self, client_id: str) -> None:
        super().__init__(num_clients=5)
        self.client_id = client_id

    def client_datasets(self) -> dict[str, Any]:
        """Return the data of each client."""
        clients = super().client_datasets()
        poison = LabelFlip(num_classes=10).poison_dataset
        return {**clients, self.client_id: poison(clients[self.client_id], self.client_id)}
