"""History: what the server stored while training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedrec._lazy import lazy

if TYPE_CHECKING:
    from fedrec.history.base import HistoryStore
    from fedrec.history.codecs import Codec, Encoded, register_codec
    from fedrec.history.lmdb import LMDBHistory
    from fedrec.history.manifest import Manifest
    from fedrec.history.memory import MemoryHistory

__all__ = [
    "Codec",
    "Encoded",
    "HistoryStore",
    "LMDBHistory",
    "Manifest",
    "MemoryHistory",
    "register_codec",
]

# Lazy, so that the on-disk core can be used without importing torch.
__getattr__, __dir__ = lazy(
    __name__,
    {
        "Codec": "fedrec.history.codecs",
        "Encoded": "fedrec.history.codecs",
        "HistoryStore": "fedrec.history.base",
        "LMDBHistory": "fedrec.history.lmdb",
        "Manifest": "fedrec.history.manifest",
        "MemoryHistory": "fedrec.history.memory",
        "register_codec": "fedrec.history.codecs",
    },
)
