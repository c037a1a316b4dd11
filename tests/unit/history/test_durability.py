"""When what was written waits for the disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedrec.exceptions import ConfigurationError, HistoryError
from fedrec.history import LMDBHistory, Manifest
from fedrec.history.lmdb.environment import Environment
from fedrec.history.rounds import RoundArrays


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of stored rounds at each sync that was asked for."""
    found: list[int] = []
    sync = Environment.sync

    def counting(self: Environment) -> None:
        with self.read() as txn:
            found.append(self.count(txn, "rounds"))
        sync(self)

    monkeypatch.setattr(Environment, "sync", counting)
    return found


def test_every_kth_round_the_last_one_and_close(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays], synced: list[int]
) -> None:
    store = LMDBHistory(tmp_path, sync_every=3)
    store.begin(dataclasses.replace(manifest, max_rounds=10))
    for t in range(5):
        store.append(arrays(t))
    assert synced == [3]
    store.close()
    assert synced == [3, 5]
    store.close()
    for t in range(5, 10):  # counted anew
        store.append(arrays(t))
    assert synced == [3, 5, 8, 10]
    store.close()
    assert synced == [3, 5, 8, 10]
    assert LMDBHistory(tmp_path).verify() == range(10)


def test_by_default_lmdb_waits_for_every_round(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays], synced: list[int]
) -> None:
    store = LMDBHistory(tmp_path)
    store.begin(manifest)
    store.append(arrays(0))
    assert store._open()._env.flags()["sync"] is True
    store.close()
    relaxed = LMDBHistory(tmp_path, sync_every=2)
    relaxed.append(arrays(1))
    assert relaxed._open()._env.flags()["sync"] is False
    relaxed.close()
    assert synced == [2]


def test_full_durability_is_not_given_where_it_is_not(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays], synced: list[int]
) -> None:
    relaxed = LMDBHistory(tmp_path, sync_every=2)
    relaxed.begin(manifest)
    relaxed.append(arrays(0))
    full = LMDBHistory(tmp_path)
    np.testing.assert_array_equal(full.read(0).updates, arrays(0).updates)
    relaxed._lock.release()  # type: ignore[union-attr]
    relaxed._lock = None
    with pytest.raises(HistoryError, match="`sync_every` > 1"):
        full.append(arrays(1))
    full.close()
    relaxed.close()
    full.append(arrays(1))
    assert full.verify() == range(2)
    # The other way round, it costs time and nothing else.
    relaxed = LMDBHistory(tmp_path, sync_every=2)
    full._lock.release()  # type: ignore[union-attr]
    full._lock = None
    relaxed.append(arrays(2))
    relaxed.close()
    full.close()
    assert synced == [1]


def test_rounds_written_together_count_one_by_one(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays], synced: list[int]
) -> None:
    store = LMDBHistory(tmp_path, sync_every=3)
    store.begin(dataclasses.replace(manifest, max_rounds=9))
    for together in ([0, 1], [2, 3], [4], [5, 6], [7, 8]):
        store.write_staged([store.stage(arrays(t)) for t in together])
    assert synced == [4, 7, 9]  # never more than three without; the last one in any case
    store.close()
    assert synced == [4, 7, 9]
    assert LMDBHistory(tmp_path).verify() == range(9)


def test_rounds_written_together_are_those_written_one_by_one(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> None:
    heads, sizes = [], []
    for name in ("one by one", "together"):
        store = LMDBHistory(tmp_path / name, keep={"last": 2})
        store.begin(dataclasses.replace(manifest, store_id="5" * 32))
        store.append(arrays(0))
        if name == "together":
            store.write_staged([store.stage(arrays(t)) for t in range(1, 6)])
        for t in range(len(store.rounds()), 7):
            store.append(arrays(t))
        assert store.verify() == range(7)
        with store._snapshot() as snapshot:
            heads.append(snapshot.entry(6)[1])
            sizes.append(snapshot._environment.count(snapshot._txn, "updates"))
        store.close()
    assert heads[0] == heads[1]
    assert sizes == [2 * len(manifest.clients)] * 2  # no update of a round that is not kept


def test_what_was_staged_behind_another_round_is_refused(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> None:
    store = LMDBHistory(tmp_path)
    store.begin(manifest)
    _, second = store.stage(arrays(0)), store.stage(arrays(1))
    with pytest.raises(HistoryError, match="Round 1 was staged behind another one"):
        store.write_staged([second])
    assert store.rounds() == range(0)
    store.write_staged([store.stage(arrays(0))])  # staged anew
    assert store.verify() == range(1)
    store.close()


def test_a_kill_leaves_all_rounds_written_together_or_none(
    recorded: Callable[..., Path], run_script: Callable[..., str]
) -> None:
    code = """
import os, signal, sys
from dataclasses import replace
from fedrec.history import LMDBHistory
if os.fork() == 0:
    store = LMDBHistory(sys.argv[1])
    record = store.read(0)
    staged = [store.stage(replace(record, round=t)) for t in range(2, 6)]
    if sys.argv[2] == "before":
        store.write_staged(staged, lambda: os.kill(os.getpid(), signal.SIGKILL))
    store.write_staged(staged)
    os.kill(os.getpid(), signal.SIGKILL)
os.wait()
"""
    for when, rounds in (("before", 2), ("after", 6)):
        path = recorded(num_rounds=2, name=when)
        run_script(code, path, when)
        store = LMDBHistory(path)
        assert store.verify() == range(rounds)
        store.close()


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_sync_every_is_a_count(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConfigurationError, match="sync_every"):
        LMDBHistory(tmp_path, sync_every=value)  # type: ignore[arg-type]
    assert LMDBHistory(tmp_path, sync_every=5).sync_every == 5


def test_a_killed_writer_loses_nothing(
    tmp_path: Path,
    manifest: Manifest,
    arrays: Callable[..., RoundArrays],
    run_script: Callable[..., str],
) -> None:
    """What the process handed to the kernel outlives the process."""
    code = """
import os, signal, sys
import numpy as np
from fedrec.history import Manifest
from fedrec.history.rounds import RoundArrays
from fedrec.history import LMDBHistory
path, text = sys.argv[1:]
manifest = Manifest.from_json(text)
d, ids = manifest.num_parameters, tuple(manifest.clients)
if os.fork() == 0:
    store = LMDBHistory(path, sync_every=1000)
    store.begin(manifest)
    for t in range(7):
        full = lambda *shape: np.full(shape, t, np.float32)
        store.append(RoundArrays(
            round=t, global_weights=full(d), client_ids=ids, updates=full(len(ids), d),
            num_samples=np.full(len(ids), 10), aggregate=full(d),
        ))
    os.kill(os.getpid(), signal.SIGKILL)
os.wait()
"""
    run_script(code, tmp_path / "h", manifest.to_json())
    store = LMDBHistory(tmp_path / "h")
    assert store.verify() == range(7)
    assert (store.read(6).updates == 6).all()
    store.close()
