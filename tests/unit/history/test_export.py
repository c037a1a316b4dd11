"""Export and import: the same history again, and nothing that is not one."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import io
import json
import os
import pickle
import re
import shutil
import struct
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedrec.cli.main import main
from fedrec.exceptions import (
    FedrecError,
    ForgottenError,
    HistoryCorruptedError,
    HistoryError,
    HistoryFormatError,
    HistoryFullError,
)
from fedrec.history import (
    LMDBHistory,
    Manifest,
    codecs,
    export_history,
    forget,
    import_history,
    info,
)
from fedrec.history.conversion import to_record
from fedrec.history.rounds import RoundArrays
from fedrec.history.tools.export import checksum_of
from fedrec.history.tools.repair import compact

IDS = tuple(f"client-{i}" for i in range(5))
D = 2000
ROUNDS = 4

Make = Callable[..., RoundArrays]


_MADE: list[Path] = []


@pytest.fixture
def plain(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, manifest: Manifest, arrays: Make
) -> Path:
    """An export of four rounds, in which clients were refused and come in an order of their own.

    It is made once, and copied for each test.
    """
    if not (_MADE and _MADE[0].exists()):
        _MADE[:] = [tmp_path_factory.mktemp("made")]
        store = LMDBHistory(_MADE[0] / "history")
        store.begin(manifest)
        write(store, arrays)
        export_history(_MADE[0] / "history", _MADE[0] / "plain")
    shutil.copytree(_MADE[0], tmp_path, dirs_exist_ok=True)
    return tmp_path / "plain"


def write(store: LMDBHistory, arrays: Make, rounds: int = ROUNDS) -> None:
    for t in range(rounds):
        ids = (IDS[3], IDS[0], IDS[4]) if t % 2 else IDS
        store.append(
            arrays(
                t,
                ids,
                cohort=(IDS[4], IDS[2], IDS[3], IDS[0]) if t % 2 else (),
                refused={IDS[2]: "zu groß: ∞"} if t % 2 else {},
                num_samples=np.arange(len(ids)) + t,
            )
        )
    store.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def tell(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the manifest says, and make it true of itself."""
    raw = json.loads((folder / "manifest.json").read_text())
    del raw["sha256"]
    change(raw)
    try:
        raw["sha256"] = checksum_of(raw)
    except (KeyError, TypeError, ValueError):
        raw["sha256"] = ""
    (folder / "manifest.json").write_text(json.dumps(raw))


