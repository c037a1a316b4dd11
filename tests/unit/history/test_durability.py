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
    assert store._open()[1]._env.flags()["sync"] is True
    store.close()
    relaxed = LMDBHistory(tmp_path, sync_every=2)
    relaxed.append(arrays(1))
    assert relaxed._open()[1]._env.flags()["sync"] is False
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


def test_the_last_round_is_synced_in_any_case(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays], synced: list[int]
) -> None:
    store = LMDBHistory(tmp_path, sync_every=3)
    store.begin(dataclasses.replace(manifest, max_rounds=5))
    for t in range(5):
        store.append(arrays(t))
    assert synced == [3, 5]
    store.close()
    assert synced == [3, 5]
    assert LMDBHistory(tmp_path).verify() == range(5)


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
