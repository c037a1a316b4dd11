"""fedrec: federated learning, poisoned, detected, recovered, compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedrec._lazy import lazy

if TYPE_CHECKING:
    from fedrec.aggregators import Aggregator
    from fedrec.attacks import Attack
    from fedrec.callbacks import Callback
    from fedrec.clients import Client, LightningClient
    from fedrec.detectors import Detector
    from fedrec.federation import ClientSampler, Federation
    from fedrec.history import HistoryStore
    from fedrec.loop import FederatedLoop
    from fedrec.recoverers import Recoverer

__version__ = "0.1.0"

__all__ = [
    "Aggregator",
    "Attack",
    "Callback",
    "Client",
    "ClientSampler",
    "Detector",
    "FederatedLoop",
    "Federation",
    "HistoryStore",
    "LightningClient",
    "Recoverer",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Aggregator": "fedrec.aggregators",
        "Attack": "fedrec.attacks",
        "Callback": "fedrec.callbacks",
        "Client": "fedrec.clients",
        "ClientSampler": "fedrec.federation",
        "Detector": "fedrec.detectors",
        "FederatedLoop": "fedrec.loop",
        "Federation": "fedrec.federation",
        "HistoryStore": "fedrec.history",
        "LightningClient": "fedrec.clients",
        "Recoverer": "fedrec.recoverers",
    },
)
