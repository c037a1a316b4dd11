"""Tools of a history: what they say is what is there, and they lose nothing that is whole."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest

from fedrec.exceptions import (
    HistoryCorruptedError,
    HistoryError,
    HistoryFormatError,
    HistoryLockedError,
)
from fedrec.history import LMDBHistory, Manifest, compact, info, repair
from fedrec.history.lmdb.records import StoredManifest
from fedrec.history.rounds import RoundArrays
from fedrec.history.tools import repair as maintenance

IDS = tuple(f"client-{i}" for i in range(5))
D = 2000
MANIFEST, WEIGHTS, AGGREGATE, ROUND = (2**32 - i for i in (5, 4, 3, 1))
PAGE = 4096


def damage_record(path: Path, t: int, index: int, byte: int = 60) -> None:
    """Flip a bit of the record of a round and index; small ones have stale copies too."""
    data = bytearray((path / "data.mdb").read_bytes())
    head = b"FREC.{4}" + re.escape(struct.pack("<II", t, index))
    places = [m.start() for m in re.finditer(head, bytes(data), re.DOTALL)]
    assert places
    for place in places:
        data[place + byte] ^= 1
    (path / "data.mdb").write_bytes(data)


def forge_round(path: Path, manifest: Manifest, t: int) -> None:
    """Replace a round record by one that is right in itself."""
    with lmdb.open(str(path), max_dbs=4, map_size=2**30) as env:
        db = env.open_db(b"rounds", create=False)
        with env.begin(write=True) as txn:
            record = txn.get(struct.pack(">II", t, ROUND), db=db)
            assert record is not None
            entry = json.loads(record[48:])
            entry["num_samples"][0] = 90
            forged, _ = StoredManifest("x", manifest).pack(
                t, ROUND, json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()
            )
            txn.put(struct.pack(">II", t, ROUND), forged, db=db)


def found(path: Path) -> list[tuple[int | None, str, str | None]]:
    with LMDBHistory(path) as history:
        return [(one.round, one.part, one.client_id) for one in history.damage()]


def files(path: Path) -> set[str]:
    return {p.name for p in path.iterdir()} - {"lock.mdb", "writer.lock"}


# -- what is damaged ------------------------------------------------------------------------------


def test_all_damage_is_named(recorded: Callable[..., Path]) -> None:
    path = recorded(num_rounds=5)
    assert found(path) == []
    damage_record(path, 1, 2)
    damage_record(path, 1, 4, byte=5)
    damage_record(path, 2, WEIGHTS)
    damage_record(path, 3, ROUND)
    damage_record(path, 4, 0)
    assert found(path) == [
        (1, "client `client-2`", "client-2"),
        (1, "client `client-4`", "client-4"),
        (2, "the global weights", None),
        (3, "the round record", None),
        (4, "client `client-0`", "client-0"),
    ]
    with pytest.raises(HistoryCorruptedError, match="round 1, client `client-2`"):
        LMDBHistory(path).verify()


def test_broken_chain_and_missing_round_are_named(
    recorded: Callable[..., Path], manifest: Manifest
) -> None:
    path = recorded(num_rounds=5)
    forge_round(path, manifest, 1)
    with lmdb.open(str(path), max_dbs=4, map_size=2**30) as env:
        rounds = env.open_db(b"rounds", create=False)
        with env.begin(write=True) as txn:
            txn.delete(struct.pack(">II", 3, ROUND), db=rounds)
    with LMDBHistory(path) as history:
        assert [str(one) for one in history.damage()] == [
            "round 2, the round record: the chain is broken, it does not follow the one before it",
            "round 3, the round record: it is missing",
        ]


# -- repair ---------------------------------------------------------------------------------------


def test_repair_of_a_whole_history_changes_nothing(recorded: Callable[..., Path]) -> None:
    path = recorded(num_rounds=2)
    before = (path / "data.mdb").read_bytes()
    done = repair(path)
    assert (done.damage, done.rounds_before, done.rounds, done.backups) == ((), 2, 2, ())
    assert (path / "data.mdb").read_bytes() == before
    assert files(path) == {"data.mdb"}


def test_repair_drops_a_damaged_update_alone(
    recorded: Callable[..., Path], arrays: Callable[..., RoundArrays], manifest: Manifest
) -> None:
    path = recorded(num_rounds=3)
    damage_record(path, 1, 2)
    damaged = (path / "data.mdb").read_bytes()
    done = repair(path)
    assert done.dropped == ((1, "client-2"),)
    assert (done.rounds_before, done.rounds) == (3, 3)
    assert (path / "data.mdb.damaged").read_bytes() == damaged
    assert files(path) == {"data.mdb", "data.mdb.damaged"}
    assert (path / "data.mdb").stat().st_mode & 0o777 == 0o600

    store = LMDBHistory(path)
    assert store.verify() == range(3)
    kept = tuple(c for c in IDS if c != "client-2")
    for t, ids in ((0, IDS), (1, kept), (2, IDS)):
        record, wanted = store.read(t), arrays(t, ids)
        assert record.client_ids == ids
        assert record.cohort == IDS
        np.testing.assert_array_equal(record.updates, wanted.updates)
        np.testing.assert_array_equal(record.global_weights, wanted.global_weights)
        np.testing.assert_array_equal(record.aggregate, wanted.aggregate)
        assert record.num_samples.tolist() == [10] * len(ids)
    assert store.read(1).refused == {"client-2": "damaged, dropped by a repair"}
    assert store.read(0).refused == {}
    assert list(store.index(1).bounds) == list(kept)
    # Another history: what was half recovered from the damaged one does not go on with it.
    now = store.manifest
    assert now.store_id != manifest.store_id
    assert dataclasses.replace(now, store_id=manifest.store_id) == manifest
    store.append(arrays(3))
    assert store.verify() == range(4)
    store.close()
    assert list(info(path).repairs) == [
        {"rounds_before": 3, "rounds": 3, "dropped": [[1, "client-2"]]}
    ]


@pytest.mark.parametrize("index", [WEIGHTS, AGGREGATE, ROUND])
def test_repair_keeps_the_rounds_before_one_that_cannot_be_replayed(
    recorded: Callable[..., Path], arrays: Callable[..., RoundArrays], index: int
) -> None:
    path = recorded(num_rounds=5)
    damage_record(path, 0, 1)
    damage_record(path, 3, index)
    damage_record(path, 4, 1)
    done = repair(path)
    assert (done.rounds_before, done.rounds, done.dropped) == (5, 3, ((0, "client-1"),))
    assert len(done.damage) == 3
    store = LMDBHistory(path)
    assert store.verify() == range(3)
    np.testing.assert_array_equal(store.read(2).updates, arrays(2).updates)
    store.append(arrays(3))
    store.close()


def test_repair_trusts_neither_side_of_a_broken_chain(
    recorded: Callable[..., Path], manifest: Manifest
) -> None:
    path = recorded(num_rounds=4)
    forge_round(path, manifest, 1)
    assert repair(path).rounds == 1
    assert LMDBHistory(path).verify() == range(1)


def test_repair_of_a_round_without_any_whole_update(recorded: Callable[..., Path]) -> None:
    path = recorded(num_rounds=2)
    for index in range(5):
        damage_record(path, 1, index)
    assert repair(path).dropped == tuple((1, c) for c in IDS)
    with LMDBHistory(path) as history:
        assert history.index(1).present == ()
        assert history.read_round(1).updates.shape == (0, D)
        assert history.verify() == range(2)


def test_repair_leaves_what_it_cannot_repair(recorded: Callable[..., Path]) -> None:
    path = recorded(num_rounds=2)
    damage_record(path, 0, WEIGHTS)
    before = (path / "data.mdb").read_bytes()
    with pytest.raises(HistoryCorruptedError, match="no round would be left: round 0, the global"):
        repair(path)
    os.truncate(path / "data.mdb", 5 * PAGE)
    with pytest.raises(HistoryCorruptedError, match="has 20480 bytes"):
        repair(path)
    assert (path / "data.mdb").read_bytes() == before[: 5 * PAGE]
    assert files(path) == {"data.mdb"}


def test_repairs_add_up_and_no_backup_is_overwritten(recorded: Callable[..., Path]) -> None:
    path = recorded(num_rounds=3)
    damage_record(path, 0, 3)
    repair(path)
    damage_record(path, 2, AGGREGATE)
    with pytest.raises(HistoryError, match=r"still in .*data\.mdb\.damaged"):
        repair(path)
    (path / "data.mdb.damaged").unlink()
    repair(path)
    assert list(info(path).repairs) == [
        {"rounds_before": 3, "rounds": 3, "dropped": [[0, "client-3"]]},
        {"rounds_before": 3, "rounds": 2, "dropped": []},
    ]
    damage_record(path, 0, 2**32 - 6)
    assert found(path) == [(None, "the list of repairs", None)]


def test_repair_keeps_lossy_updates_bit_for_bit(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> None:
    store = LMDBHistory(tmp_path, codec="int8")
    store.begin(manifest)
    for t in range(2):
        store.append(arrays(t))
    before = store.read(1, IDS[1:]).updates
    bounds = store.index(1).bounds
    store.close()
    damage_record(tmp_path, 1, 0)
    repair(tmp_path)
    np.testing.assert_array_equal(store.read(1).updates, before)
    assert store.index(1).bounds == {c: bounds[c] for c in IDS[1:]}
    store.close()


# -- compact --------------------------------------------------------------------------------------


def bloat(path: Path, num_bytes: int = 100 * PAGE) -> None:
    """Leave free pages in the file."""
    with lmdb.open(str(path), max_dbs=4, map_size=2**30) as env:
        db = env.open_db(b"meta", create=False)
        with env.begin(write=True) as txn:
            txn.put(b"x", bytes(num_bytes), db=db)
        with env.begin(write=True) as txn:
            txn.delete(b"x", db=db)


def test_compact_gives_free_pages_back(
    recorded: Callable[..., Path], arrays: Callable[..., RoundArrays]
) -> None:
    path = recorded(num_rounds=3)
    bloat(path)
    free = info(path).free_bytes
    assert free >= 100 * PAGE
    done = compact(path)
    assert done.bytes_before - done.bytes_after == free
    assert (path / "data.mdb").stat().st_size == done.bytes_after
    assert (path / "data.mdb").stat().st_mode & 0o777 == 0o600
    assert info(path).free_bytes == 0
    assert files(path) == {"data.mdb"}
    store = LMDBHistory(path)
    assert store.verify() == range(3)
    np.testing.assert_array_equal(store.read(2).updates, arrays(2).updates)
    store.append(arrays(3))
    assert store.verify() == range(4)
    store.close()


def test_compact_leaves_a_damaged_history_as_it_is(recorded: Callable[..., Path]) -> None:
    path = recorded(num_rounds=3)
    damage_record(path, 2, 1)
    before = (path / "data.mdb").read_bytes()
    with pytest.raises(HistoryCorruptedError, match=r"round 2, client `client-1`.*repair"):
        compact(path)
    assert (path / "data.mdb").read_bytes() == before
    assert files(path) == {"data.mdb"}


@pytest.mark.parametrize("tool", ["compact", "repair"])
@pytest.mark.parametrize("moment", ["check", "before", "after"])
def test_kill_leaves_the_old_or_the_new_file(
    recorded: Callable[..., Path], run_script: Callable[..., str], tool: str, moment: str
) -> None:
    path = recorded(num_rounds=3)
    bloat(path)
    if tool == "repair":
        damage_record(path, 1, 2)
    before = (path / "data.mdb").read_bytes()
    code = """
