"""Every client passes the contract."""

import torch

from fedrec import Federation
from fedrec.clients import FakeClient
from fedrec.data import Digits
from fedrec.models import MLP
from fedrec.testing import ClientContract
from fedrec.testing.problems import classifying_federation, quadratic_federation


class TestLightningClient(ClientContract):
    def make_federation(self) -> Federation:
        torch.manual_seed(0)
        return Federation.from_data(
            Digits(num_clients=3), MLP(in_features=64, hidden=(8,)), batch_size=8
        )


class TestLightningClientSeveralSteps(ClientContract):
    def make_federation(self) -> Federation:
        torch.manual_seed(0)
        return Federation.from_data(
            Digits(num_clients=3), MLP(in_features=64, hidden=(8,)), batch_size=8, local_steps=3
        )


class TestQuadraticClient(ClientContract):
    def make_federation(self) -> Federation:
        return quadratic_federation()


class TestCountingClient(ClientContract):
    def make_federation(self) -> Federation:
        return classifying_federation()


class TestFakeClient(ClientContract):
    def make_federation(self) -> Federation:
        module = MLP(in_features=4, hidden=(2,))
        return Federation(
            [FakeClient("f0", num_samples=3), FakeClient("f1", num_samples=5)], module
        )
