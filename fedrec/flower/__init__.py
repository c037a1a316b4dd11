"""fedrec for Flower: record what live clients send, and recover by asking few of them again.

On the server, a `FlowerExecutor` computes a loop's rounds by messages to clients, or a
`RecordingStrategy` records what any strategy of Flower's does. On the clients, `make_client_app`
answers. Everything here needs Flower: `pip install "fedrec[flower]"`.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from fedrec._lazy import lazy
from fedrec.exceptions import MissingDependencyError

if importlib.util.find_spec("flwr") is None:
    raise MissingDependencyError(
        'fedrec.flower needs Flower, which is not installed. HINT: pip install "fedrec[flower]".'
    )

if TYPE_CHECKING:
    from fedrec.flower.client_app import make_client_app
    from fedrec.flower.credentials import node_key_fingerprint
    from fedrec.flower.executor import FlowerExecutor
    from fedrec.flower.local import LocalFederation
    from fedrec.flower.strategy import RecordingStrategy
    from fedrec.flower.warm import WarmProcess

__all__ = [
    "FlowerExecutor",
    "LocalFederation",
    "RecordingStrategy",
    "WarmProcess",
    "make_client_app",
    "node_key_fingerprint",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "FlowerExecutor": "fedrec.flower.executor",
        "LocalFederation": "fedrec.flower.local",
        "RecordingStrategy": "fedrec.flower.strategy",
        "WarmProcess": "fedrec.flower.warm",
        "make_client_app": "fedrec.flower.client_app",
        "node_key_fingerprint": "fedrec.flower.credentials",
    },
)
