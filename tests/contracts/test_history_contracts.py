"""The contracts of history stores and codecs, over every one there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedrec.history import Codec, HistoryStore, LMDBHistory, Manifest, MemoryHistory, ShardedHistory
from fedrec.history.codecs import CODECS
from fedrec.testing import HistoryStoreContract
from fedrec.testing.codecs import CodecContract


class TestLMDBHistory(HistoryStoreContract):
    def make(self, path: Path) -> HistoryStore:
        return LMDBHistory(path)


class TestLMDBHistoryWithFloat16(HistoryStoreContract):
    codec = "float16"
    tolerance = 2**-11

    def make(self, path: Path) -> HistoryStore:
        return LMDBHistory(path, codec="float16")


class TestLMDBHistoryWithInt8Zstd(HistoryStoreContract):
    codec = "int8+zstd"
    tolerance = 0.5 / 126

    def make(self, path: Path) -> HistoryStore:
        return LMDBHistory(path, codec="int8+zstd")


class TestLMDBHistoryWithZstd(HistoryStoreContract):
    codec = "zstd"

    def make(self, path: Path) -> HistoryStore:
        return LMDBHistory(path, codec="zstd")


class TestShardedHistory(HistoryStoreContract):
    num_shards = 3

    def make(self, path: Path) -> HistoryStore:
        return ShardedHistory(path)

    def manifest(self, **changes: Any) -> Manifest:
        num_shards = min(self.num_shards, len(changes.get("clients", self.client_ids)))
        return super().manifest(execution={"num_shards": num_shards}, **changes)


class TestShardedHistoryOfOneShard(TestShardedHistory):
    num_shards = 1


class TestShardedHistoryOfUnequalShards(TestShardedHistory):
    num_shards = 4  # of 2, 1, 2 and 1 clients


class TestShardedHistoryWithInt8(TestShardedHistory):
    codec = "int8"
    tolerance = 0.5 / 126

    def make(self, path: Path) -> HistoryStore:
        return ShardedHistory(path, codec="int8")


class TestMemoryHistory(HistoryStoreContract):
    persistent = False

    def make(self, path: Path) -> HistoryStore:
        return MemoryHistory()


class TestFloat32(CodecContract):
    def make(self) -> Codec:
        return CODECS["float32"]


class TestLz4(CodecContract):
    def make(self) -> Codec:
        return CODECS["lz4"]


class TestZstd(CodecContract):
    def make(self) -> Codec:
        return CODECS["zstd"]


class TestFloat16(CodecContract):
    relative_error = 2**-11

    def make(self) -> Codec:
        return CODECS["float16"]


class TestInt8(CodecContract):
    relative_error = 0.01

    def make(self) -> Codec:
        return CODECS["int8"]


class TestInt8Zstd(CodecContract):
    stable = False  # the coarser the entries, the coarser the median step
    relative_error = 0.02

    def make(self) -> Codec:
        return CODECS["int8+zstd"]


class TestSign(CodecContract):
    relative_error = 1.0

    def make(self) -> Codec:
        return CODECS["sign"]
