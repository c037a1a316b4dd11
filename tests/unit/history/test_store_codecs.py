"""Which codec a store uses, what it writes with it, and what it says about the error."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lmdb
import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from fedrec.exceptions import ConfigurationError, HistoryCorruptedError, HistoryFormatError
from fedrec.history import Codec, Encoded, LMDBHistory, Manifest, register_codec
from fedrec.history.codecs import CODECS, Float16Codec
from fedrec.history.rounds import RoundArrays

D, ROUND = 2000, 2**32 - 1


class Doubled(Codec):
    """A codec of one's own: what it stores is twice the vector."""

    id = 201
    name = "doubled"
    lossless = True

    def encode(self, vector: NDArray[np.float32]) -> Encoded:
        return Encoded((2 * vector).tobytes())

    def decode(self, payload: memoryview, out: NDArray[np.float32]) -> None:
        out[:] = np.frombuffer(payload, "<f4") / 2


class Inverted(Float16Codec):
    """A codec of one's own, made of another one: every bit is flipped."""

    id = 202
    name = "inverted"

    def encode(self, vector: NDArray[np.float32]) -> Encoded:
        payload, max_error = super().encode(vector)
        return Encoded(bytes(byte ^ 255 for byte in payload), max_error)

    def decode(self, payload: memoryview, out: NDArray[np.float32]) -> None:
        super().decode(memoryview(bytes(byte ^ 255 for byte in payload)), out)


@pytest.fixture
def stored(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> Callable[[str], Path]:
    """Return a function that records two rounds with a codec and returns the directory."""

    def make(codec: str) -> Path:
        with_codec = LMDBHistory(tmp_path / codec, codec=codec)
        with_codec.begin(manifest)
        for t in range(2):
            with_codec.append(arrays(t))
        with_codec.close()
        return with_codec.path

    return make


def values(path: Path, database: str) -> dict[tuple[int, int], bytes]:
    with lmdb.open(str(path), max_dbs=4, map_size=2**30) as env:
        db = env.open_db(database.encode(), create=False)
        with env.begin() as txn:
            return {(int.from_bytes(k[:4]), int.from_bytes(k[4:])): v for k, v in txn.cursor(db)}


@pytest.mark.parametrize("name", CODECS)
def test_only_updates_are_encoded(
    stored: Callable[[str], Path], arrays: Callable[..., RoundArrays], name: str
) -> None:
    path, codec = stored(name), CODECS[name]
    for (t, index), record in values(path, "updates").items():
        payload, _ = codec.encode(arrays(t).updates[index])
        assert (record[6], record[48:]) == (codec.id, bytes(payload))
    for (t, index), record in values(path, "models").items():
        exact = arrays(t).global_weights if index == 2**32 - 4 else arrays(t).aggregate
        assert (record[6], record[48:]) == (1, exact.tobytes())
    store = LMDBHistory(path)  # which codec it is is on disk
    assert store.manifest.codec == name
    assert store.verify() == range(2)
    found = store.read(1, ["client-3", "client-0"])
    store.close()
    records = values(path, "updates")
    for row, index in enumerate((3, 0)):
        expected = np.empty(D, np.float32)
        codec.decode(memoryview(records[1, index][48:]), expected)
        assert found.updates[row].tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", CODECS)
def test_error_bounds_are_in_the_round_record(
    stored: Callable[[str], Path], arrays: Callable[..., RoundArrays], name: str
) -> None:
    path = stored(name)
    entry = json.loads(values(path, "rounds")[1, ROUND][48:])
    if CODECS[name].lossless:
        assert entry["max_error"] is None
        return
    store = LMDBHistory(path)
    off = np.abs(store.read(1).updates.astype(np.float64) - arrays(1).updates).max(axis=1)
    store.close()
    assert (off > 0).all()
    assert (off <= entry["max_error"]).all()
    # And they are not much larger than the errors are.
    assert (off >= 0.3 * np.array(entry["max_error"])).all()


def test_sizes(stored: Callable[[str], Path]) -> None:
    """Bytes of an update, the header apart: 2,000 entries are 32 blocks of up to 64."""
    sizes = {
        name: {len(record) - 48 for record in values(stored(name), "updates").values()}
        for name in ("float32", "float16", "int8", "sign")
    }
    assert sizes == {"float32": {8000}, "float16": {4004}, "int8": {2064}, "sign": {254}}


def test_codec_of_a_new_history(tmp_path: Path, manifest: Manifest) -> None:
    """That of the store, else that of the manifest."""
    as_manifest = replace(manifest, codec="zstd")
    for given, found in ((None, "zstd"), ("int8", "int8")):
        with LMDBHistory(tmp_path / found, codec=given) as history:
            history.begin(as_manifest)
            assert history.manifest == replace(manifest, codec=found)
    with LMDBHistory(tmp_path / "default") as history:
        history.begin(manifest)
        assert history.manifest.codec == "float32"


def test_another_codec_than_recorded_is_refused(
    stored: Callable[[str], Path], arrays: Callable[..., RoundArrays]
) -> None:
    path = stored("float16")
    for codec in (None, "float16"):
        store = LMDBHistory(path, codec=codec)
        assert store.rounds() == range(2)
        store.close()
    store = LMDBHistory(path, codec="int8")
    both = "stores updates as `float16`, but was opened with codec=`int8`"
    for use in (store.rounds, store.verify, lambda: store.manifest):
        with pytest.raises(HistoryFormatError, match=both):
            use()
    with pytest.raises(HistoryFormatError, match=both):
        store.append(arrays(2))
    store.close()


def test_unknown_codec_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'float61'. Did you mean `float16`\? Known: "):
        LMDBHistory(tmp_path, codec="float61")


def test_repr_and_arguments(tmp_path: Path) -> None:
    history = LMDBHistory(tmp_path, codec="int8", map_size=2**20)
    assert (history.codec, history.map_size) == ("int8", 2**20)
    assert LMDBHistory(tmp_path).codec is None


def test_own_codec(tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays]) -> None:
    register_codec(Doubled())
    store = LMDBHistory(tmp_path, codec="doubled")
    store.begin(manifest)
    store.append(arrays(0))
    assert (store.read(0).updates == arrays(0).updates).all()
    store.close()
    assert values(tmp_path, "updates")[0, 2][48:] == (2 * arrays(0).updates[2]).tobytes()


