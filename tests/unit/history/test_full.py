"""No room: in the map, on the disk, in the address space."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedrec.exceptions import ConfigurationError, HistoryFullError
from fedrec.history import LMDBHistory, Manifest
from fedrec.history.lmdb import environment
from fedrec.history.rounds import RoundArrays


@pytest.mark.parametrize("transaction_bytes", [2**28, 1])
def test_full_map(
    tmp_path: Path,
    manifest: Manifest,
    arrays: Callable[..., RoundArrays],
    transaction_bytes: int,
) -> None:
    """A round is 7 vectors of 8,000 bytes: 1 MB holds some, and not 100."""
    store = LMDBHistory(tmp_path, map_size=2**20)
    store.transaction_bytes = transaction_bytes
    store.begin(manifest)
    for t in range(100):
        try:
            store.append(arrays(t))
        except HistoryFullError:
            break
    assert 5 < t < 19
    assert store.verify() == range(t)
    with pytest.raises(HistoryFullError, match="no room in its map for 56000 bytes"):
        store.append(arrays(t))
    assert store.verify() == range(t)
    store.close()

    larger = LMDBHistory(tmp_path, map_size=2**22)
    for more in range(t, 25):
        larger.append(arrays(more))
    assert larger.verify() == range(25)
    assert (larger.read(t).updates == arrays(t).updates).all()
    larger.close()
    default = LMDBHistory(tmp_path)
    default.append(arrays(25))
    assert default.verify() == range(26)
    default.close()


def test_map_too_small_to_begin(tmp_path: Path, manifest: Manifest) -> None:
    clients = {f"client-{i:05d}": 1 for i in range(5000)}
    store = LMDBHistory(tmp_path, map_size=2**16)
    with pytest.raises(HistoryFullError, match="larger `map_size`"):
        store.begin(replace(manifest, clients=clients))
    assert store.is_empty
    store.begin(manifest)
    assert store.rounds() == range(0)
    store.close()


@pytest.mark.parametrize("map_size", [0, -1, 2**16 - 1, 1e9, "1GB", True])
def test_map_size_is_checked(tmp_path: Path, map_size: int) -> None:
    with pytest.raises(ConfigurationError, match="`map_size` to be an integer of at least 65536"):
        LMDBHistory(tmp_path, map_size=map_size)


@pytest.mark.parametrize("path", [None, 3, ["a"]])
def test_path_is_checked(path: str) -> None:
    with pytest.raises(ConfigurationError, match="`path`"):
        LMDBHistory(path)


def test_nothing_is_written_when_the_disk_is_nearly_full(
    recorded: Callable[..., Path],
    arrays: Callable[..., RoundArrays],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = LMDBHistory(recorded(num_rounds=2))
    before = store.num_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=111_999))
        # Room for two rounds is asked for: 2 * 7 * 8,000 bytes.
        with pytest.raises(HistoryFullError, match=r"no room for 112000 .*\(111999 bytes are free"):
            store.append(arrays(2))
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=112_000))
        store.append(arrays(2))
    assert store.num_bytes() > before
    assert store.verify() == range(3)
    store.close()


def test_disk_that_fills_up_while_writing(
    recorded: Callable[..., Path], run_script: Callable[..., str]
) -> None:
    """A limit on the size of files stands for a full disk; the store goes on when it is lifted."""
    code = """
import resource, sys
from dataclasses import replace
from fedrec.exceptions import HistoryFullError
from fedrec.history import LMDBHistory
store = LMDBHistory(sys.argv[1])
store.transaction_bytes = int(sys.argv[2])
record = store.read(0)
t = 2
resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, resource.RLIM_INFINITY))
try:
    while True:
        store.append(replace(record, round=t))
        t += 1
except HistoryFullError as error:
    assert "all earlier rounds are intact" in str(error), error
assert store.verify() == range(t), (store.rounds(), t)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for t in range(t, t + 3):
    store.append(replace(record, round=t))
assert store.verify() == range(t + 1)
print(t)
"""
    for name, transaction_bytes in (("one", 2**28), ("several", 1)):
        path = recorded(num_rounds=2, name=name)
        assert int(run_script(code, path, transaction_bytes)) > 5


def test_no_room_for_the_lock_file(
    recorded: Callable[..., Path], run_script: Callable[..., str]
) -> None:
    code = """
import resource, sys
from fedrec.exceptions import HistoryFullError
from fedrec.history import LMDBHistory
limit = resource.RLIMIT_FSIZE
resource.setrlimit(limit, (2**14, resource.RLIM_INFINITY))
try:
    LMDBHistory(sys.argv[1]).rounds()
except HistoryFullError as error:
    print(error)
resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert LMDBHistory(sys.argv[1]).verify() == range(2)
"""
    path = recorded(num_rounds=2)
    (path / "lock.mdb").unlink()
    assert "for `lock.mdb`: File too large" in run_script(code, path)


def test_little_address_space(
    tmp_path: Path, recorded: Callable[..., Path], run_script: Callable[..., str]
) -> None:
    code = """
import resource, sys
from fedrec.exceptions import HistoryError
from fedrec.history import LMDBHistory
resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
store = LMDBHistory(sys.argv[1])
assert store.verify() == range(2)
assert 2**26 <= store._environment._env.info()["map_size"] < 2**32
try:
    LMDBHistory(sys.argv[2], map_size=2**33).rounds()
except HistoryError as error:
    print(error)
"""
    text = run_script(code, recorded(num_rounds=2), recorded(num_rounds=1, name="other"))
    assert f"cannot reserve {2**33} bytes of address space" in text


def test_history_on_a_read_only_disk(
    recorded: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recorded(num_rounds=2)
    (path / "lock.mdb").unlink()
    monkeypatch.setattr(environment.os, "access", lambda path, mode: mode != os.W_OK)
    store = LMDBHistory(path)
    assert store.verify() == range(2)
    assert not (path / "lock.mdb").exists()
    store.close()
