"""Contracts: tests that any component, ours or a user's, has to pass.

Subclass a contract in a test module, say how to make the component, and pytest does the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedrec._lazy import lazy

if TYPE_CHECKING:
    from fedrec.testing.aggregators import AggregatorContract
    from fedrec.testing.attacks import AttackContract
    from fedrec.testing.clients import ClientContract
    from fedrec.testing.detectors import DetectorContract
    from fedrec.testing.history import HistoryStoreContract
    from fedrec.testing.partitioners import PartitionerContract
    from fedrec.testing.recoverers import RecovererContract

__all__ = [
    "AggregatorContract",
    "AttackContract",
    "ClientContract",
    "DetectorContract",
    "HistoryStoreContract",
    "PartitionerContract",
    "RecovererContract",
]

# Lazy, so that testing an aggregation rule imports what aggregation rules need.
__getattr__, __dir__ = lazy(
    __name__,
    {
        "AggregatorContract": "fedrec.testing.aggregators",
        "AttackContract": "fedrec.testing.attacks",
        "ClientContract": "fedrec.testing.clients",
        "DetectorContract": "fedrec.testing.detectors",
        "HistoryStoreContract": "fedrec.testing.history",
        "PartitionerContract": "fedrec.testing.partitioners",
        "RecovererContract": "fedrec.testing.recoverers",
    },
)