def test_own_codec_made_of_another_one(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> None:
    """What it overrides is what is called, however the other one is encoded."""
    register_codec(Inverted())
    for codec in ("inverted", "float16"):
        with_codec = LMDBHistory(tmp_path / codec, codec=codec)
        with_codec.begin(manifest)
        with_codec.append(arrays(0))
        assert with_codec.verify() == range(1)
        with_codec.close()
    own, other = (values(tmp_path / codec, "updates") for codec in ("inverted", "float16"))
    assert own[0, 2][48:] == bytes(byte ^ 255 for byte in other[0, 2][48:])


def test_own_codec_that_is_not_registered(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> None:
    register_codec(Doubled())
    store = LMDBHistory(tmp_path, codec="doubled")
    store.begin(manifest)
    store.close()
    del CODECS["doubled"]
    with pytest.raises(HistoryFormatError, match=r"`doubled`.*Known: .*register_codec"):
        LMDBHistory(tmp_path).rounds()


@pytest.mark.parametrize(
    ("codec", "payload", "why"),
    [
        ("float16", b"\0" * 4000, "4000 bytes instead of 4004"),
        ("int8", b"\xff" * 2064, "a step that is negative or not finite"),
        ("zstd", zstandard.compress(bytes(2**20)), "a zstd frame of 1048576 bytes cannot hold"),
        ("lz4", b"garbage", "6 bytes came out instead of 8000"),
    ],
)
def test_payload_that_makes_no_sense(
    stored: Callable[[str], Path], codec: str, payload: bytes, why: str
) -> None:
    """Even with all checksums right, what is no vector is an error that says where it is."""
    path = stored(codec)
    store = LMDBHistory(path)
    recording, environment = store._open()
    data, checksum = recording.pack(1, 2, payload, codec=recording.codec.id, dtype=1, size=D)
    entry = json.loads(values_of(store)[48:])
    entry["updates"][2] = checksum
    record, _ = recording.pack(1, ROUND, json.dumps(entry).encode())
    with environment.write(0) as txn:
        key = (1).to_bytes(4) + (2).to_bytes(4)
        txn.put(key, data, db=environment._databases["updates"])
        key = (1).to_bytes(4) + ROUND.to_bytes(4)
        txn.put(key, record, db=environment._databases["rounds"])
    with pytest.raises(HistoryCorruptedError, match=rf"round 1, client `client-2`.*{codec}.*{why}"):
        store.read(1)
    assert store.read(1, ["client-1"]).updates.shape == (1, D)
    store.close()


def values_of(store: LMDBHistory) -> bytes:
    """Return the round record of round 1 of an open store."""
    environment = store._open()[1]
    with environment.read() as txn:
        found = environment.cursor(txn, "rounds").get((1).to_bytes(4) + ROUND.to_bytes(4))
        return bytes(found)


@pytest.mark.parametrize(("codec", "calls"), [("int8", 1), ("float32", 0), ("zstd", 0)])
def test_loops_are_compiled_before_the_first_round(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, codec: str, calls: int
) -> None:
    compiled: list[str] = []
    monkeypatch.setattr("fedrec.history.lmdb.history.compiled", lambda: compiled.append("now"))
    LMDBHistory(tmp_path / "history", codec=codec).begin(manifest)
    assert len(compiled) == calls
