"""What was not written is never returned: flipped bits, cut files, records in another's place."""

from __future__ import annotations

import json
import os
import re
import struct
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from fedrec.exceptions import ConfigurationError, HistoryCorruptedError, HistoryFormatError
from fedrec.history import LMDBHistory, Manifest
from fedrec.history.lmdb import records as recording
from fedrec.history.lmdb.records import StoredManifest, canonical
from fedrec.history.rounds import RoundArrays

WEIGHTS, AGGREGATE, ROUND = (2**32 - i for i in (4, 3, 1))
RECORDS = [
    (1, 0, "client `client-0`"),
    (1, 4, "client `client-4`"),
    (1, WEIGHTS, "the global weights"),
    (1, AGGREGATE, "the aggregate"),
    (1, ROUND, "the round record"),
]


@contextmanager
def database(path: Path, name: str) -> Iterator[tuple[lmdb.Transaction[bytes], Any]]:
    with lmdb.open(str(path), max_dbs=4, map_size=2**30) as env:
        db = env.open_db(name.encode(), create=False)
        with env.begin(write=True) as txn:
            yield txn, db


def key(t: int, index: int) -> bytes:
    return struct.pack(">II", t, index)


def offsets(data: bytes, t: int, index: int) -> list[int]:
    """Return where records of a round and client lie; small ones have stale copies too."""
    middle = struct.pack("<II", t, index)
    return [m.start() for m in re.finditer(b"FREC.{4}" + re.escape(middle), data, re.DOTALL)]


