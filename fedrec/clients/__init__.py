"""Clients: who computes updates on local data."""

from fedrec.clients.base import Client
from fedrec.clients.fake import FakeClient
from fedrec.clients.lightning import LightningClient
from fedrec.clients.objective import LocalObjective, LocalWork

__all__ = ["Client", "FakeClient", "LightningClient", "LocalObjective", "LocalWork"]
