"""R7, R8, R9, S2: files that are not as they were written."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import resource
import shutil
import struct
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np
from fault_stores import IDS, D, Facts, arrays, fork, kept, manifest, record, same, stored

from fedrec.exceptions import FedrecError, HistoryCorruptedError
from fedrec.history import LMDBHistory
from fedrec.history.lmdb import pages
from fedrec.history.lmdb.records import NAMES, StoredManifest
from fedrec.history.tools.info import info

ROUNDS = 5
HEADER = 48
DATABASES = ("meta", "models", "updates", "rounds")
_MOST_MEMORY = 300  # MB that reading one of these small histories may take, interpreter included


class Place(NamedTuple):
    """Where a record lies in the file."""

    database: str
    round: int
    index: int
    offset: int
    size: int

    @property
    def name(self) -> str:
        return NAMES.get(self.index) or f"client `{IDS[self.index]}`"


@cache
def places(path: Path) -> list[Place]:
    """Find all records in the file of a history, through LMDB's own map of it."""
    data = (path / "data.mdb").read_bytes()
    found = []
    with lmdb.open(str(path), max_dbs=8, map_size=2**30, readonly=True, lock=False) as env:
        dbs = {name: env.open_db(name.encode(), create=False) for name in DATABASES}
        with env.begin(buffers=True) as txn:
            for name, db in dbs.items():
                for key, value in txn.cursor(db):
                    address = np.frombuffer(value, np.uint8).__array_interface__["data"][0]
                    t, index = struct.unpack(">II", key)
                    found.append((name, t, index, address, len(value), bytes(value)))
    # A vector is in the file once: that tells where the map begins.
    name, t, index, address, size, value = next(f for f in found if f[0] == "updates")
    assert data.count(value) == 1
    base = address - data.index(value)
    result = [Place(n, t, i, address - base, size) for n, t, i, address, size, _ in found]
    for place, (*_, value) in zip(result, found, strict=True):
        assert data[place.offset : place.offset + place.size] == value
    return result


def reading(path: Path, codec: str, _send: Callable[[object], None]) -> dict[str, Any]:
    """Read a history that may be damaged, as a program would; return what went wrong.

    Anything but a round as it was written, or an error of fedrec's, raises.
    """
    errors: dict[str, str] = {}
    wrong = []
    try:
        store = LMDBHistory(path)
        rounds = store.rounds()
        if rounds != range(ROUNDS):
            wrong.append(f"rounds {rounds}")
        for t in rounds:
            try:
                if not same(store.read(t), stored(t, codec)):
                    wrong.append(f"round {t}")
            except FedrecError as error:
                errors[str(t)] = f"{type(error).__name__}: {error}"
        store.close()
    except FedrecError as error:
        errors["all"] = f"{type(error).__name__}: {error}"
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    assert "torch" not in sys.modules
    assert used < _MOST_MEMORY, f"{used} MB"
    return {"errors": errors, "wrong": wrong}


def going_on(path: Path, codec: str, _send: Callable[[object], None]) -> dict[str, Any]:
    """Append a round to a history that may be damaged, and read it all again."""
    store = LMDBHistory(path)
    try:
        store.append(arrays(ROUNDS))
    except FedrecError as error:
        return {"errors": {"all": str(error)}, "wrong": []}
    finally:
        store.close()
    lost = []
    for t in range(ROUNDS):
        try:
            if not same(store.read(t), stored(t, codec)):
                lost.append(f"round {t} is wrong")
        except FedrecError as error:
            lost.append(f"round {t}: {error}")
    store.close()
    return {"errors": {}, "wrong": lost}


def template(codec: str, folder: Path) -> Path:
    """Return a history that all trials of a row damage in turn."""
    path = folder.parent / f"template-{codec}"
    if not path.exists():
        record(path, ROUNDS, codec)
    return path


def flip(path: Path, offset: int, bit: int) -> None:
    """Flip a bit in the file."""
    file = os.open(path / "data.mdb", os.O_RDWR)
    byte = os.pread(file, 1, offset)[0]
    os.pwrite(file, bytes([byte ^ 1 << bit]), offset)
    os.close(file)


def flipped_record(codec: str, rng: random.Random, folder: Path) -> Facts:
    """R7: one bit of a committed header or payload."""
    path = template(codec, folder)
    place = rng.choice(places(path))
    part = rng.choice(("header", "payload"))
    start, end = (0, HEADER) if part == "header" else (HEADER, place.size)
    offset, bit = place.offset + rng.randrange(start, end), rng.randrange(8)
    flip(path, offset, bit)
    try:
        found = fork(partial(reading, path, codec)).result()
    finally:
        flip(path, offset, bit)
    assert found["wrong"] == [], (place, offset, bit, found)
    if place.database == "meta":
        assert list(found["errors"]) == ["all"], (place, offset, bit, found)
    else:
        # The damaged record is named, and every other round is as it was.
        assert list(found["errors"]) == [str(place.round)], (place, offset, bit, found)
        assert f"round {place.round}, {place.name}" in found["errors"][str(place.round)]
    return {f"{part}s": 1}