import os, signal, sys
from fedrec.history.lmdb import environment
from fedrec.history.tools import repair as maintenance
path, tool, moment = sys.argv[1:]
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
pid = os.fork()
if pid == 0:
    put = maintenance.put_in_place
    if moment == "check":
        maintenance._require_whole = die
    maintenance.put_in_place = lambda *a: (moment == "after" and put(*a), die())
    getattr(maintenance, tool)(path)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert run_script(code, path, tool, moment).strip() == "-9"
    now = (path / "data.mdb").read_bytes()
    assert (now == before) == (moment != "after")
    getattr(maintenance, tool)(path)  # goes through now, and leaves nothing of the killed one
    assert files(path) <= {"data.mdb", "data.mdb.damaged"}
    assert LMDBHistory(path).verify() == range(3)


# -- alone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", [compact, repair])
def test_a_history_in_use_is_left_alone(
    recorded: Callable[..., Path],
    arrays: Callable[..., RoundArrays],
    tool: Callable[[Path], object],
    run_script: Callable[..., str],
) -> None:
    path = recorded(num_rounds=1)
    before = (path / "data.mdb").stat()
    store = LMDBHistory(path)
    assert store.rounds() == range(1)
    with pytest.raises(HistoryLockedError, match="is used by another store or process"):
        tool(path)
    code = """
import sys
from fedrec.exceptions import HistoryLockedError
from fedrec.history.tools import repair as maintenance
try:
    getattr(maintenance, sys.argv[2])(sys.argv[1])
except HistoryLockedError as error:
    print(error)
"""
    assert "is used by another" in run_script(code, path, tool.__name__)
    store.append(arrays(1))
    with pytest.raises(HistoryLockedError, match="is being written by this process"):
        tool(path)
    assert f"another process ({os.getpid()})" in run_script(code, path, tool.__name__)
    assert (path / "data.mdb").stat().st_ino == before.st_ino
    store.close()
    tool(path)
    assert LMDBHistory(path).verify() == range(2)


