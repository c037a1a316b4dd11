"""What server and clients share: the model, the data, and how clients train."""

import torch

from fedrec.attacks import LabelFlip
from fedrec.data import Digits
from fedrec.models import MLP

#: Local training of every client: one step of SGD on 32 samples a round.
TRAINING = {"batch_size": 32, "local_steps": 1}


def make_module(context=None):
    """Return the model, with the same initial weights every time."""
    torch.manual_seed(0)
    return MLP(in_features=64)


def make_data(context=None):
    """Return the data.

    Replace it: on a client by that client's own data set or LightningDataModule, on the server by
    test data. Here all clients have a part of one bundled data set.
    """
    data = Digits(num_clients=5)
    if context is not None and context.node_config.get("flip-labels"):
        poison(data, str(context.node_config["client-id"]))
    return data


def poison(data, client_id):
    """Let a client of the data train on wrong labels: an attacker to try the recovery with."""
    clients = data.client_datasets()
    clients[client_id] = LabelFlip(num_classes=10).poison_dataset(clients[client_id], client_id)
    data.client_datasets = lambda: clients
