"""Encryption at rest: what lies on disk says nothing without the key, and cannot be changed."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedrec.exceptions import (
    ConfigurationError,
    HistoryCorruptedError,
    HistoryError,
    HistoryFormatError,
    HistoryKeyError,
    MissingDependencyError,
)
from fedrec.history import HistoryStore, LMDBHistory, Manifest, compact, info, repair
from fedrec.history.lmdb.encryption import Keys, TamperedError, new_key
from fedrec.history.rounds import RoundArrays
from fedrec.testing import HistoryStoreContract

IDS = tuple(f"client-{i}" for i in range(5))
D = 2000
WEIGHTS, AGGREGATE, ROUND = (2**32 - i for i in (4, 3, 1))
HEX = "0f" * 32
SEALED = 0x80


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDREC_HISTORY_KEY", raising=False)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "master.key"
    path.write_text(HEX + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def encrypted(
    tmp_path: Path, key_file: Path, manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> Callable[..., Path]:
    """Return a function that records encrypted rounds and returns the closed directory."""

    def make(num_rounds: int = 2, name: str = "history", codec: str = "float32") -> Path:
        store = LMDBHistory(tmp_path / name, codec=codec, master_key=f"file:{key_file}")
        store.begin(manifest)
        for t in range(num_rounds):
            store.append(arrays(t))
        store.close()
        return tmp_path / name

    return make


def records(path: Path, database: str) -> dict[tuple[int, int], bytes]:
    with lmdb.open(str(path), max_dbs=4, map_size=2**30) as env:
        db = env.open_db(database.encode(), create=False)
        with env.begin() as txn:
            return {struct.unpack(">II", k): v for k, v in txn.cursor(db)}


def put(path: Path, database: str, t: int, index: int, record: bytes) -> None:
    with lmdb.open(str(path), max_dbs=4, map_size=2**30) as env:
        db = env.open_db(database.encode(), create=False)
        with env.begin(write=True) as txn:
            txn.put(struct.pack(">II", t, index), record, db=db)


def with_checksum(t: int, index: int, header: bytes, payload: bytes) -> bytes:
    """Return a record whose checksum is right, which anybody can compute."""
    checksum = xxhash.xxh3_64_intdigest(header + struct.pack(">II", t, index) + payload)
    return header + checksum.to_bytes(8, "little") + payload


def unwrap(path: Path, name: str | None) -> AESGCM:
    """Return a data key, unwrapped as the format says."""
    keys = json.loads((path / "keys.json").read_text())["keys"]
    wrapped = base64.b64decode(keys["shared"] if name is None else keys["clients"][name])
    purpose = b"fedrec shared key" if name is None else b"fedrec client key " + name.encode()
    return AESGCM(AESGCM(bytes.fromhex(HEX)).decrypt(wrapped[:12], wrapped[12:], purpose))


# -- what lies on disk ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 9, 10, 25, 30])
def test_files_beside_it(
    encrypted: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("fedrec.history.lmdb.encryption._PIECE", 10)
    path = encrypted(name="a")
    store = LMDBHistory(path, master_key=f"file:{path.parent}/master.key")
    content = bytes(range(1, size + 1))
    sealed = store.seal(content)
    mark, rest = sealed[:14], sealed[14:]
    assert mark == b"fedrec sealed\n"
    pieces = [rest[i : i + 38] for i in range(0, len(rest), 38)]  # 12 of nonce, 16 of tag
    assert len(pieces) == max(-(-size // 10), 1)
    opened = []
    for i, piece in enumerate(pieces):
        bound = f"fedrec file, from byte {10 * i} of {size}".encode()
        opened.append(unwrap(path, None).decrypt(piece[:12], piece[12:], bound))
    assert b"".join(opened) == content
    assert store.unseal(sealed) == content
    changed = [rest[:-1], rest[:-38], rest + rest[-38:], bytes([rest[0] ^ 1]) + rest[1:]]
    if len(pieces) > 2:
        changed.append(pieces[1] + pieces[0] + b"".join(pieces[2:]))
    for other in changed:
        with pytest.raises(HistoryCorruptedError, match="cannot be decrypted"):
            store.unseal(mark + other)
    assert store.unseal(content) == content  # it was never encrypted


def test_layout(
    encrypted: Callable[..., Path], arrays: Callable[..., RoundArrays], manifest: Manifest
) -> None:
    path = encrypted()
    ((_, stored),) = records(path, "meta").items()
    assert json.loads(stored[48:])["encryption"] == "AES-256-GCM"
    for database, t, index, name, plain in (
        ("updates", 1, 2, "client-2", arrays(1).updates[2].tobytes()),
        ("models", 1, WEIGHTS, None, arrays(1).global_weights.tobytes()),
        ("models", 0, AGGREGATE, None, arrays(0).aggregate.tobytes()),
    ):
        record = records(path, database)[t, index]
        header, payload = record[:40], record[48:]
        assert struct.unpack("<4sHBBIIQ16s", header) == (
            *(b"FREC", 1, 1, 1 | SEALED, t, index, D),
            bytes.fromhex(manifest.store_id),
        )
        assert record == with_checksum(t, index, header, payload)
        assert len(payload) == 12 + len(plain) + 16
        bound = header + struct.pack(">II", t, index)
        assert unwrap(path, name).decrypt(payload[:12], payload[12:], bound) == plain
    assert {p.name for p in path.iterdir()} == {
        *("data.mdb", "lock.mdb", "writer.lock", "keys.json")
    }
    assert (path / "keys.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("codec", ["float32", "float16", "int8", "sign"])
def test_no_plaintext_is_on_disk(
    encrypted: Callable[..., Path],
    recorded: Callable[..., Path],
    arrays: Callable[..., RoundArrays],
    codec: str,
    key_file: Path,
) -> None:
    path = encrypted(codec=codec)
    on_disk = b"".join(p.read_bytes() for p in path.iterdir())
    assert HEX.encode() not in on_disk
    assert bytes.fromhex(HEX) not in on_disk
    plain = LMDBHistory(path.parent / "plain", codec=codec)
    plain.begin(dataclasses.replace(LMDBHistory(path).manifest, encryption=None))
    for t in range(2):
        plain.append(arrays(t))
    plain.close()
    values = {**records(plain.path, "updates"), **records(plain.path, "models")}
    assert len(values) == 2 * (5 + 2)
    for value in values.values():
        for start in range(48, len(value) - 16, 64):  # what lies between is as random as these
            assert value[start : start + 16] not in on_disk
    assert b"bounds" in (plain.path / "data.mdb").read_bytes()
    assert b"bounds" not in on_disk
    store = LMDBHistory(path, master_key=f"file:{key_file}")
    for t in range(2):
        np.testing.assert_array_equal(store.read(t).updates, plain.read(t).updates)
        assert store.index(t).bounds == plain.index(t).bounds
    store.close()
    plain.close()


def test_nonces_do_not_repeat() -> None:
    keys = Keys.create("h", IDS[:1], bytes(32))
    sealed = [keys.seal(IDS[0], b"the same", b"the same") for _ in range(20_000)]
    # 96 random bits: two of 20,000 are the same once in 10**20 runs.
    assert len({one[:12] for one in sealed}) == 20_000
    assert len({one[12:] for one in sealed}) == 20_000
    assert {bytes(keys.open(IDS[0], memoryview(s), b"the same")) for s in sealed[:10]} == {
        b"the same"
    }


def test_every_client_and_every_history_has_its_own_key(encrypted: Callable[..., Path]) -> None:
    one, two = encrypted(name="one"), encrypted(name="two")
    sealed = unwrap(one, "client-0").encrypt(bytes(12), b"x", b"")
    others = [(one, c) for c in IDS[1:]] + [(one, None), (two, "client-0"), (two, None)]
    for path, name in others:
        assert unwrap(path, name).encrypt(bytes(12), b"x", b"") != sealed


def test_a_payload_belongs_to_its_place_and_key() -> None:
    keys = Keys.create("h", IDS, bytes(32))
    sealed = memoryview(keys.seal(IDS[0], b"secret", b"place"))
    for name, data, bound in (
        (IDS[1], sealed, b"place"),
        (None, sealed, b"place"),
        (IDS[0], sealed, b"elsewhere"),
        (IDS[0], sealed[:27], b"place"),
        *((IDS[0], memoryview(_flipped(sealed, i)), b"place") for i in range(len(sealed))),
    ):
        with pytest.raises(TamperedError):
            keys.open(name, data, bound)


def _flipped(data: bytes | memoryview, place: int) -> bytes:
    return bytes(b ^ (i == place) for i, b in enumerate(data))


# -- tampering ------------------------------------------------------------------------------------


def test_what_was_changed_is_found_even_with_its_checksum(
    encrypted: Callable[..., Path], key_file: Path
) -> None:
    """An attacker who forges the checksums, too: the round record's, and the chain's."""
    path = encrypted()
    source = f"file:{key_file}"
    original = records(path, "updates")[1, 2]
    header, payload = original[:40], original[48:]
    whole = (path / "data.mdb").read_bytes()
    for forged in (
        with_checksum(1, 2, header, _flipped(payload, 0)),  # the nonce
        with_checksum(1, 2, header, _flipped(payload, 100)),
        with_checksum(1, 2, header, _flipped(payload, len(payload) - 1)),  # the tag
        with_checksum(1, 2, header, payload[:20]),
    ):
        put(path, "updates", 1, 2, forged)
        store = LMDBHistory(path, master_key=source)
        # As if the round had been committed with it.
        with store.snapshot() as snapshot:
            entry, _ = snapshot.entry(1)
            entry["updates"][2] = f"{int.from_bytes(forged[40:48], 'little'):016x}"
            (damage,) = snapshot.damage(entry)
        store.close()
        assert (damage.round, damage.client_id) == (1, "client-2")
        assert "not encrypted with this key" in damage.reason or "too short" in damage.reason
        (path / "data.mdb").write_bytes(whole)


def test_a_forged_round_record_is_found(encrypted: Callable[..., Path], key_file: Path) -> None:
    path = encrypted()
    record = records(path, "rounds")[1, ROUND]
    put(path, "rounds", 1, ROUND, with_checksum(1, ROUND, record[:40], _flipped(record[48:], 30)))
    with LMDBHistory(path, master_key=f"file:{key_file}") as history:
        (damage,) = history.damage()
        assert (damage.round, damage.part) == (1, "the round record")
        with pytest.raises(HistoryCorruptedError, match=r"round 1, the round record.*encrypted"):
            history.read_round(1)


@pytest.mark.parametrize("part", range(8))
def test_every_field_of_a_header_counts(
    encrypted: Callable[..., Path], key_file: Path, part: int
) -> None:
    path = encrypted(num_rounds=1)
    record = records(path, "updates")[0, 1]
    place = (0, 4, 6, 7, 8, 12, 16, 24)[part]
    put(path, "updates", 0, 1, with_checksum(0, 1, _flipped(record[:40], place), record[48:]))
    for source in (f"file:{key_file}", None):  # the checksum is right, the place is not
        with LMDBHistory(path, master_key=source) as history:
            found = [(one.round, one.client_id) for one in history.damage()]
        # Without keys, nobody knows the codec, whether it is numbers, and how many.
        knows = source is not None or place not in (6, 7, 16)
        assert found == ([(0, "client-1")] if knows else [])


def test_swapped_records_are_found(encrypted: Callable[..., Path], key_file: Path) -> None:
    path, other = encrypted(), encrypted(name="other")
    found, foreign = records(path, "updates"), records(other, "updates")

    def moved(record: bytes, t: int, index: int) -> bytes:
        fields = list(struct.unpack("<4sHBBIIQ16s", record[:40]))
        fields[4:6] = t, index
        return with_checksum(t, index, struct.pack("<4sHBBIIQ16s", *fields), record[48:])

    for record in (
        found[0, 1],  # another round's
        found[1, 2],  # another client's
        foreign[1, 1],  # another history's
        moved(found[0, 1], 1, 1),
        moved(found[1, 2], 1, 1),
        moved(foreign[1, 1], 1, 1),
    ):
        put(path, "updates", 1, 1, record)
        with LMDBHistory(path, master_key=f"file:{key_file}") as history:
            assert [(d.round, d.client_id) for d in history.damage()] == [(1, "client-1")]
            with pytest.raises(HistoryCorruptedError, match="round 1, client `client-1`"):
                history.read_round(1)
            assert history.read_round(1, ["client-0"]).client_ids == ("client-0",)
        put(path, "updates", 1, 1, found[1, 1])


# -- keys -----------------------------------------------------------------------------------------


def test_wrong_or_missing_key(
    encrypted: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = encrypted()
    wrong = tmp_path / "wrong.key"
    new_key(wrong)
    with pytest.raises(HistoryKeyError, match=r"not the one history .*history` was encrypted with"):
        LMDBHistory(path, master_key=f"file:{wrong}").read(0)
    for call in (
        lambda: LMDBHistory(path).read(0),
        lambda: info(path),
        lambda: repair(path),
    ):
        with pytest.raises(HistoryKeyError, match=r"is encrypted. HINT: give its master key.*env"):
            call()
    assert LMDBHistory(path).rounds() == range(2)
    assert LMDBHistory(path).manifest.encryption == "AES-256-GCM"
    monkeypatch.setenv("FEDREC_HISTORY_KEY", HEX)
    assert LMDBHistory(path).read(0).client_ids == IDS
    monkeypatch.setenv("FEDREC_HISTORY_KEY", HEX.replace("0", "1"))
    with pytest.raises(HistoryKeyError, match="not the one"):
        LMDBHistory(path).read(0)
    monkeypatch.setenv("MINE", HEX)
    assert LMDBHistory(path, master_key="env:MINE").read(0).client_ids == IDS


def test_a_key_that_is_none(tmp_path: Path, manifest: Manifest, key_file: Path) -> None:
    def begin(source: str, name: str = "history") -> None:
        LMDBHistory(tmp_path / name, master_key=source).begin(manifest)

    for source in (HEX, "file:", "vault:x", 3):
        with pytest.raises(ConfigurationError, match="`file:PATH`") as error:
            begin(source)  # type: ignore[arg-type]
        assert HEX not in str(error.value)
    with pytest.raises(HistoryKeyError, match=r"`NOBODY_SET_THIS`.* is not set"):
        begin("env:NOBODY_SET_THIS")
    with pytest.raises(HistoryKeyError, match="cannot be read"):
        begin(f"file:{tmp_path}/none")
    key_file.chmod(0o640)
    with pytest.raises(HistoryKeyError, match=r"by others than its owner.*chmod 600"):
        begin(f"file:{key_file}")
    key_file.chmod(0o600)
    for text in ("", "0f" * 31, "0f" * 33, "zz" * 32, "\xe9" * 64):
        key_file.write_text(text)
        with pytest.raises(HistoryKeyError, match="64 hexadecimal digits"):
            begin(f"file:{key_file}")
    inside = tmp_path / "history" / "master.key"
    inside.parent.mkdir()
    new_key(inside)
    with pytest.raises(HistoryKeyError, match="lies in the history that it protects"):
        begin(f"file:{inside}")
    assert not (tmp_path / "history" / "data.mdb").exists()


def test_new_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    new_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(bytes.fromhex(path.read_text())) == 32
    with pytest.raises(HistoryError, match="cannot be made"):
        new_key(path)
    new_key(tmp_path / "other")
    assert path.read_text() != (tmp_path / "other").read_text()


def test_a_plain_history_takes_no_key(
    recorded: Callable[..., Path], key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recorded(num_rounds=1)
    with pytest.raises(HistoryFormatError, match="is not encrypted, but was opened with a master"):
        LMDBHistory(path, master_key=f"file:{key_file}").read(0)
    monkeypatch.setenv("FEDREC_HISTORY_KEY", HEX)  # meant for others
    assert LMDBHistory(path).read(0).client_ids == IDS


def test_damaged_keys_are_found(encrypted: Callable[..., Path], key_file: Path) -> None:
    path = encrypted()
    text = (path / "keys.json").read_text()
    for changed in (text[:-40], text.replace('"shared": "', '"shared": "A'), "{}", "[1]"):
        (path / "keys.json").write_text(changed)
        with pytest.raises(HistoryCorruptedError, match=r"keys\.json"):
            LMDBHistory(path, master_key=f"file:{key_file}").read(0)
    # One who can compute the checksum changes a client's key: the others can still be read.
    raw = json.loads(text)
    raw["keys"]["clients"]["client-1"] = raw["keys"]["clients"]["client-2"]
    canonical = json.dumps(raw["keys"], sort_keys=True, separators=(",", ":")).encode()
    raw["checksum"] = hashlib.sha256(canonical).hexdigest()
    (path / "keys.json").write_text(json.dumps(raw))
    with LMDBHistory(path, master_key=f"file:{key_file}") as history:
        assert history.read_round(0, ["client-2"]).client_ids == ("client-2",)
        with pytest.raises(HistoryCorruptedError, match="data key of client `client-1`"):
            history.read_round(0, ["client-1"])
    (path / "keys.json").unlink()
    with pytest.raises(HistoryCorruptedError, match=r"wrapped keys.*keys\.json"):
        LMDBHistory(path, master_key=f"file:{key_file}").read(0)


def test_without_the_package(
    encrypted: Callable[..., Path], key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = encrypted()
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'fedrec\[encryption\]'"):
        LMDBHistory(path, master_key=f"file:{key_file}").read(0)
    assert LMDBHistory(path).damage() == []  # checksums need no key


def test_a_pickled_store_has_the_place_of_the_key_alone(
    encrypted: Callable[..., Path], key_file: Path
) -> None:
    store = LMDBHistory(encrypted(), master_key=f"file:{key_file}")
    store.read(0)
    pickled = pickle.dumps(store)
    assert HEX.encode() not in pickled
    assert bytes.fromhex(HEX) not in pickled
    store.close()
    assert pickle.loads(pickled).read_round(1).client_ids == IDS


# -- tools ----------------------------------------------------------------------------------------


def test_recording_goes_on(
    encrypted: Callable[..., Path],
    arrays: Callable[..., RoundArrays],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = encrypted()
    monkeypatch.setenv("FEDREC_HISTORY_KEY", HEX)
    store = LMDBHistory(path)
    store.append(arrays(2))
    assert store.verify() == range(3)
    np.testing.assert_array_equal(store.read(2).updates, arrays(2).updates)
    store.close()


def test_verify_without_key_compares_checksums(encrypted: Callable[..., Path]) -> None:
    path = encrypted()
    with LMDBHistory(path) as history:
        assert history.damage() == []
        assert history.verify() == range(2)
    record = records(path, "updates")[1, 3]
    put(path, "updates", 1, 3, _flipped(record, 60))
    put(path, "models", 0, WEIGHTS, b"short")
    with LMDBHistory(path) as history:
        assert [(d.round, d.part) for d in history.damage()] == [
            (0, "the global weights"),
            (1, "client `client-3`"),
        ]


def test_repair_and_compact(
    encrypted: Callable[..., Path], arrays: Callable[..., RoundArrays], key_file: Path
) -> None:
    path = encrypted(num_rounds=3, codec="int8")
    source = f"file:{key_file}"
    with LMDBHistory(path, master_key=source) as history:
        before = [history.read_round(t, IDS[1:]).updates for t in range(3)]
        old_id = history.manifest.store_id
    put(path, "updates", 1, 0, _flipped(records(path, "updates")[1, 0], 70))
    assert repair(path, master_key=source).dropped == ((1, "client-0"),)
    assert compact(path).bytes_after > 0
    assert compact(path, master_key=source).bytes_after > 0
    with LMDBHistory(path, master_key=source) as history:
        assert history.verify() == range(3)
        assert history.manifest.store_id != old_id
        assert history.index(1).present == IDS[1:]
        for t in range(3):
            assert history.read_round(t, IDS[1:]).updates.equal(before[t])
    assert info(path, master_key=source).encryption == "AES-256-GCM"
    new = b"".join(p.read_bytes() for p in path.iterdir())
    assert np.asarray(arrays(0).global_weights)[:16].tobytes() not in new


def test_a_key_that_was_not_written_is_no_history(
    tmp_path: Path, manifest: Manifest, key_file: Path, run_script: Callable[..., str]
) -> None:
    """Killed between keys and data: nothing has begun, and it can begin."""
    code = """
import os, pickle, signal, sys
from fedrec.history.lmdb import environment
from fedrec.history.lmdb import history
history.Environment.create = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
path, source, manifest = sys.argv[1:]
from fedrec.history import Manifest
pid = os.fork()
if pid == 0:
    history.LMDBHistory(path, master_key=source).begin(Manifest.from_json(manifest))
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    source = f"file:{key_file}"
    assert run_script(code, tmp_path / "h", source, manifest.to_json()).strip() == "-9"
    assert (tmp_path / "h" / "keys.json").exists()
    store = LMDBHistory(tmp_path / "h", master_key=source)
    assert store.is_empty
    store.begin(manifest)
    assert store.manifest.encryption == "AES-256-GCM"
    store.close()
    assert not (tmp_path / "h" / "keys.json.tmp").exists()


class TestEncryptedHistory(HistoryStoreContract):
    """An encrypted history keeps every promise of a history."""

    @pytest.fixture(autouse=True)
    def key_in_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MINE", HEX)

    def make(self, path: Path) -> HistoryStore:
        return LMDBHistory(path, master_key="env:MINE")

    def manifest(self, **changes: Any) -> Manifest:
        return super().manifest(**{"encryption": "AES-256-GCM", **changes})