@cache
def structure(path: Path) -> tuple[list[int], list[int]]:
    """Return the pages of keys that are in use, and all pages that are not those of a value."""
    size = (path / "data.mdb").stat().st_size
    large = [(p.offset, p.offset + p.size) for p in places(path) if p.size > 2000]
    free = [
        page
        for page in range(size // 4096)
        if not any(start < 4096 * page + 4096 and 4096 * page < end for start, end in large)
    ]
    env = lmdb.open(str(path), max_dbs=8, readonly=True, lock=False)
    with env, env.begin() as txn, (path / "data.mdb").open("rb") as file:
        walk = pages._Walk(file.fileno(), 4096, env.info()["last_pgno"])
        file.seek(4096 * (txn.id() % 2))
        walk.check(np.frombuffer(file.read(pages._META.itemsize), pages._META)[0])
    return [0, 1, *sorted(walk._seen)], free


def flipped_structure(codec: str, rng: random.Random, folder: Path) -> Facts:
    """R7: one bit of what is no record: LMDB's pages of keys, of free pages, its first pages."""
    path = template(codec, folder)
    taken = [(p.offset, p.offset + p.size) for p in places(path)]
    # Most pages are of earlier transactions: half of the bits are where a flip counts.
    chosen = rng.choice(structure(path))
    while True:
        offset = 4096 * rng.choice(chosen) + rng.randrange(4096)
        if not any(start <= offset < end for start, end in taken):
            break
    bit = rng.randrange(8)
    flip(path, offset, bit)
    try:
        found = fork(partial(reading, path, codec)).result()
        facts = {"error" if found["errors"] else "harmless": 1}
        assert found["wrong"] == [], (offset, bit, found)
        if not found["errors"] and rng.random() < 0.3:
            flip(path, offset, bit)
            with kept(path):
                flip(path, offset, bit)
                after = fork(partial(going_on, path, codec)).result()
            flip(path, offset, bit)
            assert after["wrong"] == [], (offset, bit, after)
            facts["written to afterwards"] = 1
    finally:
        flip(path, offset, bit)
    return facts


def truncated(codec: str, rng: random.Random, folder: Path) -> Facts:
    """R8: a file of random length, one of no length, a lock file that is gone."""
    path = shutil.copytree(template(codec, folder), folder / "history")
    kind = rng.choices(("cut", "empty", "no lock"), (8, 1, 1))[0]
    if kind == "no lock":
        (path / "lock.mdb").unlink()
        assert fork(partial(reading, path, codec)).result() == {"errors": {}, "wrong": []}
        return {kind: 1}
    length = 0 if kind == "empty" else rng.randrange((path / "data.mdb").stat().st_size)
    os.truncate(path / "data.mdb", length)
    found = fork(partial(reading, path, codec)).result()
    assert found["wrong"] == []
    assert list(found["errors"]) == ["all"]
    assert found["errors"]["all"].startswith(HistoryCorruptedError.__name__)
    assert f"truncated: `data.mdb` has {length} bytes" in found["errors"]["all"]
    return {kind: 1}


def swapped(rng: random.Random, folder: Path) -> Facts:
    """R9: two records in each other's place, or one of another history."""
    path = record(folder / "history", ROUNDS).path
    other = record(folder / "other", ROUNDS, store_id="6" * 32).path
    one = rng.choice([p for p in places(path) if p.database != "meta"])
    alike = [p for p in places(path) if p.database == one.database and p != one]
    foreign = rng.random() < 0.3
    two = one if foreign else rng.choice(alike)
    values = {}
    for place, source in ((one, path), (two, other if foreign else path)):
        values[place, source] = _get(source, place)
    (first, second) = (values[one, path], values[two, other if foreign else path])
    _put(path, one, second)
    if not foreign:
        _put(path, two, first)
    found = fork(partial(reading, path, "float32")).result()
    assert found["wrong"] == []
    rounds = {one.round} if foreign else {one.round, two.round}
    # What LMDB moved may still lie where it was, and be read from there: `wrong` is what counts.
    assert {int(t) for t in found["errors"]} <= rounds, (one, two, found)
    store = LMDBHistory(path)
    named = set(map(str, store.damage()))
    store.close()
    for place in (one, two):
        assert any(f"round {place.round}, {place.name}" in text for text in named), (place, named)
    return {"from another history" if foreign else "swapped": 1}


def _open(path: Path) -> lmdb.Environment:
    return lmdb.open(str(path), max_dbs=8, map_size=2**30)


def _get(path: Path, place: Place) -> bytes:
    with _open(path) as env, env.begin() as txn:
        db = env.open_db(place.database.encode(), txn, create=False)
        value = txn.get(struct.pack(">II", place.round, place.index), db=db)
        assert value is not None
        return value


def _put(path: Path, place: Place, value: bytes) -> None:
    with _open(path) as env, env.begin(write=True) as txn:
        db = env.open_db(place.database.encode(), txn, create=False)
        txn.put(struct.pack(">II", place.round, place.index), value, db=db)


# -- S2 -------------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**32, 2**63, 10**30, 1e308, 0.5, "", "a", "../../x", "é\0"),
    *([], {}, [[]], [None], {"": None}, [0] * 50, ["a", "a"], {"__class__": "os.system"}),
)


