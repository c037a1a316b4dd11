"""The contract of history stores, over every store there is."""

from __future__ import annotations

from pathlib import Path

from fedrec.history import HistoryStore, LMDBHistory, MemoryHistory
from fedrec.testing import HistoryStoreContract


class TestLMDBHistory(HistoryStoreContract):
    def make(self, path: Path) -> HistoryStore:
        return LMDBHistory(path)


class TestMemoryHistory(HistoryStoreContract):
    persistent = False

    def make(self, path: Path) -> HistoryStore:
        return MemoryHistory()