def test_nobody_opens_a_history_that_is_rewritten(
    recorded: Callable[..., Path], run_script: Callable[..., str]
) -> None:
    path = recorded(num_rounds=1)
    code = """
import sys
from fedrec.exceptions import HistoryLockedError
from fedrec.history import LMDBHistory
try:
    LMDBHistory(sys.argv[1]).rounds()
except HistoryLockedError as error:
    print(error)
"""
    seen = []
    compact(path, progress=lambda left: seen.append((left, run_script(code, path))))
    assert [left for left, _ in seen] == [0]
    assert "is being compacted or repaired" in seen[0][1]
    assert run_script(code, path) == ""


# -- info -----------------------------------------------------------------------------------------


def test_info_counts(recorded: Callable[..., Path], manifest: Manifest) -> None:
    path = recorded(num_rounds=3)
    damage_record(path, 1, 2)  # updates are not read
    one = info(path)
    assert (one.num_rounds, one.max_rounds, one.num_clients, one.num_updates) == (3, 100, 5, 15)
    assert (one.num_parameters, one.codec, one.max_error) == (D, "float32", 0.0)
    assert one.clients == tuple(manifest.clients)
    assert one.model_fingerprint == manifest.model_fingerprint
    assert one.num_bytes == (path / "data.mdb").stat().st_size
    # 48 + 8,000 bytes take two pages; one page lists the 15.
    assert one.bytes_per_parameter == (15 * 2 * PAGE + PAGE) / (15 * D)
    assert one.repairs == ()
    assert json.loads(json.dumps(one.to_dict()))["path"] == str(path)


