"""History: what the server stored while training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedrec._lazy import lazy

if TYPE_CHECKING:
    from fedrec.history.base import HistoryStore
    from fedrec.history.codecs import Codec, Encoded, register_codec
    from fedrec.history.damage import Damage
    from fedrec.history.lmdb import LMDBHistory
    from fedrec.history.maintenance import Compaction, Repair, compact, repair
    from fedrec.history.manifest import Manifest
    from fedrec.history.memory import MemoryHistory
    from fedrec.history.summary import HistoryInfo, info

__all__ = [
    "Codec",
    "Compaction",
    "Damage",
    "Encoded",
    "HistoryInfo",
    "HistoryStore",
    "LMDBHistory",
    "Manifest",
    "MemoryHistory",
    "Repair",
    "compact",
    "info",
    "register_codec",
    "repair",
]

# Lazy, so that the on-disk core can be used without importing torch.
__getattr__, __dir__ = lazy(
    __name__,
    {
        "Codec": "fedrec.history.codecs",
        "Compaction": "fedrec.history.maintenance",
        "Damage": "fedrec.history.damage",
        "Encoded": "fedrec.history.codecs",
        "HistoryInfo": "fedrec.history.summary",
        "HistoryStore": "fedrec.history.base",
        "LMDBHistory": "fedrec.history.lmdb",
        "Manifest": "fedrec.history.manifest",
        "MemoryHistory": "fedrec.history.memory",
        "Repair": "fedrec.history.maintenance",
        "compact": "fedrec.history.maintenance",
        "info": "fedrec.history.summary",
        "register_codec": "fedrec.history.codecs",
        "repair": "fedrec.history.maintenance",
    },
)