def replace_file(folder: Path, t: int, data: bytes) -> None:
    """Put other bytes in place of a round's file, with a manifest that vouches for them."""
    (folder / f"round-{t:06d}.npz").write_bytes(data)

    def vouch(raw: dict[str, Any]) -> None:
        raw["rounds"][t] |= {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    tell(folder, vouch)


def packed(members: dict[str, Any], **kwargs: Any) -> bytes:
    """Return an .npz file of arrays, or of bytes as they are."""
    data = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(data, "w", **kwargs) as archive:
        warnings.simplefilter("ignore")  # two members of one name
        for name, value in members.items():
            if not isinstance(value, bytes):
                array = io.BytesIO()
                np.save(array, value, allow_pickle=True)
                value = array.getvalue()
            archive.writestr(name.replace("|", "") + ".npy", value)
    return data.getvalue()


def members(folder: Path, t: int = 1) -> dict[str, Any]:
    with np.load(folder / f"round-{t:06d}.npz", allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def refused(folder: Path, tmp_path: Path, match: str = "cannot be|does not say") -> None:
    """Import, which must fail, and leave nothing behind."""
    with pytest.raises(HistoryError, match=match):
        import_history(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


# -- there and back -------------------------------------------------------------------------------


def test_numpy_reads_it(plain: Path, arrays: Make) -> None:
    sent = arrays(1, (IDS[3], IDS[0], IDS[4]))
    found = members(plain)
    np.testing.assert_array_equal(found["updates"], sent.updates)
    np.testing.assert_array_equal(found["global_weights"], sent.global_weights)
    np.testing.assert_array_equal(found["aggregate"], sent.aggregate)
    assert found["updates"].dtype == np.float32
    assert found["client_ids"].tolist() == found["present"].tolist() == [IDS[3], IDS[0], IDS[4]]
    assert found["num_samples"].tolist() == [1, 2, 3]
    assert found["cohort"].tolist() == [IDS[4], IDS[2], IDS[3], IDS[0]]
    assert (found["refused"].tolist(), found["reasons"].tolist()) == ([IDS[2]], ["zu groß: ∞"])
    np.testing.assert_array_equal(found["bounds"], np.abs(sent.updates).max(axis=1))
    assert found.keys() == {
        "global_weights", "aggregate", "updates", "client_ids", "present", "num_samples", "cohort",
        "refused", "reasons", "bounds",
    }  # fmt: skip
    raw = json.loads((plain / "manifest.json").read_text())
    for one, t in zip(raw["rounds"], range(ROUNDS), strict=True):
        data = (plain / one["file"]).read_bytes()
        assert one == {
            "file": f"round-{t:06d}.npz",
            "num_bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    assert {p.stat().st_mode & 0o777 for p in plain.iterdir()} == {0o600}
    assert plain.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("codec", "keep"),
    [
        *((codec, {}) for codec in ("float32", "lz4", "zstd", "float16", "int8", "sign")),
        ("float32", {"last": 2}),
        ("int8", {"last": 2}),
        ("zstd", {"every": 2, "clients": 3}),
    ],
    ids=str,
)
def test_export_import_export(
    tmp_path: Path, manifest: Manifest, arrays: Make, codec: str, keep: dict[str, Any]
) -> None:
    store = LMDBHistory(tmp_path / "a", codec=codec, keep=keep)
    store.begin(dataclasses.replace(manifest, clients=dict.fromkeys(reversed(IDS), 10)))
    write(store, arrays)
    done = export_history(tmp_path / "a", tmp_path / "plain")
    made = import_history(tmp_path / "plain", tmp_path / "b")
    assert (done.rounds, made.rounds) == (ROUNDS, ROUNDS)
    export_history(tmp_path / "b", tmp_path / "again")
    one, two = contents(tmp_path / "plain"), contents(tmp_path / "again")
    assert done.num_bytes == sum(map(len, one.values())) - len(one["manifest.json"])
    exact = codec in ("float32", "lz4", "zstd")
    if exact:
        assert one == two
    with LMDBHistory(tmp_path / "a") as a, LMDBHistory(tmp_path / "b") as b:
        assert b.verify() == a.rounds() == range(ROUNDS)
        assert b.manifest == a.manifest
        assert list(b.manifest.clients) == list(a.manifest.clients)
        for t in range(ROUNDS):
            kept = a.index(t).kept
            x, y = a.read(t, kept), b.read(t, kept)
            assert x.updates.tobytes() == y.updates.tobytes()
            assert x.global_weights.tobytes() == y.global_weights.tobytes()
            assert x.aggregate.tobytes() == y.aggregate.tobytes()
            assert x.num_samples.tolist() == y.num_samples.tolist()
            assert (x.cohort, x.refused) == (y.cohort, y.refused)
            assert (a.index(t).present, kept) == (b.index(t).present, b.index(t).kept)
            if exact:
                assert a.index(t).bounds == b.index(t).bounds
            for c, bound in b.index(t).bounds.items():
                assert np.abs(y.updates[kept.index(c)]).max() <= bound
    if exact:  # the chain of hashes is rebuilt to the last bit, where payloads are a function of it
        assert info(tmp_path / "a").num_updates == info(tmp_path / "b").num_updates


def test_a_codec_that_would_change_the_numbers_again(
    tmp_path: Path, manifest: Manifest, arrays: Make
) -> None:
    store = LMDBHistory(tmp_path / "a", codec="int8+zstd")
    store.begin(manifest)
    write(store, arrays)
    export_history(tmp_path / "a", tmp_path / "plain")
    refused(tmp_path / "plain", tmp_path, "codec `float32`")
    import_history(tmp_path / "plain", tmp_path / "b", codec="zstd")
    with LMDBHistory(tmp_path / "a") as a, LMDBHistory(tmp_path / "b") as b:
        assert b.manifest == dataclasses.replace(a.manifest, codec="zstd")
        for t in range(ROUNDS):
            assert (a.read_round(t).updates == b.read_round(t).updates).all()
    with pytest.raises(FedrecError, match="int8"):  # normal numbers are none of int8's
        import_history(tmp_path / "plain", tmp_path / "c", codec="int8")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_buffers_and_a_round_without_clients(
    tmp_path: Path, manifest: Manifest, arrays: Make, dtype: str
) -> None:
    store = LMDBHistory(tmp_path / "a")
    store.begin(dataclasses.replace(manifest, buffers={"mean": {"dtype": dtype, "shape": [3]}}))
    buffers = np.array([1 / 3, -2.0, 0.0], dtype)
    store.append(arrays(0, buffers=buffers))
    nobody = {"refused": dict.fromkeys(IDS, "silent"), "cohort": IDS}
    store.append(arrays(1, (), buffers=2 * buffers, **nobody))
    store.close()
    export_history(tmp_path / "a", tmp_path / "plain")
    import_history(tmp_path / "plain", tmp_path / "b")
    store = LMDBHistory(tmp_path / "b")
    assert (store.read(0).buffers == buffers).all()
    assert (store.read(1).buffers == 2 * buffers).all()
    assert store.read(1).refused == nobody["refused"]
    store.append(arrays(2, buffers=buffers))
    assert store.verify() == range(3)
    store.close()
    compact(tmp_path / "b")
    store = LMDBHistory(tmp_path / "b")
    assert store.verify() == range(3)
    found = store.read(2).buffers
    assert found.dtype == dtype
    assert found.tolist() == buffers.tolist()
    store.close()


def test_what_is_imported_goes_on(plain: Path, tmp_path: Path, arrays: Make) -> None:
    import_history(plain, tmp_path / "new")
    for name in ("history", "new"):
        store = LMDBHistory(tmp_path / name)
        store.append(arrays(ROUNDS))
        assert store.verify() == range(ROUNDS + 1)
        with store.snapshot() as snapshot:
            tail = snapshot.entry(ROUNDS)[1]
        store.close()
        if name == "history":
            expected = tail
    assert tail == expected  # the same chain, since float32 payloads are the numbers


def test_an_odd_sampler_is_the_users_own(plain: Path, tmp_path: Path) -> None:
    tell(plain, _set("manifest", "sampler", {"init_args": 3}))
    assert import_history(plain, tmp_path / "new").rounds == ROUNDS


def test_nothing_is_overwritten(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match="not empty"):
        export_history(tmp_path / "history", plain)
    before = contents(tmp_path / "history")["data.mdb"]
    with pytest.raises(HistoryFormatError, match="already holds a history"):
        import_history(plain, tmp_path / "history")
    assert contents(tmp_path / "history")["data.mdb"] == before
    (tmp_path / "empty").mkdir()
    export_history(tmp_path / "history", tmp_path / "empty")
    assert contents(tmp_path / "empty") == contents(plain)


def test_a_damaged_history_is_not_exported(
    tmp_path: Path, recorded: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recorded(num_rounds=2)
    data = bytearray((path / "data.mdb").read_bytes())
    record = re.search(b"FREC.{4}" + struct.pack("<II", 1, 2), bytes(data), re.DOTALL)
    assert record is not None
    data[record.start() + 1000] ^= 1
    (path / "data.mdb").write_bytes(data)
    with pytest.raises(HistoryCorruptedError, match="round 1, client `client-2`"):
        export_history(path, tmp_path / "plain")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["history"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=111_000))
    with pytest.raises(HistoryFullError, match="takes 112000: 1000 bytes are missing"):
        export_history(path, tmp_path / "plain")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["history"]


def test_an_encrypted_history_and_a_forgotten_client(
    tmp_path: Path, manifest: Manifest, arrays: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("KEY", "0f" * 32)
    with LMDBHistory(tmp_path / "a", master_key="env:KEY") as a:
        a.begin(manifest)
        for t in range(ROUNDS):
            a.write_round(to_record(arrays(t)))
    forget(tmp_path / "a", [IDS[1]], master_key="env:KEY")
    export_history(tmp_path / "a", tmp_path / "plain", master_key="env:KEY")
    probe = arrays(2).updates[1, 500:510].tobytes()
    assert (
        arrays(2).updates[2, 500:510].tobytes() in contents(tmp_path / "plain")["round-000002.npz"]
    )
    for name in ("sealed", "open"):
        key = "env:KEY" if name == "sealed" else None
        import_history(tmp_path / "plain", tmp_path / name, master_key=key)
        files = contents(tmp_path / name)
        assert not any(probe in data for data in files.values())
        seen = arrays(2).updates[2, 500:510].tobytes() in files["data.mdb"]
        assert seen is (name == "open")
        with LMDBHistory(tmp_path / name, master_key=key) as history:
            assert history.verify() == range(ROUNDS)
            assert history.manifest.encryption == (None if key is None else "AES-256-GCM")
            assert history.read_round(3).client_ids == (IDS[0], *IDS[2:])
            with pytest.raises(ForgottenError, match="client-1"):
                history.read_round(3, [IDS[1]])
            with pytest.raises(ForgottenError, match="client-1"):
                history.write_round(to_record(arrays(ROUNDS)))
        export_history(tmp_path / name, tmp_path / f"{name}-again", master_key=key)
        assert contents(tmp_path / f"{name}-again") == contents(tmp_path / "plain")

    with_updates = packed({**members(tmp_path / "plain"), "present": np.array(IDS)})
    replace_file(tmp_path / "plain", 1, with_updates)
    refused(tmp_path / "plain", tmp_path)


# -- what is refused ------------------------------------------------------------------------------


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


def header(descr: str, shape: str, more: str = "") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, {more}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "change",
    [
        {"updates": np.array([_Bomb()], dtype=object)},
        {"updates": pickle.dumps(_Bomb())},
        {"client_ids": np.array([IDS[3], _Bomb(), IDS[4]], dtype=object)},
        {"extra": np.zeros(3)},
        {"../../outside": np.zeros(3)},
        {"|updates": np.zeros(3)},
        {"updates": None},
        {"updates": np.zeros((3, D), np.float64)},
        {"updates": np.zeros((3, D), ">f4")},
        {"updates": np.asfortranarray(np.zeros((3, D), np.float32))},
        {"updates": np.zeros((3, D - 1), np.float32)},
        {"updates": np.zeros((2, D), np.float32)},
        {"updates": np.zeros((6, D), np.float32)},
        {"updates": np.full((3, D), np.nan, np.float32)},
        {"updates": np.full((3, D), 1e30, np.float32)},  # beyond their bounds
        {"updates": header("<f4", f"({10**15}, {D})")},
        {"updates": header("<f4", "(3, 2000)") + bytes(10)},
        {"updates": header("<f4", "(3, 2000)", "'x': __import__('os').system('touch executed')")},
        {"updates": b"\x93NUMPY\x02\x00" + (2**32 - 1).to_bytes(4, "little")},
        {"updates": b""},
        {"global_weights": np.full(D, np.inf, np.float32)},
        {"global_weights": np.zeros(D + 1, np.float32)},
        {"num_samples": np.array([1, 2, -3])},
        {"num_samples": np.array([1, 2])},
        {"num_samples": np.array([1.0, 2.0, 3.0])},
        {"bounds": np.array([9.0, 9.0, np.inf])},
        {"present": np.array([IDS[3], IDS[0], "nobody"])},
        {"present": np.array([IDS[3], IDS[0], IDS[0]])},
        {"present": np.array([IDS[0], IDS[3], IDS[4]])},
        {"client_ids": np.array([IDS[3], IDS[0]])},
        {"client_ids": header("<U8", "(1,)") + b"\xff" * 32},
        {"client_ids": header("<U99999", "(1,)")},
        {"cohort": np.array([IDS[4], IDS[3], IDS[0]])},
        {"cohort": np.array([IDS[4], IDS[2], IDS[3], IDS[0], IDS[1]])},
        {"refused": np.array([IDS[2], IDS[3]])},
        {"reasons": np.array(["a", "b"])},
        {"buffers": np.zeros(1, np.float32)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_file_that_no_export_has(
    plain: Path, tmp_path: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the manifest vouches for it."""
    monkeypatch.chdir(tmp_path)
    arrays = {**members(plain), **change}
    replace_file(plain, 1, packed({k: v for k, v in arrays.items() if v is not None}))
    refused(plain, tmp_path, "round-000001.npz` cannot be imported")
    assert {p.name for p in tmp_path.iterdir()} == {"history", "plain"}  # and nothing `executed`


def test_a_zip_file_that_no_export_is(plain: Path, tmp_path: Path) -> None:
    replace_file(plain, 1, packed(members(plain)))  # NumPy's own would be fine
    import_history(plain, tmp_path / "fine")
    zeros = {**members(plain), "updates": np.zeros((3, D), np.float32)}
    replace_file(plain, 1, packed(zeros, compression=zipfile.ZIP_DEFLATED))
    refused(plain, tmp_path, "is compressed")
    replace_file(plain, 1, b"no zip file")
    refused(plain, tmp_path, "not an .npz file")
    replace_file(plain, 1, b"")
    refused(plain, tmp_path, "not an .npz file")


def test_rounds_in_another_order(plain: Path, tmp_path: Path) -> None:
    """Rounds look alike: order is what the manifest's checksums say, and what names say."""
    a, b = plain / "round-000001.npz", plain / "round-000003.npz"
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    refused(plain, tmp_path, "checksum is wrong")
    b.unlink()
    refused(plain, tmp_path, "checksum is wrong|No such file")
    a.write_bytes(first)
    refused(plain, tmp_path, "No such file")
    b.symlink_to(a)
    refused(plain, tmp_path, "round-000003")
    b.unlink()
    b.mkdir()
    refused(plain, tmp_path, "round-000003")
    b.rmdir()
    os.mkfifo(b)
    refused(plain, tmp_path, "round-000003")


def _set(*keys: Any) -> Callable[[dict[str, Any]], None]:
    *path, last, value = keys

    def change(raw: Any) -> None:
        for k in path:
            raw = raw[k]
        raw[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("format", "fedrec history export 2"),
        _set("format", None),
        _set("extra", 1),
        _set("rounds", 3),
        _set("rounds", 0, "file", "/etc/passwd"),
        _set("rounds", 0, "file", "../plain/round-000000.npz"),
        _set("rounds", 0, "file", "round-000001.npz"),
        _set("rounds", 0, "num_bytes", 10**18),
        _set("rounds", 0, "num_bytes", None),
        _set("rounds", 0, "sha256", "0" * 64),
        _set("rounds", 0, "x", 1),
        _set("repairs", {}),
        _set("repairs", [{"rounds": 3}]),
        _set("manifest", "num_parameters", 10**400),
        _set("manifest", "server_lr", 10**400),
        _set("manifest", "max_rounds", 10**400),
        _set("forgotten", [{"client_id": "nobody", "when": "now", "previous": ""}]),
        _set("forgotten", [{"client_id": IDS[0], "when": "now", "previous": "a"}]),
        _set("forgotten", [{"client_id": IDS[0], "when": "now", "previous": ""}]),
        _set("manifest", None),
        _set("manifest", "num_parameters", 10**12),
        _set("manifest", "num_parameters", "2000"),
        _set("manifest", "num_parameters", True),
        _set("manifest", "buffers", {"mean": {"dtype": "float32", "shape": [-1]}}),
        _set("manifest", "clients", ["client-0"]),
        _set("manifest", "clients", {"client-0": 1}),
        _set("manifest", "codec", "rot13"),
        _set("manifest", "codec", ["float32"]),
        _set("manifest", "keep", {"last": 0}),
        _set("manifest", "keep", {"last": 2}),
        _set("manifest", "keep", {"first": 2}),
        _set("manifest", "store_id", "../../etc"),
        _set("manifest", "encryption", "AES-256-GCM"),
        _set("manifest", "encryption", "ROT13"),
        _set("manifest", "format_version", 99),
        _set("manifest", "malicious", 3),
        _set("manifest", "server_lr", "much"),
        _set("manifest", "x", 1),
    ],
)
def test_a_manifest_that_no_export_has(
    plain: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    tell(plain, change)
    with pytest.raises(FedrecError):
        import_history(plain, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"format": "fedrec history export 1", "format": "fedrec history export 1"}',
        '{"format": NaN}',
        "9" * 10_000,
        b"\xff\xfe",
        "!!python/object/apply:os.system ['touch executed']",
    ],
    ids=[str(i) for i in range(8)],
)
def test_what_is_no_manifest(plain: Path, tmp_path: Path, text: str | bytes) -> None:
    data = text if isinstance(text, bytes) else text.encode()
    (plain / "manifest.json").write_bytes(data)
    refused(plain, tmp_path)
    (plain / "manifest.json").unlink()
    refused(plain, tmp_path, "is no export")


def test_a_manifest_that_was_edited(plain: Path, tmp_path: Path) -> None:
    raw = json.loads((plain / "manifest.json").read_text())
    for change in (_set("manifest", "seed", 1), _set("manifest", "server_lr", 0.25)):
        changed = json.loads(json.dumps(raw))
        change(changed)
        (plain / "manifest.json").write_text(json.dumps(changed))
        refused(plain, tmp_path, "its checksum is wrong")
    changed = json.loads(json.dumps(raw))
    changed["manifest"]["clients"] = dict(reversed(changed["manifest"]["clients"].items()))
    (plain / "manifest.json").write_text(json.dumps(changed))
    refused(plain, tmp_path, "its checksum is wrong")  # the order is the index on disk


def test_a_full_disk_leaves_no_half_made_history(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=200_000))
    with pytest.raises(HistoryFullError, match="bytes are missing"):
        import_history(plain, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    monkeypatch.undo()

    def full(self: Any, record: RoundArrays) -> None:
        raise HistoryFullError("The disk is full.")

    (tmp_path / "new").mkdir()
    monkeypatch.setattr(LMDBHistory, "append", full)
    with pytest.raises(HistoryFullError, match="The disk is full"):
        import_history(plain, tmp_path / "new")
    assert LMDBHistory(tmp_path / "new").is_empty
    monkeypatch.undo()
    import_history(plain, tmp_path / "new")
    assert LMDBHistory(tmp_path / "new").verify() == range(ROUNDS)


def test_what_a_killed_process_left_is_in_nobodys_way(plain: Path, tmp_path: Path) -> None:
    """Until its last step, an import works in `new`, and an export beside its folder."""
    for left in (tmp_path / "b" / "new", tmp_path / ".again.new"):
        left.mkdir(parents=True)
        (left / "data.mdb").write_bytes(b"half")
        (left / "round-000000.npz").write_bytes(b"half")
    assert LMDBHistory(tmp_path / "b").is_empty
    import_history(plain, tmp_path / "b")
    export_history(tmp_path / "b", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(plain)
    assert {p.name for p in (tmp_path / "b").iterdir()} <= {"data.mdb", "lock.mdb", "writer.lock"}
    assert {p.name for p in tmp_path.iterdir()} == {"history", "plain", "b", "again"}


# -- fuzzing --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of two rounds of two clients and three parameters."""
    base = tmp_path_factory.mktemp("small")
    manifest = Manifest(
        model_fingerprint="f",
        num_parameters=3,
        clients={"a": 1, "b": 2},
        seed=0,
        aggregator={},
        server_lr=0.5,
        max_rounds=2,
    )
    store = LMDBHistory(base / "history")
    store.begin(manifest)
    for t in range(2):
        store.append(
            RoundArrays(
                round=t,
                global_weights=np.full(3, t, np.float32),
                client_ids=("a", "b"),
                updates=np.arange(6, dtype=np.float32).reshape(2, 3) + t,
                num_samples=np.array([1, 2]),
                aggregate=np.ones(3, np.float32),
            )
        )
    store.close()
    export_history(base / "history", base / "plain")
    return base / "plain"


def spliced(data: bytes, edits: list[tuple[float, int, bytes]]) -> bytes:
    for where, length, new in edits:
        at = int(where * len(data))
        data = data[:at] + new + data[at + length :]
    return data


EDITS = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.sampled_from([0, 1, 1, 2, 4, 40]),
        st.one_of(
            st.binary(max_size=8),
            st.sampled_from([b"\xff\xff\xff\x7f", b"PK\x01\x02", b"PK\x05\x06", b"'|O'", b"-1"]),
        ),
    ),
    min_size=1,
    max_size=4,
)
FUZZ = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def numbers(path: Path) -> list[Any]:
    with LMDBHistory(path) as history:
        assert history.verify() == history.rounds()
        records = [history.read_round(t) for t in history.rounds()]
    return [(r.updates.tolist(), r.global_weights.tolist(), r.client_ids) for r in records]


@FUZZ
@given(edits=EDITS, vouch=st.booleans())
def test_no_bytes_of_a_round_are_trusted(
    small: Path, edits: list[tuple[float, int, bytes]], vouch: bool
) -> None:
    """It is refused; or, where the manifest vouches for it, holds what NumPy reads in it."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(shutil.copytree(small, Path(where) / "plain"))
        data = spliced((folder / "round-000001.npz").read_bytes(), edits)
        if vouch:
            replace_file(folder, 1, data)
        else:
            (folder / "round-000001.npz").write_bytes(data)
        try:
            import_history(folder, Path(where) / "new")
        except FedrecError:
            assert not (Path(where) / "new").exists()
            return
        assert vouch or data == (small / "round-000001.npz").read_bytes()
        told = members(folder, 1)
        updates, weights, ids = numbers(Path(where) / "new")[1]
        assert updates == told["updates"].tolist()
        assert weights == told["global_weights"].tolist()
        assert list(ids) == told["client_ids"].tolist()


@FUZZ
@given(edits=EDITS)
def test_no_bytes_of_the_manifest_are_trusted(
    small: Path, edits: list[tuple[float, int, bytes]]
) -> None:
    with tempfile.TemporaryDirectory() as where:
        folder = Path(shutil.copytree(small, Path(where) / "plain"))
        data = spliced((folder / "manifest.json").read_bytes(), edits)
        (folder / "manifest.json").write_bytes(data)
        try:
            import_history(folder, Path(where) / "new")
        except FedrecError:
            assert not (Path(where) / "new").exists()
            return
        # What is read is what was written: at most white space or digits of a number differ.
        assert json.loads(data) == json.loads((small / "manifest.json").read_bytes())


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([10**400, -(10**400), 2**63, 2**64]),
    st.floats(),
    st.text(max_size=5),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@FUZZ
@given(data=st.data())
def test_no_entry_of_a_manifest_is_trusted(small: Path, data: st.DataObject) -> None:
    """Anything in place of an entry, with the right checksum: refused, or the same numbers."""
    raw = json.loads((small / "manifest.json").read_text())
    place = raw
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        k = data.draw(st.sampled_from(keys))
        if not (isinstance(place[k], (dict, list)) and place[k] and data.draw(st.booleans())):
            break
        place = place[k]
    place[k] = data.draw(VALUES)
    with tempfile.TemporaryDirectory() as where:
        folder = Path(shutil.copytree(small, Path(where) / "plain"))
        (folder / "manifest.json").write_text(json.dumps(raw))
        tell(folder, lambda raw: None)
        try:
            import_history(folder, Path(where) / "new")
        except FedrecError:
            assert not (Path(where) / "new").exists()
            return
        whole = numbers(small.parent / "history")
        assert numbers(Path(where) / "new") == whole[: len(raw["rounds"])]


# -- the command ----------------------------------------------------------------------------------

CODEC = """
from fedrec.history import register_codec
from fedrec.history.codecs import Float32Codec


class Mine(Float32Codec):
    id = 200
    name = "mine"


register_codec(Mine())
"""


def test_the_command_exports_and_imports(
    plain: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["history", "export", str(tmp_path / "history"), str(tmp_path / "x"), "--json"]) == 0
    )
    told = json.loads(capfd.readouterr().out)
    files = contents(tmp_path / "x")
    assert files == contents(plain)
    size = sum(map(len, files.values())) - len(files["manifest.json"])
    assert told == {"folder": str(tmp_path / "x"), "rounds": ROUNDS, "num_bytes": size}
    again = ["history", "import", str(tmp_path / "x"), str(tmp_path / "y"), "--codec", "zstd"]
    assert main([*again, "--json"]) == 0
    size = (tmp_path / "y" / "data.mdb").stat().st_size
    assert json.loads(capfd.readouterr().out) == {
        "path": str(tmp_path / "y"),
        "rounds": ROUNDS,
        "num_bytes": size,
    }
    assert main(again) == 2
    assert "already holds a history" in capfd.readouterr().err
    with LMDBHistory(tmp_path / "y") as history:
        assert history.manifest.codec == "zstd"


def test_a_codec_of_the_users_own(
    tmp_path: Path,
    manifest: Manifest,
    arrays: Make,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "my_codecs.py").write_text(CODEC)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(codecs.CODECS)
    try:
        importlib.import_module("my_codecs")
        store = LMDBHistory(tmp_path / "history", codec="mine")
        store.begin(manifest)
        write(store, arrays)
    finally:
        codecs.CODECS.clear()
        codecs.CODECS.update(before)
        sys.modules.pop("my_codecs", None)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
    assert main(["history", "verify", "history"]) == 2
    assert "stores updates as `mine`, which this fedrec does not know" in capfd.readouterr().err
    assert main(["history", "verify", "history", "--allow", "my_codecs"]) == 0
    assert f"All {ROUNDS} rounds" in capfd.readouterr().out
    assert main(["history", "info", "history", "--allow", "no_such_module"]) == 2
    assert "`no_such_module` cannot" in capfd.readouterr().err
