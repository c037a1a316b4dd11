"""Tools of a history in shards: they treat it as one, whatever is interrupted."""

from __future__ import annotations

import dataclasses
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fedrec.exceptions import (
    ConfigurationError,
    ForgottenError,
    HistoryCorruptedError,
    HistoryError,
    HistoryFormatError,
    HistoryKeyError,
    HistoryLockedError,
)
from fedrec.history import (
    LMDBHistory,
    Manifest,
    RoundArrays,
    ShardedHistory,
    compact,
    export_history,
    forget,
    import_history,
    info,
    merge_history,
    repair,
    shard_history,
)
from fedrec.history.tools import forget as forgetting
from fedrec.history.tools import repair as repairing
from fedrec.history.tools.opening import history_folder, open_history

IDS = tuple(f"client-{i}" for i in range(5))  # of three shards: 0 1 | 2 3 | 4
D = 2000
WEIGHTS, AGGREGATE, ROUND = 2**32 - 4, 2**32 - 3, 2**32 - 1
ORDER = (IDS[4], IDS[1], IDS[3])


@pytest.fixture
def record(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> Callable[..., Path]:
    """Return a function that records four rounds, all clients in some and three in others."""

    def make(name: str, num_shards: int | None = 3, **arguments: object) -> Path:
        cls = LMDBHistory if num_shards is None else ShardedHistory
        # The same recording: one in a file has the number of shards, as a merged one has.
        execution = {**manifest.execution, "num_shards": num_shards or 3}
        with cls(tmp_path / name, **arguments) as store:  # type: ignore[arg-type]
            store.begin(dataclasses.replace(manifest, execution=execution, store_id="a" * 32))
            for t in range(4):
                store.append(the_round(arrays, t))
        return tmp_path / name

    return make


def the_round(arrays: Callable[..., RoundArrays], t: int) -> RoundArrays:
    if t % 2:
        return arrays(t, ORDER, cohort=(*ORDER, IDS[0]), refused={IDS[0]: "silent"})
    return arrays(t)


def same(a: Path, b: Path, key: str | None = None) -> None:
    """Check that two histories read the same."""
    with open_history(a) as one, open_history(b, master_key=key) as other:
        assert one.rounds() == other.rounds()
        for t in one.rounds():
            assert one.index(t) == other.index(t)
            kept = one.index(t).kept
            x, y = one.read(t, kept), other.read(t, kept)
            assert (x.client_ids, x.cohort, x.refused) == (y.client_ids, y.cohort, y.refused)
            for name in ("global_weights", "aggregate", "updates", "num_samples"):
                np.testing.assert_array_equal(getattr(x, name), getattr(y, name))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def damage_record(path: Path, t: int, index: int) -> None:
    """Flip a bit of the record of a round and index."""
    data = bytearray((path / "data.mdb").read_bytes())
    head = b"FREC.{4}" + re.escape(struct.pack("<II", t, index))
    for match in re.finditer(head, bytes(data), re.DOTALL):
        data[match.start() + 60] ^= 1
    (path / "data.mdb").write_bytes(data)


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_there_and_back(record: Callable[..., Path], tmp_path: Path, codec: str) -> None:
    """A history that is merged, or sharded, equals one that was written so."""
    one, shards = record("one", None, codec=codec), record("shards", codec=codec)
    done = merge_history(shards, tmp_path / "merged")
    assert (done.rounds, done.num_shards) == (4, 1)
    assert done.num_bytes == (tmp_path / "merged" / "data.mdb").stat().st_size
    made = shard_history(one, tmp_path / "made", num_shards=3)
    assert (made.rounds, made.num_shards, made.path) == (4, 3, str(tmp_path / "made"))
    again = shard_history(shards, tmp_path / "five", num_shards=5)
    assert again.num_shards == 5
    for name in ("shards", "merged", "made", "five"):
        same(one, tmp_path / name)
        with open_history(tmp_path / name) as store:
            assert store.verify() == range(4)
            assert store.manifest.store_id == "a" * 32
            num_shards = store.manifest.execution["num_shards"]
            assert num_shards == (5 if name == "five" else 3)
        export_history(tmp_path / name, tmp_path / f"{name} exported")
    export_history(one, tmp_path / "exported")
    for name in ("shards", "merged", "made"):
        assert files(tmp_path / f"{name} exported") == files(tmp_path / "exported")
    # Each goes on as the other would.
    with ShardedHistory(tmp_path / "made") as store, LMDBHistory(tmp_path / "merged") as merged:
        for other in (store, merged):
            other.append(dataclasses.replace(store.read(3), round=4))
            assert other.verify() == range(5)
    assert not list(tmp_path.glob(".*"))


def test_conversions_that_are_refused(record: Callable[..., Path], tmp_path: Path) -> None:
    one = record("one", None)
    with pytest.raises(ConfigurationError, match="at most the 5 clients, but got 6"):
        shard_history(one, tmp_path / "new", num_shards=6)
    with pytest.raises(HistoryError, match=r"is not empty\. HINT: choose another NEW"):
        merge_history(one, one)
    with pytest.raises(HistoryFormatError, match="Nothing has been recorded"):
        merge_history(tmp_path / "nowhere", tmp_path / "new")
    damage_record(one, 2, 1)
    with pytest.raises(HistoryCorruptedError, match="round 2, client `client-1`"):
        shard_history(one, tmp_path / "new", num_shards=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one"]


def test_encrypted_ones_stay_encrypted(
    record: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("THE_KEY", "cd" * 32)
    key = "env:THE_KEY"
    shards = record("shards", master_key=key)
    with pytest.raises(HistoryKeyError, match=r"is encrypted\. HINT: give its master key"):
        merge_history(shards, tmp_path / "new")
    merge_history(shards, tmp_path / "merged", master_key=key)
    shard_history(tmp_path / "merged", tmp_path / "again", num_shards=2, master_key=key)
    with open_history(shards, master_key=key) as one:
        for name in ("merged", "again"):
            with open_history(tmp_path / name, master_key=key) as other:
                assert other.verify() == range(4)
                np.testing.assert_array_equal(one.read(3).updates, other.read(3).updates)
            assert open_history(tmp_path / name).is_locked
    done = forget(shards, [IDS[2]], master_key=key)
    assert (done.keys, done.updates) == ((IDS[2],), 2)
    with open_history(shards, master_key=key) as store:
        assert store.verify() == range(4)


def test_expired_updates_stay_so(record: Callable[..., Path], tmp_path: Path) -> None:
    shards = record("shards", keep={"last": 2})
    merge_history(shards, tmp_path / "merged")
    shard_history(tmp_path / "merged", tmp_path / "again", num_shards=2)
    for name in ("merged", "again"):
        same(shards, tmp_path / name)
        with open_history(tmp_path / name) as store:
            assert [len(store.index(t).kept) for t in range(4)] == [0, 0, 5, 3]
            assert store.verify() == range(4)


def test_info_sums_shards(record: Callable[..., Path], tmp_path: Path) -> None:
    one, about = info(record("one", None)), info(record("shards"))
    assert (one.num_shards, about.num_shards) == (1, 3)
    assert about.num_updates == one.num_updates == 5 + 3 + 5 + 3
    assert about.num_bytes == sum(
        path.stat().st_size for path in (tmp_path / "shards").glob("*/data.mdb")
    )
    assert about.num_bytes > one.num_bytes
    assert (about.num_rounds, about.num_clients, about.clients) == (4, 5, IDS)


def test_a_shard_stands_for_its_history(record: Callable[..., Path], tmp_path: Path) -> None:
    shards = record("run/history")
    assert history_folder(shards / "shard-001") == shards
    assert history_folder(tmp_path / "run") == shards
    assert info(shards / "shard-001").num_updates == 16


def test_compact_gives_back_of_all_shards(record: Callable[..., Path]) -> None:
    shards = record("shards")
    with ShardedHistory(shards) as store:
        before = store.num_bytes()
    left: list[int] = []
    done = compact(shards, progress=left.append)
    assert done.bytes_before == before
    assert left == list(range(11, -1, -1))
    with ShardedHistory(shards) as store:
        assert store.num_bytes() == done.bytes_after <= before
        assert store.verify() == range(4)
        with pytest.raises(HistoryLockedError):
            compact(shards)


def test_export_and_import(record: Callable[..., Path], tmp_path: Path) -> None:
    shards = record("shards")
    export_history(shards, tmp_path / "exported")
    with pytest.raises(HistoryFormatError, match="already holds a history"):
        import_history(tmp_path / "exported", shards)
    import_history(tmp_path / "exported", tmp_path / "imported")
    same(shards, tmp_path / "imported")


def test_a_damaged_update_goes_from_all_shards(record: Callable[..., Path]) -> None:
    shards = record("shards")
    damage_record(shards / "shard-001", 2, 3)
    with ShardedHistory(shards) as store:
        (damage,) = store.damage()
        assert str(damage).startswith("round 2, client `client-3` of shard 1: the stored bytes")
        before = store.manifest.store_id
    done = repair(shards)
    assert (done.rounds, done.rounds_before, done.dropped) == (4, 4, ((2, IDS[3]),))
    assert [path.parent.name for path in done.backups] == ["shard-000", "shard-001", "shard-002"]
    assert all(path.exists() for path in done.backups)
    with ShardedHistory(shards) as store:
        assert store.verify() == range(4)
        assert store.manifest.store_id != before
        assert store.index(2).refused == {IDS[3]: "damaged, dropped by a repair"}
        assert store.index(2).kept == (*IDS[:3], IDS[4])
    (note,) = info(shards).repairs
    assert note["dropped"] == [[2, IDS[3]]]
    assert repair(shards).backups == ()


@pytest.mark.parametrize("key", [None, "env:THE_KEY"])
@pytest.mark.parametrize("index", [WEIGHTS, AGGREGATE])
def test_a_damaged_vector_of_the_model_is_taken_from_another_shard(
    record: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, index: int, key: str | None
) -> None:
    if key is not None:
        pytest.importorskip("cryptography")
        monkeypatch.setenv("THE_KEY", "cd" * 32)
    whole, shards = record("whole", None), record("shards", master_key=key)
    for shard in (0, 2):
        damage_record(shards / f"shard-00{shard}", 2, index)
    done = repair(shards, master_key=key)
    assert (done.rounds, done.rounds_before, done.dropped) == (4, 4, ())
    assert len(done.mended) == 2
    assert done.mended == done.damage
    same(whole, shards, key)
    with ShardedHistory(shards, master_key=key) as store:
        assert store.verify() == range(4)


def test_a_vector_that_is_damaged_in_every_shard_takes_its_round(
    record: Callable[..., Path],
) -> None:
    shards = record("shards")
    for shard in range(3):
        damage_record(shards / f"shard-00{shard}", 2, WEIGHTS)
    done = repair(shards)
    assert (done.rounds, done.mended, len(done.damage)) == (2, (), 3)


def test_rounds_that_one_shard_loses_go_from_all(record: Callable[..., Path]) -> None:
    shards = record("shards")
    damage_record(shards / "shard-002", 2, ROUND)
    done = repair(shards)
    assert (done.rounds, done.rounds_before, done.dropped) == (2, 4, ())
    with ShardedHistory(shards) as store:
        assert store.verify() == range(2)
    assert [len(LMDBHistory(path).rounds()) for path in sorted(shards.iterdir())] == [2, 2, 2]


def test_rounds_in_which_shards_do_not_agree_go(
    record: Callable[..., Path], arrays: Callable[..., RoundArrays]
) -> None:
    shards = record("shards")
    with LMDBHistory(shards / "shard-001") as shard:
        shard.truncate(3)
        shard.append(dataclasses.replace(arrays(7).keep(()), round=3))
    done = repair(shards)
    assert "of shard 1: it has other entries" in str(done.damage[0])
    assert done.rounds == 3
    with ShardedHistory(shards) as store:
        assert store.verify() == range(3)


class Killed(BaseException):
    """Ends a tool as a kill would, but for what `finally` does."""


def after(calls: int, function: Callable[..., object]) -> Callable[..., object]:
    """Return the function, which kills after so many calls."""
    counted: Iterator[int] = iter(range(calls))

    def killing(*args: object, **kwargs: object) -> object:
        if next(counted, None) is None:
            raise Killed
        return function(*args, **kwargs)

    return killing


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_repair_that_is_killed_is_finished(
    record: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    shards = record("shards")
    damage_record(shards / "shard-001", 2, 3)
    monkeypatch.setattr(repairing, "put_in_place", after(calls, repairing.put_in_place))
    with pytest.raises(Killed):
        repair(shards)
    monkeypatch.undo()
    for use in (lambda: ShardedHistory(shards).rounds(), lambda: compact(shards)):
        with pytest.raises(HistoryError, match=r"interrupted\. HINT: finish it.*history repair"):
            use()
    done = repair(shards)
    assert (done.rounds, done.dropped) == (4, ((2, IDS[3]),))
    assert len(done.damage) == 1
    with ShardedHistory(shards) as store:
        assert store.verify() == range(4)
        assert store.index(2).kept == (*IDS[:3], IDS[4])
    assert len(info(shards).repairs) == 1
    assert sorted(path.name for path in shards.iterdir()) == [f"shard-00{v}" for v in range(3)]


def test_forgotten_in_all_shards(
    record: Callable[..., Path], arrays: Callable[..., RoundArrays]
) -> None:
    """An aggregate that is one of the updates is replaced in every shard."""
    shards = record("shards")
    with ShardedHistory(shards) as store:
        last = arrays(4)
        store.append(dataclasses.replace(last, aggregate=last.updates[2].copy()))
    done = forget(shards, [IDS[2], IDS[4]])
    assert (done.clients, done.updates, done.aggregates) == ((IDS[2], IDS[4]), 3 + 5, (4,))
    with ShardedHistory(shards) as store:
        assert store.verify() == range(5)
        assert store.forgotten == (IDS[2], IDS[4])
        assert store.index(0).kept == (*IDS[:2], IDS[3])
        assert store.index(1).kept == (IDS[1], IDS[3])
        with pytest.raises(ForgottenError):
            store.read(0, [IDS[2]])
        np.testing.assert_array_equal(store.read(0, [IDS[3]]).updates, arrays(0).updates[[3]])
    for data in shards.glob("*/data.mdb"):
        assert last.updates[2].tobytes() not in data.read_bytes()
    assert [f["updates"] for f in info(shards).forgotten] == [3, 5]


@pytest.mark.parametrize(
    ("name", "calls"), [("write_note", 1), *(("put_in_place", calls) for calls in range(3))]
)
def test_a_forgetting_that_is_killed_is_finished(
    record: Callable[..., Path],
    arrays: Callable[..., RoundArrays],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    calls: int,
) -> None:
    shards = record("shards")
    with ShardedHistory(shards) as store:
        last = arrays(4)
        store.append(dataclasses.replace(last, aggregate=last.updates[0].copy()))
    monkeypatch.setattr(forgetting, name, after(calls, getattr(forgetting, name)))
    with pytest.raises(Killed):
        forget(shards, [IDS[0]])
    monkeypatch.undo()
    with ShardedHistory(shards) as store:
        assert store.forgotten == (IDS[0],)
        with pytest.raises(ForgottenError, match=r"interrupted\. HINT: finish it"):
            store.read(0, [IDS[0]])
        np.testing.assert_array_equal(store.read(0, [IDS[3]]).updates, arrays(0).updates[[3]])
        with pytest.raises(HistoryCorruptedError, match="was interrupted"):
            store.verify()
    for use in (compact, repair):
        with pytest.raises(HistoryError, match="was interrupted"):
            use(shards)
    done = forget(shards, [IDS[3], IDS[0]])
    assert (done.clients, done.aggregates) == ((IDS[0], IDS[3]), (4,))
    with ShardedHistory(shards) as store:
        assert store.verify() == range(5)
        assert store.forgotten == (IDS[0], IDS[3])
        assert store.index(0).kept == (IDS[1], IDS[2], IDS[4])
    assert [(f["client_id"], f["updates"]) for f in info(shards).forgotten] == [
        (IDS[0], 3),
        (IDS[3], 5),
    ]


def test_tools_name_a_missing_shard(record: Callable[..., Path]) -> None:
    shards = record("shards")
    shutil.rmtree(shards / "shard-000")
    for use in (info, compact, repair, lambda path: forget(path, [IDS[0]])):
        with pytest.raises(HistoryFormatError, match="lacks shard-000 of its 3 shards"):
            use(shards)
