"""A history in shards: what counts, who has what, and what is left of a crash."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedrec
from fedrec.distributed.ranks import Ranks
from fedrec.distributed.sharding import Sharding
from fedrec.distributed.updates import ShardedUpdates
from fedrec.exceptions import (
    ConfigurationError,
    HistoryError,
    HistoryFormatError,
    HistoryFullError,
    HistoryLockedError,
    RoundNotFoundError,
)
from fedrec.history import LMDBHistory, Manifest, RoundArrays, ShardedHistory
from fedrec.history.conversion import to_record
from fedrec.types import RoundRecord

IDS = tuple(f"client-{i}" for i in range(5))  # of three shards: 0 1 | 2 3 | 4
D = 2000


class FakeRanks(Ranks):
    """Ranks that are threads."""

    def __init__(self, rank: int, said: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.size = rank, len(said)
        self._said, self._barrier = said, barrier

    def gather(self, value: Any) -> list[Any]:
        self._said[self.rank] = pickle.dumps(value)
        self._barrier.wait(60)
        values = [pickle.loads(said) for said in self._said]
        self._barrier.wait(60)
        return values

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]


def together(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """Do work in so many ranks at once; return what each returns, or the error it ends in."""
    said, barrier = [None] * size, threading.Barrier(size)

    def one(rank: int) -> Any:
        try:
            return work(FakeRanks(rank, said, barrier))
        except (HistoryError, ConfigurationError) as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@pytest.fixture
def sharded(manifest: Manifest) -> Callable[..., Manifest]:
    """Return a function that makes the manifest of a history in so many shards."""

    def make(num_shards: int = 3, **changes: Any) -> Manifest:
        execution = {**manifest.execution, "num_shards": num_shards}
        return dataclasses.replace(manifest, execution=execution, **changes)

    return make


@pytest.fixture
def written(
    tmp_path: Path, sharded: Callable[..., Manifest], arrays: Callable[..., RoundArrays]
) -> Callable[..., Path]:
    """Return a function that records rounds in shards and returns the directory."""

    def make(num_rounds: int = 3, num_shards: int = 3, **changes: Any) -> Path:
        with ShardedHistory(tmp_path / "history") as store:
            store.begin(sharded(num_shards, **changes))
            for t in range(num_rounds):
                store.append(arrays(t))
        return tmp_path / "history"

    return make


def assert_round(read: RoundArrays, written: RoundArrays) -> None:
    assert read.client_ids == written.client_ids
    for name in ("global_weights", "aggregate", "updates", "num_samples"):
        np.testing.assert_array_equal(getattr(read, name), getattr(written, name), name)


def test_each_shard_has_all_rounds_and_the_updates_of_its_clients(
    written: Callable[..., Path], arrays: Callable[..., RoundArrays]
) -> None:
    path = written(2)
    own = [IDS[:2], IDS[2:4], IDS[4:]]
    store_ids = set()
    for shard, ids in enumerate(own):
        with LMDBHistory(path / f"shard-00{shard}") as store:
            assert store.rounds() == range(2)
            assert store.index(1).present == IDS
            assert store.index(1).kept == ids
            np.testing.assert_array_equal(store.read(1, ()).aggregate, arrays(1).aggregate)
            assert store.manifest.execution["shard"] == shard
            assert tuple(store.manifest.clients) == IDS
            store_ids.add(store.manifest.store_id)
    with ShardedHistory(path) as store:
        assert store_ids == {store.manifest.store_id}
        assert store.manifest.execution["num_shards"] == 3
        assert "shard" not in store.manifest.execution
        assert store.index(1).kept == IDS
        assert_round(store.read(1), arrays(1))
        assert store.num_bytes() == sum(p.stat().st_size for p in path.glob("*/data.mdb"))


def test_a_round_counts_when_all_shards_have_it(
    written: Callable[..., Path],
    arrays: Callable[..., RoundArrays],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where the disk was full for the second shard, the round is gone from the first one, too."""
    path = written(2)
    store = ShardedHistory(path)
    append = LMDBHistory.append

    def full(self: LMDBHistory, arrays: RoundArrays) -> None:
        if self.path.name == "shard-001":
            raise HistoryFullError("full")
        append(self, arrays)

    monkeypatch.setattr(LMDBHistory, "append", full)
    with pytest.raises(HistoryFullError):
        store.append(arrays(2))
    monkeypatch.undo()
    assert store.rounds() == range(2)
    with pytest.raises(RoundNotFoundError, match=r"Round 2 .*\(rounds 0\.\.1\)"):
        store.read(2)
    store.close()
    assert len(LMDBHistory(path / "shard-000").rounds()) == 3
    with ShardedHistory(path) as reading:
        assert reading.verify() == range(2)
    assert len(LMDBHistory(path / "shard-000").rounds()) == 3  # reading changes nothing
    assert caplog.text == ""
    with ShardedHistory(path) as store, caplog.at_level(logging.WARNING):
        store.append(dataclasses.replace(arrays(7), round=2))
        assert "dropped round 2 of shard 0," in caplog.text
        assert store.rounds() == range(3)
        assert_round(store.read(2), dataclasses.replace(arrays(7), round=2))
        assert store.verify() == range(3)


