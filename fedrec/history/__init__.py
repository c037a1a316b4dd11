"""History: what the server stored while training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedrec._lazy import lazy

if TYPE_CHECKING:
    from fedrec.history.base import HistoryStore
    from fedrec.history.codecs import Codec, Encoded, register_codec
    from fedrec.history.damage import Damage
    from fedrec.history.encryption import new_key
    from fedrec.history.export import Export, export_history
    from fedrec.history.forgetting import Forgetting, forget
    from fedrec.history.importing import Import, import_history
    from fedrec.history.lmdb import LMDBHistory
    from fedrec.history.maintenance import Compaction, Repair, compact, repair
    from fedrec.history.manifest import Manifest
    from fedrec.history.memory import MemoryHistory
    from fedrec.history.retention import Retention
    from fedrec.history.space import Forecast, forecast
    from fedrec.history.summary import HistoryInfo, info

__all__ = [
    "Codec",
    "Compaction",
    "Damage",
    "Encoded",
    "Export",
    "Forecast",
    "Forgetting",
    "HistoryInfo",
    "HistoryStore",
    "Import",
    "LMDBHistory",
    "Manifest",
    "MemoryHistory",
    "Repair",
    "Retention",
    "compact",
    "export_history",
    "forecast",
    "forget",
    "import_history",
    "info",
    "new_key",
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
        "Forgetting": "fedrec.history.forgetting",
        "Export": "fedrec.history.export",
        "Forecast": "fedrec.history.space",
        "HistoryInfo": "fedrec.history.summary",
        "HistoryStore": "fedrec.history.base",
        "Import": "fedrec.history.importing",
        "LMDBHistory": "fedrec.history.lmdb",
        "Manifest": "fedrec.history.manifest",
        "MemoryHistory": "fedrec.history.memory",
        "Repair": "fedrec.history.maintenance",
        "Retention": "fedrec.history.retention",
        "compact": "fedrec.history.maintenance",
        "forget": "fedrec.history.forgetting",
        "export_history": "fedrec.history.export",
        "forecast": "fedrec.history.space",
        "import_history": "fedrec.history.importing",
        "info": "fedrec.history.summary",
        "new_key": "fedrec.history.encryption",
        "register_codec": "fedrec.history.codecs",
        "repair": "fedrec.history.maintenance",
    },
)