def flip(path: Path, places: list[int], bit: int) -> None:
    with (path / "data.mdb").open("r+b") as file:
        for place in places:
            file.seek(place + bit // 8)
            byte = file.read(1)[0]
            file.seek(place + bit // 8)
            file.write(bytes([byte ^ 1 << bit % 8]))


def read_all(path: Path) -> dict[int, str]:
    """Return what goes wrong, by round."""
    errors = {}
    store = LMDBHistory(path)
    for t in range(3):
        try:
            store.read(t)
        except HistoryCorruptedError as error:
            errors[t] = str(error)
    store.close()
    return errors


@pytest.mark.parametrize(("t", "index", "name"), RECORDS)
def test_any_flipped_bit_is_found(
    recorded: Callable[..., Path], t: int, index: int, name: str
) -> None:
    path = recorded(num_rounds=3)
    places = offsets((path / "data.mdb").read_bytes(), t, index)
    assert places
    generator = np.random.default_rng(index)
    payload_bits = 8 * 350 if index == ROUND else 8 * 8000
    header = range(0, 48 * 8, 5)
    payload = 48 * 8 + generator.integers(payload_bits, size=30)
    for bit in (*header, *payload.tolist()):
        flip(path, places, bit)
        errors = read_all(path)
        assert list(errors) == [t]
        assert f"round {t}, {name}" in errors[t]
        flip(path, places, bit)
    assert read_all(path) == {}


def test_flipped_bit_in_the_manifest_is_found(recorded: Callable[..., Path]) -> None:
    path = recorded(num_rounds=1)
    (place,) = offsets((path / "data.mdb").read_bytes(), 0, 2**32 - 5)
    for bit in range(0, 8 * 200, 7):
        flip(path, [place], bit)
        # A damaged magic number is not told from a foreign file.
        error = HistoryFormatError if bit < 32 else HistoryCorruptedError
        with pytest.raises(error):
            LMDBHistory(path).read(0)
        flip(path, [place], bit)
    assert LMDBHistory(path).verify() == range(1)


def test_flipped_bit_in_a_key_is_found(recorded: Callable[..., Path]) -> None:
    path = recorded(num_rounds=3)
    data = (path / "data.mdb").read_bytes()
    places = [m.start() for m in re.finditer(re.escape(key(1, 2)), data)]
    flip(path, places, 8 * 7 + 5)  # client 2 becomes client 34
    errors = read_all(path)
    assert list(errors) == [1]
    assert "round 1, client `client-2`" in errors[1]
    assert "missing" in errors[1]


def test_swapped_clients_are_found(recorded: Callable[..., Path]) -> None:
    path = recorded(num_rounds=3)
    with database(path, "updates") as (txn, db):
        a, b = txn.get(key(1, 2), db=db), txn.get(key(1, 3), db=db)
        assert a is not None
        assert b is not None
        txn.put(key(1, 2), b, db=db)
        txn.put(key(1, 3), a, db=db)
    store = LMDBHistory(path)
    wrong = r"round 1, client `client-2`.* client_index 3 instead of 2"
    with pytest.raises(HistoryCorruptedError, match=wrong):
        store.read(1)
    with pytest.raises(HistoryCorruptedError, match=r"round 1, client `client-3`"):
        store.read(1, ["client-3"])
    assert store.read(1, ["client-0", "client-4"]).updates.shape == (2, 2000)
    store.close()


def test_swapped_rounds_are_found(recorded: Callable[..., Path]) -> None:
    path = recorded(num_rounds=3)
    for name, index in (("updates", 2), ("models", WEIGHTS), ("rounds", ROUND)):
        with database(path, name) as (txn, db):
            good = txn.get(key(0, index), db=db)
            other = txn.get(key(2, index), db=db)
            assert good is not None
            assert other is not None
            txn.put(key(0, index), other, db=db)
        errors = read_all(path)
        assert list(errors) == [0]
        assert "header says round 2 instead of 0" in errors[0]
        with database(path, name) as (txn, db):
            txn.put(key(0, index), good, db=db)
    assert read_all(path) == {}


def test_record_of_another_history_is_found(
    recorded: Callable[..., Path],
    tmp_path: Path,
    manifest: Manifest,
    arrays: Callable[..., RoundArrays],
) -> None:
    path = recorded(num_rounds=3)
    other = LMDBHistory(tmp_path / "other")
    other.begin(replace(manifest, store_id=uuid.uuid4().hex))
    other.append(arrays(0))
    other.close()
    with database(other.path, "updates") as (txn, db):
        foreign = txn.get(key(0, 2), db=db)
        assert foreign is not None
    with database(path, "updates") as (txn, db):
        txn.put(key(0, 2), foreign, db=db)
    assert "header says store_id" in read_all(path)[0]


def test_value_of_another_commit_is_found(
    recorded: Callable[..., Path], manifest: Manifest
) -> None:
    """A record that is right in itself, but not the one that the round was committed with."""
    path = recorded(num_rounds=3)
    vector = np.zeros(2000, np.float32)
    forged, _ = StoredManifest("x", manifest).pack(
        1, 2, memoryview(vector.tobytes()), codec=1, dtype=1, size=2000
    )
    with database(path, "updates") as (txn, db):
        txn.put(key(1, 2), forged, db=db)
    errors = read_all(path)
    assert list(errors) == [1]
    assert "round 1, client `client-2`" in errors[1]
    assert "not the one the round was committed with" in errors[1]


def test_forged_round_record_breaks_the_chain(
    recorded: Callable[..., Path], manifest: Manifest
) -> None:
    path = recorded(num_rounds=3)
    with database(path, "rounds") as (txn, db):
        record = txn.get(key(1, ROUND), db=db)
        assert record is not None
        text = record[48:].replace(b'"num_samples":[10,', b'"num_samples":[90,')
        forged, _ = StoredManifest("x", manifest).pack(1, ROUND, text)
        txn.put(key(1, ROUND), forged, db=db)
    store = LMDBHistory(path)
    assert store.read(1).num_samples.tolist() == [90, 10, 10, 10, 10]
    with pytest.raises(HistoryCorruptedError, match=r"round 2, the round record.*does not follow"):
        store.verify()
    store.close()


@pytest.mark.parametrize(
    ("codec", "name", "value"),
    [
        ("float32", "bounds", [1.0, None, 1.0, 1.0, 1.0]),
        ("float32", "max_error", [0.5] * 5),
        ("int8", "max_error", [0.5, None, 0.5, 0.5, 0.5]),
        ("int8", "max_error", None),
    ],
)
def test_round_record_that_does_not_say_how_far_off_an_update_is(
    tmp_path: Path,
    manifest: Manifest,
    arrays: Callable[..., RoundArrays],
    codec: str,
    name: str,
    value: object,
) -> None:
    """Who reads the bounds relies on one for each update that is stored."""
    store = LMDBHistory(tmp_path, codec=codec)
    store.begin(manifest)
    store.append(arrays(0))
    recording = store._open()[0]
    store.close()
    with database(tmp_path, "rounds") as (txn, db):
        record = txn.get(key(0, ROUND), db=db)
        assert record is not None
        entry = {**json.loads(record[48:]), name: value}
        forged, _ = recording.pack(0, ROUND, canonical(entry))
        txn.put(key(0, ROUND), forged, db=db)
    with pytest.raises(
        HistoryCorruptedError, match=rf"round 0, the round record.*({name}|NoneType)"
    ):
        store.index(0)
    store.close()


def test_deleted_round_is_found(recorded: Callable[..., Path]) -> None:
    path = recorded(num_rounds=3)
    with database(path, "rounds") as (txn, db):
        txn.delete(key(1, ROUND), db=db)
    with pytest.raises(HistoryCorruptedError, match="lacks rounds before round 2"):
        LMDBHistory(path).rounds()


def test_records_behind_the_last_round_are_no_trap(
    recorded: Callable[..., Path], arrays: Callable[..., RoundArrays]
) -> None:
    """LMDB drops a value whose key is out of order; a store must not report it as written."""
    path = recorded(num_rounds=3)
    store = LMDBHistory(path)
    store.append(arrays(3))
    environment = store._open()[1]
    with environment.write(0) as txn:
        environment.append(txn, "models", key(9, WEIGHTS), b"x")
    with pytest.raises(HistoryCorruptedError, match="behind its last round"):
        store.append(arrays(4))
    assert store.rounds() == range(4)
    store.append(arrays(4))  # what is behind the last round is removed by now
    assert store.verify() == range(5)
    store.close()


def test_cut_file_is_an_error_not_a_crash(
    recorded: Callable[..., Path], run_script: Callable[..., str]
) -> None:
    path = recorded(num_rounds=3)
    size = (path / "data.mdb").stat().st_size
    lengths = [0, 1, 151, 4096, 8191, 8192, 12288, size - 4096, size - 1]
    lengths += np.random.default_rng(0).integers(size, size=30).tolist()
    # Reading beyond the end of a mapped file kills the process: hence another one.
    code = """
import os, sys
from fedrec.exceptions import HistoryCorruptedError
from fedrec.history import LMDBHistory
data = open(sys.argv[1] + "/data.mdb", "rb").read()
for length in map(int, sys.argv[2:]):
    with open(sys.argv[1] + "/data.mdb", "wb") as file:
        file.write(data[:length])
    store = LMDBHistory(sys.argv[1])
    try:
        store.read(0)
    except HistoryCorruptedError as error:
        assert f"truncated: `data.mdb` has {length} bytes" in str(error), error
        print(length)
    store.close()
"""
    found = run_script(code, path, *lengths)
    assert [int(line) for line in found.split()] == lengths


def test_file_that_is_cut_while_open(recorded: Callable[..., Path]) -> None:
    path = recorded(num_rounds=3)
    store = LMDBHistory(path)
    assert store.rounds() == range(3)
    os.truncate(path / "data.mdb", 20480)
    for read in (store.rounds, store.verify, lambda: store.read(0)):
        with pytest.raises(HistoryCorruptedError, match="has 20480 bytes"):
            read()
    store.close()


def test_newer_format_is_refused(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(recording, "FORMAT_VERSION", 2)
        LMDBHistory(tmp_path).begin(manifest)
    with pytest.raises(HistoryFormatError, match="format version 2, but this fedrec reads version"):
        LMDBHistory(tmp_path).manifest  # noqa: B018


def test_unknown_codec_is_refused(tmp_path: Path, manifest: Manifest) -> None:
    odd = replace(manifest, codec="float12")
    with pytest.raises(HistoryFormatError, match=r"`float12`.* Known: float32"):
        LMDBHistory(tmp_path).begin(odd)


def test_other_files_are_refused(tmp_path: Path) -> None:
    cases = {name: tmp_path / name for name in ("garbage", "lmdb", "like-ours")}
    for path in cases.values():
        path.mkdir()
    (cases["garbage"] / "data.mdb").write_bytes(b"hello" * 5000)
    with lmdb.open(str(cases["lmdb"])) as env, env.begin(write=True) as txn:
        txn.put(b"manifest", b"{}")
    with lmdb.open(str(cases["like-ours"]), max_dbs=4) as env:
        for name in (b"meta", b"models", b"updates", b"rounds"):
            env.open_db(name)
    for path in cases.values():
        before = (path / "data.mdb").read_bytes()
        with pytest.raises(HistoryFormatError, match="does not hold a fedrec history"):
            LMDBHistory(path).manifest  # noqa: B018
        assert (path / "data.mdb").read_bytes() == before


def test_missing_history_is_not_made_by_reading(tmp_path: Path) -> None:
    history = LMDBHistory(tmp_path / "typo")
    for read in (lambda: history.manifest, lambda: history.read_round(0), history.verify):
        with pytest.raises(HistoryFormatError, match=r"Nothing has been recorded in `.*typo`"):
            read()
    assert not (tmp_path / "typo").exists()


def test_path_that_is_a_file(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigurationError, match="to be the path of a directory"):
        LMDBHistory(tmp_path / "file").begin(manifest)
    assert (tmp_path / "file").read_text() == "mine"