def test_a_process_that_is_killed_between_two_shards(
    written: Callable[..., Path], arrays: Callable[..., RoundArrays], run_script: Any
) -> None:
    path = written(1)
    code = """
import os, sys
import numpy as np
from fedrec.history import LMDBHistory, ShardedHistory
store = ShardedHistory(sys.argv[1])
append = LMDBHistory.append
def dying(self, arrays):
    if self.path.name == "shard-002" and arrays.round == 3:
        while len(LMDBHistory(self.path.parent / "shard-000").rounds()) < 4:
            pass  # shards are written side by side
        sys.stdout.write("dying")
        sys.stdout.flush()
        os._exit(0)
    append(self, arrays)
LMDBHistory.append = dying
import dataclasses
for t in range(1, 9):
    store.append(dataclasses.replace(store.read(0), round=t))
"""
    assert run_script(code, path) == "dying"
    counts = [len(LMDBHistory(p).rounds()) for p in sorted(path.iterdir())]
    assert (counts[0], counts[2]) == (4, 3)
    with ShardedHistory(path) as store:
        assert store.verify() == range(3)
        for t in range(3, 6):
            store.append(arrays(t))
        assert store.verify() == range(6)
        assert_round(store.read(4), arrays(4))


def test_kill_nine_while_recording(
    written: Callable[..., Path], arrays: Callable[..., RoundArrays]
) -> None:
    path = written(1)
    code = """
import dataclasses, sys
from fedrec.history import ShardedHistory
store = ShardedHistory(sys.argv[1])
first = store.read(0)
for t in range(1, 100000):
    store.append(dataclasses.replace(first, round=t))
    print(t, flush=True)
"""
    root = str(Path(fedrec.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", code, path],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
        text=True,
    ) as process:
        assert process.stdout is not None
        last = 0
        for line in process.stdout:
            last = int(line)
            if last == 4:
                process.kill()
    with ShardedHistory(path) as store:
        rounds = len(store.rounds())
        assert rounds >= last + 1
        assert store.verify() == range(rounds)
        store.append(arrays(rounds))
        assert store.verify() == range(rounds + 1)
        assert_round(store.read(rounds - 1), dataclasses.replace(arrays(0), round=rounds - 1))


@pytest.mark.parametrize("num_shards", [1, 3])
def test_truncated_with_updates_that_expire(
    tmp_path: Path,
    sharded: Callable[..., Manifest],
    arrays: Callable[..., RoundArrays],
    num_shards: int,
) -> None:
    """What was deleted for rounds that are dropped is not said to be there again."""
    with ShardedHistory(tmp_path, keep={"last": 3}) as store:
        store.begin(sharded(num_shards))
        for t in range(8):
            store.append(arrays(t))
    with LMDBHistory(tmp_path / "shard-000") as shard:
        shard.truncate(6)
        assert shard.rounds() == range(6)
        assert [bool(shard.index(t).kept) for t in range(6)] == [False] * 5 + [True]
        assert shard.verify() == range(6)
    with ShardedHistory(tmp_path) as store:
        assert store.rounds() == range(6)
        own = IDS[: -(-5 // num_shards)]
        elsewhere = tuple(c for c in IDS if c not in own)
        # The others have 8 rounds yet, and nothing of round 4.
        assert store.index(4).kept == ()
        assert store.index(5).kept == IDS
        store.append(arrays(6))
        assert store.index(4).kept == ()
        assert store.verify() == range(7)
        assert_round(store.read(6), arrays(6))
        assert elsewhere == (() if num_shards == 1 else IDS[2:])


def test_truncate_to_what_is_there_changes_nothing(recorded: Callable[..., Path]) -> None:
    path = recorded(3)
    before = (path / "data.mdb").read_bytes()
    with LMDBHistory(path) as store:
        store.truncate(3)
        store.truncate(9)
    assert (path / "data.mdb").read_bytes() == before


def test_truncate_all(recorded: Callable[..., Path], arrays: Callable[..., RoundArrays]) -> None:
    with LMDBHistory(recorded(3)) as store:
        store.append(arrays(3))
        store.truncate(0)
        assert store.rounds() == range(0)
        store.append(arrays(0))
        assert store.verify() == range(1)


def test_only_one_writes(written: Callable[..., Path], arrays: Callable[..., RoundArrays]) -> None:
    path = written(2)
    with ShardedHistory(path) as store, ShardedHistory(path) as other:
        store.append(arrays(2))
        with pytest.raises(HistoryLockedError):
            other.append(arrays(3))
        assert other.rounds() == range(3)


def test_a_recording_that_could_not_be_begun_is_begun_anew(
    tmp_path: Path,
    sharded: Callable[..., Manifest],
    arrays: Callable[..., RoundArrays],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = LMDBHistory.begin

    def full(self: LMDBHistory, manifest: Manifest) -> None:
        if self.path.name == "shard-002":
            raise HistoryFullError("full")
        begin(self, manifest)

    monkeypatch.setattr(LMDBHistory, "begin", full)
    store = ShardedHistory(tmp_path)
    with pytest.raises(HistoryFullError):
        store.begin(sharded(5))
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shard-000", "shard-001"]
    assert store.is_empty
    assert ShardedHistory(tmp_path).is_empty
    with ShardedHistory(tmp_path) as again:
        assert again.rounds() == range(0)
        again.begin(sharded(1))
        again.append(arrays(0))
        assert again.verify() == range(1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shard-000"]


def test_a_missing_shard_is_named(written: Callable[..., Path]) -> None:
    path = written(2)
    shutil.rmtree(path / "shard-001")
    with pytest.raises(HistoryFormatError, match=r"lacks shard-001 of its 3 shards.*HINT: put it"):
        ShardedHistory(path).rounds()


def test_shards_of_two_recordings_are_none(
    written: Callable[..., Path], recorded: Callable[..., Path], tmp_path: Path
) -> None:
    path = written(2)
    (tmp_path / "history").rename(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    written(2, store_id="0" * 32)
    shutil.rmtree(path / "shard-001")
    shutil.copytree(tmp_path / "copy" / "shard-001", path / "shard-001")
    with pytest.raises(HistoryFormatError, match="not of one recording"):
        ShardedHistory(path).rounds()
    shutil.rmtree(path / "shard-001")
    shutil.copytree(recorded(2, "ordinary"), path / "shard-001")
    with pytest.raises(HistoryFormatError, match="not shard 1 of another"):
        ShardedHistory(path).rounds()


def test_one_kind_given_to_the_other(
    written: Callable[..., Path], recorded: Callable[..., Path], sharded: Callable[..., Manifest]
) -> None:
    ordinary, path = recorded(2, "ordinary"), written(2)
    for ask in (lambda s: s.is_empty, lambda s: s.manifest, lambda s: s.begin(sharded())):
        expected = r"in one file, not in shards\. HINT: open it with `LMDBHistory`.*history shard"
        with pytest.raises(HistoryFormatError, match=expected):
            ask(ShardedHistory(ordinary))
        expected = r"in shards\. HINT: open it with `ShardedHistory`.*fedrec history merge"
        with pytest.raises(HistoryFormatError, match=expected):
            ask(LMDBHistory(path))
    assert not (path / "data.mdb").exists()


def test_shards_that_do_not_agree(
    written: Callable[..., Path], arrays: Callable[..., RoundArrays]
) -> None:
    path = written(1)
    other = dataclasses.replace(
        arrays(1),
        aggregate=arrays(2).aggregate,
        dropped=frozenset(IDS),
        updates=np.zeros((0, D), "f4"),
    )
    for shard, ids in enumerate((IDS[:2], IDS[2:4], IDS[4:])):
        with LMDBHistory(path / f"shard-00{shard}") as store:
            store.append(other if shard == 1 else arrays(1).keep(ids))
    with ShardedHistory(path) as store:
        (damage,) = store.damage()
        assert str(damage) == (
            "round 1, the round record of shard 1: it has other entries ['aggregate'] than shard 0"
        )
        with pytest.raises(HistoryError, match="round 1, the round record of shard 1"):
            store.read(1)
        assert_round(store.read(0), arrays(0))


def test_as_stored_is_written_as_it_was_encoded(
    tmp_path: Path, sharded: Callable[..., Manifest], arrays: Callable[..., RoundArrays]
) -> None:
    ids = (IDS[4], IDS[0], IDS[2])
    record = to_record(arrays(0, ids, cohort=ids))
    with ShardedHistory(tmp_path, codec="int8") as store:
        store.begin(sharded())
        expected = store.as_stored(record.updates)
        store.write_round(record)
        assert store._encoded._rows == {}
        assert torch.equal(store.read_round(0).updates, expected)


def test_an_encrypted_history(
    tmp_path: Path,
    sharded: Callable[..., Manifest],
    arrays: Callable[..., RoundArrays],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("THE_KEY", "ab" * 32)
    with ShardedHistory(tmp_path, master_key="env:THE_KEY") as store:
        store.begin(sharded())
        store.append(arrays(0))
        assert store.verify() == range(1)
        assert_round(store.read(0), arrays(0))
    with ShardedHistory(tmp_path) as locked:
        assert locked.is_locked
        assert locked.verify() == range(1)


def test_it_can_be_pickled(
    written: Callable[..., Path], arrays: Callable[..., RoundArrays]
) -> None:
    with ShardedHistory(written(2)) as store:
        store.rounds()
        with pickle.loads(pickle.dumps(store)) as other:
            assert_round(other.read(1), arrays(1))


# Several ranks


def part_of(record: RoundRecord, sharding: Sharding, ranks: Ranks) -> RoundRecord:
    """Return a record as a rank has it."""
    own = sharding.in_order(sharding.owned(record.client_ids))
    sent = ShardedUpdates(
        part=record.sent.select(own).updates.clone(),
        sharding=sharding,
        ranks=ranks,
        client_ids=record.client_ids,
        num_samples=record.num_samples,
    )
    return dataclasses.replace(record, sent=sent)


def record_in_ranks(
    folders: Sequence[Path], manifest: Manifest, records: Sequence[RoundRecord]
) -> list[Any]:
    """Record rounds in several ranks, each in its folder."""

    def work(ranks: Ranks) -> Any:
        with ShardedHistory(folders[ranks.rank]) as store:
            store.attach(ranks)
            if store.is_empty:
                store.begin(dataclasses.replace(manifest, store_id=str(ranks.rank) * 32))
            sharding = Sharding(
                client_ids=tuple(manifest.clients),
                num_shards=manifest.execution["num_shards"],
                rank=ranks.rank,
                size=ranks.size,
            )
            for record in records[len(store.rounds()) :]:
                store.write_round(part_of(record, sharding, ranks))
            return store.manifest.store_id, len(store.rounds())

    return together(len(folders), work)


@pytest.mark.parametrize("apart", [False, True], ids=["one disk", "a disk each"])
def test_ranks_write_and_read_their_own_shards(
    tmp_path: Path,
    sharded: Callable[..., Manifest],
    arrays: Callable[..., RoundArrays],
    apart: bool,
) -> None:
    folders = [tmp_path / str(rank) if apart else tmp_path for rank in range(2)]
    order = (IDS[4], IDS[1], IDS[0], IDS[3])
    rounds = [arrays(0), arrays(1, order, cohort=order), arrays(2)]
    records = [to_record(r) for r in rounds]
    # Shards 0 and 1 are of rank 0, shard 2 is of rank 1.
    assert record_in_ranks(folders, sharded(), records) == [("0" * 32, 3)] * 2
    if apart:
        assert [len(list(folder.iterdir())) for folder in folders] == [2, 1]

    def read(ranks: Ranks) -> Any:
        with ShardedHistory(folders[ranks.rank]) as store:
            store.attach(ranks)
            assert store.rounds() == range(3)
            record = store.read_round(1)
            some = store.read_round(1, [IDS[0], IDS[4]])
            with pytest.raises(RoundNotFoundError, match="nobody"):
                store.read_round(1, ["nobody"])
            with pytest.raises(HistoryError, match=r"cannot read a whole round.*shard-00"):
                store.read(1)
            assert isinstance(record.sent, ShardedUpdates)
            return record.sent, some.sent, [store.index(t).bounds for t in range(3)]

    found = together(2, read)
    by_id = dict(zip(order, rounds[1].updates, strict=True))
    for (sent, some, bounds), own in zip(found, ([IDS[1], IDS[0], IDS[3]], [IDS[4]]), strict=True):
        assert sent.client_ids == order
        assert sent.own_ids == own
        np.testing.assert_array_equal(sent.part.numpy(), np.stack([by_id[c] for c in own]))
        assert some.client_ids == (IDS[0], IDS[4])
        assert len(some.part) == 1
        assert bounds == [dict(zip(r.client_ids, r.magnitudes(), strict=True)) for r in rounds]
    # One process reads all of them, where they are in one place.
    if apart:
        shutil.copytree(folders[1] / "shard-002", folders[0] / "shard-002")
    with ShardedHistory(folders[0]) as store:
        assert store.verify() == range(3)
        for t, written in enumerate(rounds):
            assert_round(store.read(t), written)
        store.attach(Ranks())
        record = store.read_round(1)
        assert isinstance(record.sent, ShardedUpdates)
        np.testing.assert_array_equal(record.updates.numpy(), rounds[1].updates)


def test_ranks_drop_what_others_lack(
    tmp_path: Path,
    sharded: Callable[..., Manifest],
    arrays: Callable[..., RoundArrays],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folders = [tmp_path / str(rank) for rank in range(2)]
    records = [to_record(arrays(t)) for t in range(4)]
    record_in_ranks(folders, sharded(), records)
    with LMDBHistory(folders[1] / "shard-002") as store:
        store.truncate(2)

    def rounds(ranks: Ranks) -> Any:
        with ShardedHistory(folders[ranks.rank]) as store:
            store.attach(ranks)
            with pytest.raises(RoundNotFoundError, match="Round 2"):
                store.index(2)
            return store.rounds()

    assert together(2, rounds) == [range(2)] * 2
    assert len(LMDBHistory(folders[0] / "shard-001").rounds()) == 4
    others = [to_record(dataclasses.replace(arrays(9 + t), round=t)) for t in range(3)]
    assert record_in_ranks(folders, sharded(), [*records[:2], others[2]]) == [("0" * 32, 3)] * 2
    assert "dropped rounds 2..3 of shard 0, rounds 2..3 of shard 1," in caplog.text
    shutil.copytree(folders[1] / "shard-002", folders[0] / "shard-002")
    with ShardedHistory(folders[0]) as store:
        assert store.verify() == range(3)
        np.testing.assert_array_equal(store.read(2).updates, arrays(11).updates)


def test_all_ranks_are_told_what_one_lacks(
    tmp_path: Path, sharded: Callable[..., Manifest], arrays: Callable[..., RoundArrays]
) -> None:
    folders = [tmp_path / str(rank) for rank in range(2)]
    record_in_ranks(folders, sharded(), [to_record(arrays(0))])

    def attach(ranks: Ranks) -> Any:
        with ShardedHistory(folders[ranks.rank]) as store:
            store.attach(ranks)
            return store.is_empty

    (folders[1] / "shard-002").rename(tmp_path / "shard-002")
    for error in together(2, attach):
        assert isinstance(error, HistoryFormatError)
        assert "lacks shard-002 of its 3 shards where rank 1 looks for it" in str(error)
    (tmp_path / "shard-002").rename(folders[1] / "shard-002")
    data = bytearray((folders[1] / "shard-002" / "data.mdb").read_bytes())
    place = data.rindex(b'{"model_fingerprint"')
    data[place] ^= 1
    (folders[1] / "shard-002" / "data.mdb").write_bytes(data)
    for error in together(2, attach):
        assert re.search("manifest of history .*shard-002. is not what was written", str(error))


@pytest.mark.parametrize("apart", [False, True], ids=["one disk", "a disk each"])
def test_a_begin_that_failed_in_one_rank_is_begun_anew(
    tmp_path: Path,
    sharded: Callable[..., Manifest],
    arrays: Callable[..., RoundArrays],
    monkeypatch: pytest.MonkeyPatch,
    apart: bool,
) -> None:
    folders = [tmp_path / str(rank) if apart else tmp_path for rank in range(2)]
    begin = LMDBHistory.begin

    def full(self: LMDBHistory, manifest: Manifest) -> None:
        if self.path.name == "shard-002":
            raise HistoryFullError("full")
        begin(self, manifest)

    monkeypatch.setattr(LMDBHistory, "begin", full)
    errors = record_in_ranks(folders, sharded(), [])
    assert [type(error) for error in errors] == [HistoryFullError] * 2
    monkeypatch.undo()
    assert record_in_ranks(folders, sharded(2), [to_record(arrays(0))]) == [("0" * 32, 1)] * 2
    found = [sorted(p.name for p in folder.iterdir()) for folder in folders]
    assert found == ([["shard-000"], ["shard-001"]] if apart else [["shard-000", "shard-001"]] * 2)


def test_more_ranks_than_shards(
    tmp_path: Path, sharded: Callable[..., Manifest], arrays: Callable[..., RoundArrays]
) -> None:
    errors = record_in_ranks([tmp_path] * 3, sharded(2), [])
    assert all(isinstance(error, ConfigurationError) for error in errors)