def mutate(value: Any, rng: random.Random) -> Any:
    """Change one thing in a JSON value."""
    value = copy.deepcopy(value)
    node, parents = value, []
    while isinstance(node, (dict, list)) and node and (not parents or rng.random() < 0.6):
        name = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        parents.append((node, name))
        node = node[name]
    if not parents:
        return rng.choice(ODD)
    parent, name = parents[-1]
    kind = rng.randrange(5)
    if kind == 0:
        del parent[name]
    elif kind == 1 and isinstance(parent, dict):
        parent[f"{name}x"] = parent.pop(name)
    elif kind == 2 and isinstance(node, (int, float)):
        parent[name] = node + rng.choice((-1, 1, 2**16, 0.5))
    elif kind == 3 and isinstance(parent, list):
        parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(rng.choice(parent)))
    else:
        parent[name] = copy.deepcopy(rng.choice(ODD))
    return value


_FIELDS = struct.Struct("<4sHBBIIQ16sQ")
_LIMITS = (0, 2**16, 2**8, 2**8, 2**32, 2**32, 2**64, 0, 2**64)


KINDS = ("bytes", "header", "json", "sealed json", "sealed payload", "cut")


def forge(
    record_bytes: bytes,
    rng: random.Random,
    where: StoredManifest,
    place: Place,
    kinds: Sequence[str] = (*KINDS, "nested"),
) -> tuple[bytes, str]:
    """Make another record of one; some have a right checksum, as who forges them can do."""
    kind = rng.choice(kinds)
    payload = record_bytes[HEADER:]
    is_json = place.database in ("meta", "rounds")
    if kind == "header":
        fields = list(_FIELDS.unpack(record_bytes[:HEADER]))
        number = rng.choice([k for k, limit in enumerate(_LIMITS) if limit])
        limit = _LIMITS[number]
        fields[number] = rng.choice((0, 1, limit - 1, limit // 2, rng.randrange(limit)))
        return _FIELDS.pack(*fields) + payload, kind
    if kind == "cut":
        return record_bytes[: rng.randrange(len(record_bytes))], kind
    if kind == "nested" and is_json:
        deep = rng.choice((b"[" * 100_000, b'{"a":' * 50_000, b"1" * 100_000))
        return _seal(where, place, deep), "sealed json"
    if kind in ("json", "sealed json") and is_json:
        text = json.dumps(mutate(json.loads(payload), rng)).encode()
        if kind == "json":
            return record_bytes[:HEADER] + text, kind
        return _seal(where, place, text), kind
    if kind == "sealed payload" and not is_json:
        garbage = rng.randbytes(rng.choice((0, 1, 4 * D, len(payload), rng.randrange(9000))))
        return _seal(where, place, garbage), kind
    data = bytearray(record_bytes)
    for _ in range(rng.choice((1, 1, 4, 30))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data), "bytes"


def _seal(where: StoredManifest, place: Place, payload: bytes) -> bytes:
    is_json = place.database in ("meta", "rounds")
    codec = 0 if is_json else where.codec.id if place.database == "updates" else 1
    made, _ = where.pack(
        place.round,
        place.index,
        payload,
        codec=codec,
        dtype=0 if is_json else 1,
        size=None if is_json else D,
    )
    return made


def using(path: Path, codec: str, _send: Callable[[object], None]) -> dict[str, Any]:
    """Do everything that only reads with a history; any error but fedrec's own raises."""
    result = reading(path, codec, _send)
    for use in (lambda: info(path), lambda: LMDBHistory(path).verify(), lambda: _damage(path)):
        try:
            use()
        except FedrecError as error:
            result["errors"].setdefault("tools", str(error))
    for t in range(ROUNDS):
        with contextlib.suppress(FedrecError):
            LMDBHistory(path).index(t)
    return result


def _damage(path: Path) -> int:
    return len(LMDBHistory(path).damage())


def forged(codec: str, rng: random.Random, folder: Path) -> Facts:
    """S2: a history in which one record is another."""
    path = template(codec, folder)
    place = rng.choice(places(path))
    place = (
        place
        if rng.random() < 0.5
        else rng.choice([p for p in places(path) if p.database in ("meta", "rounds")])
    )
    original = _get(path, place)
    made, kind = forge(original, rng, StoredManifest("x", manifest(codec)), place)
    _put(path, place, made)
    try:
        found = fork(partial(using, path, codec)).result()
    finally:
        _put(path, place, original)
    if not kind.startswith("sealed"):
        # Without the checksum nothing that differs may pass.
        assert found["wrong"] == [], (place, kind, found)
        assert found["errors"] or made == original, (place, kind)
    return {kind: 1, "errors": bool(found["errors"])}
