"""The bytes on disk, read without the code that wrote them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import xxhash

from fedrec.history import LMDBHistory, Manifest
from fedrec.history.rounds import RoundArrays

WEIGHTS, AGGREGATE, BUFFERS, ROUND = (2**32 - i for i in (4, 3, 2, 1))


def contents(path: Path) -> dict[str, dict[tuple[int, int], bytes]]:
    found = {}
    with lmdb.open(str(path), max_dbs=4, map_size=2**30) as env:
        for name in ("meta", "models", "updates", "rounds"):
            db = env.open_db(name.encode(), create=False)
            with env.begin() as txn:
                found[name] = {struct.unpack(">II", k): v for k, v in txn.cursor(db)}
    return found


def check_record(
    record: bytes, t: int, index: int, *, codec: int, dtype: int, size: int, store_id: str
) -> bytes:
    fields = struct.unpack("<4sHBBIIQ16sQ", record[:48])
    key = struct.pack(">II", t, index)
    checksum = xxhash.xxh3_64_intdigest(record[:40] + key + record[48:])
    assert fields == (
        *(b"FREC", 1, codec, dtype, t, index, size),
        bytes.fromhex(store_id),
        checksum,
    )
    return record[48:]


def test_layout(
    recorded: Callable[..., Path], manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> None:
    found = contents(recorded(num_rounds=3))
    d, store_id = manifest.num_parameters, manifest.store_id
    assert list(found["updates"]) == [(t, i) for t in range(3) for i in range(5)]
    assert list(found["models"]) == [(t, i) for t in range(3) for i in (WEIGHTS, AGGREGATE)]
    assert list(found["rounds"]) == [(t, ROUND) for t in range(3)]
    vectors = {"codec": 1, "dtype": 1, "size": d, "store_id": store_id}
    for t in range(3):
        written = arrays(t)
        for i, update in enumerate(written.updates):
            record = found["updates"][t, i]
            assert check_record(record, t, i, **vectors) == struct.pack(f"<{d}f", *update)
        for index, vector in ((WEIGHTS, written.global_weights), (AGGREGATE, written.aggregate)):
            record = found["models"][t, index]
            assert check_record(record, t, index, **vectors) == struct.pack(f"<{d}f", *vector)


def test_round_records_are_chained(recorded: Callable[..., Path], manifest: Manifest) -> None:
    found = contents(recorded(num_rounds=3))
    (previous,) = found["meta"].values()
    for t in range(3):
        record = found["rounds"][t, ROUND]
        text = check_record(
            record, t, ROUND, codec=0, dtype=0, size=len(record) - 48, store_id=manifest.store_id
        )
        entry = json.loads(text)
        assert json.dumps(entry, sort_keys=True, separators=(",", ":")).encode() == text
        assert entry["previous"] == hashlib.sha256(previous).hexdigest()
        previous = record


def test_round_record(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> None:
    store = LMDBHistory(tmp_path)
    store.begin(manifest)
    reasons = {"client-1": "non-finite"}
    record = arrays(0, ("client-4", "client-0"), num_samples=np.array([7, 8]), refused=reasons)
    record = RoundArrays(**{**vars(record), "cohort": ("client-1", "client-4", "client-0")})
    store.append(record)
    store.close()
    found = contents(tmp_path)

    def checksum(database: str, index: int) -> str:
        (value,) = struct.unpack("<Q", found[database][0, index][40:48])
        return f"{value:016x}"

    entry: dict[str, Any] = json.loads(found["rounds"][0, ROUND][48:])
    execution = b'{"executor":"SequentialExecutor","threads":1}'
    del entry["previous"]
    assert entry == {
        "round": 0,
        "execution": hashlib.sha256(execution).hexdigest(),
        "cohort": [1, 4, 0],
        "present": [4, 0],
        "num_samples": [7, 8],
        "bounds": [float(abs(update).max()) for update in record.updates],
        "refused": [[1, "non-finite"]],
        "updates": [checksum("updates", 4), checksum("updates", 0)],
        "max_error": None,
        "global_weights": checksum("models", WEIGHTS),
        "aggregate": checksum("models", AGGREGATE),
        "buffers": None,
        "departure": None,
    }
    assert list(found["updates"]) == [(0, 0), (0, 4)]


def test_same_rounds_give_the_same_bytes(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> None:
    for name, rounds_a_time in (("a", 4), ("b", 1)):
        store = LMDBHistory(tmp_path / name)
        store.begin(manifest)
        for t in range(4):
            store.append(arrays(t))
            if (t + 1) % rounds_a_time == 0:
                store.close()
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_files_are_private(recorded: Callable[..., Path]) -> None:
    path = recorded(num_rounds=1)
    assert sorted(p.name for p in path.iterdir()) == ["data.mdb", "lock.mdb", "writer.lock"]
    assert {p.stat().st_mode & 0o777 for p in path.iterdir()} == {0o600}


@pytest.mark.parametrize("version", ["0", "1"])
def test_environment_does_not_choose_the_engine(
    recorded: Callable[..., Path],
    tmp_path: Path,
    run_script: Callable[..., str],
    version: str,
) -> None:
    code = """
import sys
from fedrec.history import LMDBHistory
old, new = map(LMDBHistory, sys.argv[1:])
assert old.verify() == range(1)
new.begin(old.manifest)
"""
    new = tmp_path / "new-history"
    run_script(code, recorded(num_rounds=1), new, LMDB_DEFAULT_LIB_VERSION=version)
    magic, data_version = struct.unpack("=II", (new / "data.mdb").read_bytes()[16:24])
    assert (magic, data_version) == (0xBEEFC0DE, 1)


def test_arrays_are_written_and_read_without_torch(
    recorded: Callable[..., Path], run_script: Callable[..., str]
) -> None:
    code = """
import sys
from dataclasses import replace
from fedrec.history import HistoryStore, HistoryView, LMDBHistory, MemoryHistory, info
with LMDBHistory(sys.argv[1]) as history:
    copy = MemoryHistory()
    copy.begin(history.manifest)
    for t in history.rounds():
        copy.append(history.read(t))
        assert HistoryView(copy).kept(t) == history.index(t).kept
    history.append(replace(copy.read(0), round=2))
    assert history.verify() == range(3)
assert info(sys.argv[1]).num_rounds == 3
assert 'torch' not in sys.modules
"""
    run_script(code, recorded(num_rounds=2))
