"""History: what the server stored while training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedrec._lazy import lazy

if TYPE_CHECKING:
    from fedrec._derived import register_derived
    from fedrec.history.base import HistoryStore
    from fedrec.history.codecs import Codec, Encoded, register_codec
    from fedrec.history.lmdb.damage import Damage
    from fedrec.history.lmdb.encryption import new_key
    from fedrec.history.lmdb.history import LMDBHistory
    from fedrec.history.lmdb.space import Forecast, forecast
    from fedrec.history.manifest import Manifest
    from fedrec.history.memory import MemoryHistory
    from fedrec.history.retention import Retention
    from fedrec.history.rounds import RoundArrays, RoundIndex
    from fedrec.history.sharded import ShardedHistory
    from fedrec.history.tools.export import Export, export_history
    from fedrec.history.tools.forget import Forgetting, forget
    from fedrec.history.tools.importing import Import, import_history
    from fedrec.history.tools.info import HistoryInfo, info
    from fedrec.history.tools.repair import Compaction, Repair, compact, repair
    from fedrec.history.tools.sharding import Conversion, merge_history, shard_history
    from fedrec.history.view import HistoryView

__all__ = [
    "Codec",
    "Compaction",
    "Conversion",
    "Damage",
    "Encoded",
    "Export",
    "Forecast",
    "Forgetting",
    "HistoryInfo",
    "HistoryStore",
    "HistoryView",
    "Import",
    "LMDBHistory",
    "Manifest",
    "MemoryHistory",
    "Repair",
    "Retention",
    "RoundArrays",
    "RoundIndex",
    "ShardedHistory",
    "compact",
    "export_history",
    "forecast",
    "forget",
    "import_history",
    "info",
    "merge_history",
    "new_key",
    "register_codec",
    "register_derived",
    "repair",
    "shard_history",
]

# Lazy, so that the on-disk core can be used without importing torch.
__getattr__, __dir__ = lazy(
    __name__,
    {
        "Codec": "fedrec.history.codecs",
        "Compaction": "fedrec.history.tools.repair",
        "Conversion": "fedrec.history.tools.sharding",
        "Damage": "fedrec.history.lmdb.damage",
        "Encoded": "fedrec.history.codecs",
        "Forgetting": "fedrec.history.tools.forget",
        "Export": "fedrec.history.tools.export",
        "Forecast": "fedrec.history.lmdb.space",
        "HistoryInfo": "fedrec.history.tools.info",
        "HistoryStore": "fedrec.history.base",
        "HistoryView": "fedrec.history.view",
        "Import": "fedrec.history.tools.importing",
        "LMDBHistory": "fedrec.history.lmdb.history",
        "Manifest": "fedrec.history.manifest",
        "MemoryHistory": "fedrec.history.memory",
        "Repair": "fedrec.history.tools.repair",
        "Retention": "fedrec.history.retention",
        "RoundArrays": "fedrec.history.rounds",
        "RoundIndex": "fedrec.history.rounds",
        "ShardedHistory": "fedrec.history.sharded",
        "compact": "fedrec.history.tools.repair",
        "forget": "fedrec.history.tools.forget",
        "export_history": "fedrec.history.tools.export",
        "forecast": "fedrec.history.lmdb.space",
        "import_history": "fedrec.history.tools.importing",
        "info": "fedrec.history.tools.info",
        "new_key": "fedrec.history.lmdb.encryption",
        "register_codec": "fedrec.history.codecs",
        "register_derived": "fedrec._derived",
        "repair": "fedrec.history.tools.repair",
        "merge_history": "fedrec.history.tools.sharding",
        "shard_history": "fedrec.history.tools.sharding",
    },
)