def test_info_expects_what_all_rounds_take(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> None:
    store = LMDBHistory(tmp_path)
    store.begin(dataclasses.replace(manifest, max_rounds=12))
    store.close()
    before = info(tmp_path).expected_bytes
    assert info(tmp_path).bytes_per_parameter is None
    for t in range(12):
        store.append(arrays(t))
        if t == 3:
            store.close()
            expected = info(tmp_path).expected_bytes
    store.close()
    after = compact(tmp_path).bytes_after
    assert info(tmp_path).expected_bytes == after
    assert expected == pytest.approx(after, rel=0.05)
    assert after < before < after + 2**19


def test_info_has_the_largest_error_bound(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> None:
    store = LMDBHistory(tmp_path, codec="int8")
    store.begin(manifest)
    largest = off = 0.0
    for t in range(2):
        sent = arrays(t)
        store.append(sent)
        off = max(off, np.abs(store.read(t).updates - sent.updates).max())
        largest = max(largest, np.abs(sent.updates).max())
    store.close()
    # Half a step of the loudest block; bfloat16 rounds the step by up to 2^-8.
    assert off <= info(tmp_path).max_error <= largest / 127 / 2 * 1.01


def test_run_folder_stands_for_its_history(recorded: Callable[..., Path]) -> None:
    path = recorded(num_rounds=1, name="history")
    assert info(path.parent).path == str(path)
    assert compact(path.parent).bytes_after == (path / "data.mdb").stat().st_size
    with pytest.raises(HistoryFormatError, match=r"Nothing has been recorded in `.*none`"):
        info(path / "none")
    with pytest.raises(HistoryFormatError, match="Nothing has been recorded"):
        repair(path / "none")
    assert not (path / "none").exists()
