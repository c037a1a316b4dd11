"""Several stores and processes on one history, and processes that are killed."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import lmdb
import numpy as np
import pytest

import fedrec
from fedrec.exceptions import HistoryLockedError, RoundNotFoundError
from fedrec.history import LMDBHistory, Manifest
from fedrec.history.lmdb.environment import Environment
from fedrec.history.rounds import RoundArrays

# What the scripts below share: rounds whose numbers follow from t, in a process without torch.
COMMON = """
import os, random, signal, struct, sys
import numpy as np
from fedrec.exceptions import HistoryLockedError
from fedrec.history import LMDBHistory, Manifest
from fedrec.history.rounds import RoundArrays

IDS, D = tuple("abcdef"), 2000
MANIFEST = Manifest(model_fingerprint="f", num_parameters=D, clients=dict.fromkeys(IDS, 1),
                    seed=0, aggregator={}, server_lr=1.0, max_rounds=1000)

def arrays(t):
    updates = np.full((len(IDS), D), t, np.float32) + np.arange(D, dtype=np.float32) / D
    return RoundArrays(round=t, global_weights=updates[0] + 1, client_ids=IDS, updates=updates,
                       num_samples=np.ones(len(IDS), np.int64), aggregate=updates[0] + 2)

def check(store, t):
    found, written = store.read(t), arrays(t)
    for name in ("global_weights", "updates", "aggregate"):
        assert (getattr(found, name) == getattr(written, name)).all(), (t, name)
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts code in a process of its own, which is killed in the end."""
    with ExitStack() as stack:

        def run(code: str, *arguments: object) -> subprocess.Popen[str]:
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", COMMON + code, *map(str, arguments)],
                    env={**os.environ, "PYTHONPATH": str(Path(fedrec.__file__).parents[1])},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            return process

        yield run


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_killed_writer_loses_nothing_it_acknowledged(
    tmp_path: Path, run_script: Callable[..., str]
) -> None:
    """A history outlives twenty processes, killed while they begin or after a few rounds."""
    code = """
path, kills = sys.argv[1], int(sys.argv[2])
random.seed(0)
stored = 0
for kill in range(kills):
    awaited = 0 if kill < 3 else random.randrange(20)
    acknowledged, acknowledge = os.pipe()
    child = os.fork()
    if child == 0:
        store = LMDBHistory(path)
        store.transaction_bytes = 2**15 if kill % 2 else 2**28
        if store.is_empty:
            store.begin(MANIFEST)
        for t in range(len(store.rounds()), 10**6):
            store.append(arrays(t))
            os.write(acknowledge, struct.pack("<I", t))
    os.close(acknowledge)
    acks = b""
    while len(acks) < 4 * awaited and (chunk := os.read(acknowledged, 4)):
        acks += chunk
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    while chunk := os.read(acknowledged, 65536):
        acks += chunk
    os.close(acknowledged)
    last = struct.unpack("<I", acks[-4:])[0] + 1 if acks else stored
    store = LMDBHistory(path)
    rounds = range(0) if store.is_empty else store.verify()
    # A round may have been committed and not yet acknowledged.
    assert len(rounds) in (last, last + 1), (rounds, last)
    assert len(rounds) >= stored + awaited
    for t in rounds[stored:]:
        check(store, t)
    stored = len(rounds)
    store.close()
"""
    run_script(COMMON + code, tmp_path / "history", 20)


def test_unfinished_round_is_invisible_and_removed(
    recorded: Callable[..., Path],
    arrays: Callable[..., RoundArrays],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = recorded(num_rounds=2)
    store = LMDBHistory(path)
    store.transaction_bytes = 20_000  # two vectors of 8,000 bytes each
    append = Environment.append

    def stop(self: Environment, txn: lmdb.Transaction[bytes], database: str, *rest: bytes) -> None:
        if database == "rounds":
            raise KeyboardInterrupt
        append(self, txn, database, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Environment, "append", stop)
        with pytest.raises(KeyboardInterrupt):
            store.append(arrays(2))
    store.close()

    def keys(database: str, t: int) -> list[int]:
        with lmdb.open(str(path), max_dbs=4, map_size=2**30) as env:
            db = env.open_db(database.encode(), create=False)
            with env.begin() as txn:
                found = [(int.from_bytes(k[:4]), int.from_bytes(k[4:])) for k, _ in txn.cursor(db)]
        return [index for round_, index in found if round_ == t]

    # 5 + 2 vectors, two a transaction: six are there, the last was not committed.
    assert keys("updates", 2) == [0, 1, 2, 3, 4]
    assert keys("models", 2) == [2**32 - 4]
    for again in (store, LMDBHistory(path)):
        assert again.rounds() == range(2)
        assert again.verify() == range(2)
        with pytest.raises(RoundNotFoundError):
            again.read(2)
        again.close()

    again = LMDBHistory(path)
    other = arrays(2, ("client-3", "client-1"))
    again.append(other)
    assert again.verify() == range(3)
    assert (again.read(2).updates == other.updates).all()
    again.close()
    assert keys("updates", 2) == [1, 3]
    assert keys("models", 2) == [2**32 - 4, 2**32 - 3]


def test_round_in_several_transactions(
    tmp_path: Path, manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> None:
    """Every value in a transaction of its own, and several stores to one file."""
    with_limit, without = LMDBHistory(tmp_path / "a"), LMDBHistory(tmp_path / "b")
    with_limit.transaction_bytes = 1
    for store in (with_limit, without):
        store.begin(manifest)
        for t in range(3):
            store.append(arrays(t))
    for t in range(3):
        a, b = with_limit.read(t), without.read(t)
        assert (a.updates == b.updates).all()
        assert (a.aggregate == b.aggregate).all()
    with_limit.close()
    without.close()


def test_other_process_reads_while_one_writes(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    writer = start(
        """
store = LMDBHistory(sys.argv[1])
store.begin(MANIFEST)
for t in range(60):
    store.append(arrays(t))
    if t == 0:
        print("ready", flush=True)
""",
        tmp_path,
    )
    assert line(writer) == "ready"
    reader = LMDBHistory(tmp_path)
    seen = [len(reader.rounds())]
    while seen[-1] < 60:
        seen.append(len(reader.rounds()))
        t = seen[-1] - 1
        found = reader.read(t)
        ramp = np.arange(2000, dtype=np.float32) / 2000
        assert (found.updates == np.float32(t) + ramp).all()
        assert (found.aggregate == found.updates[0] + 2).all()
    assert seen == sorted(seen)
    assert writer.wait() == 0
    assert reader.verify() == range(60)
    reader.close()


def test_second_writing_process_is_refused(
    recorded: Callable[..., Path],
    arrays: Callable[..., RoundArrays],
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    path = recorded(num_rounds=2)
    writer = start(
        """
store = LMDBHistory(sys.argv[1])
store.lock()
print("ready", flush=True)
sys.stdin.read()
""",
        path,
    )
    assert line(writer) == "ready"
    store = LMDBHistory(path)
    with pytest.raises(HistoryLockedError, match=rf"another process \({writer.pid}\)"):
        store.append(arrays(2))
    assert store.verify() == range(2)  # reading goes on
    writer.kill()
    writer.wait()
    store.append(arrays(2))
    assert store.rounds() == range(3)
    store.close()


def test_begin_is_refused_while_another_process_begins(
    tmp_path: Path, manifest: Manifest, start: Callable[..., subprocess.Popen[str]]
) -> None:
    other = start(
        """
store = LMDBHistory(sys.argv[1])
store.lock()
print("ready", flush=True)
sys.stdin.read()
""",
        tmp_path,
    )
    assert line(other) == "ready"
    store = LMDBHistory(tmp_path)
    with pytest.raises(HistoryLockedError, match=str(other.pid)):
        store.begin(manifest)
    assert store.is_empty
    other.kill()
    other.wait()
    store.begin(manifest)
    assert store.rounds() == range(0)
    store.close()


def test_second_writing_store_in_the_process_is_refused(
    recorded: Callable[..., Path], arrays: Callable[..., RoundArrays]
) -> None:
    path = recorded(num_rounds=1)
    (path.parent / "link").symlink_to(path)
    first, second = LMDBHistory(path), LMDBHistory(path.parent / "link")
    first.append(arrays(1))
    for _ in range(2):  # being refused must not take the lock from the first
        with pytest.raises(HistoryLockedError, match=rf"this process \({os.getpid()}\)"):
            second.append(arrays(2))
    first.append(arrays(2))
    assert second.read(2).round == 2  # both read through one environment
    first.close()
    second.append(arrays(3))
    with pytest.raises(HistoryLockedError):
        first.append(arrays(4))
    assert first.rounds() == range(4)
    second.close()
    first.close()


def test_forgotten_store_gives_up_its_lock(
    recorded: Callable[..., Path], arrays: Callable[..., RoundArrays]
) -> None:
    path = recorded(num_rounds=1)
    LMDBHistory(path).append(arrays(1))
    gc.collect()
    store = LMDBHistory(path)
    store.append(arrays(2))
    assert store.rounds() == range(3)
    store.close()


def test_a_call_with_other_arguments_leaves_nothing_to_close(tmp_path: Path) -> None:
    """What goes wrong in `__del__` is a warning, and so an error here."""
    with pytest.raises(TypeError, match="read_only"):
        LMDBHistory(tmp_path, read_only=True)  # type: ignore[call-arg]
    gc.collect()


def test_closed_store_opens_again(
    recorded: Callable[..., Path], arrays: Callable[..., RoundArrays]
) -> None:
    store = LMDBHistory(recorded(num_rounds=1))
    for t in range(1, 4):
        store.append(arrays(t))
        store.close()
        store.close()
    assert store.verify() == range(4)
    store.close()


def test_recording_again_where_a_history_was_deleted(
    recorded: Callable[..., Path], manifest: Manifest, arrays: Callable[..., RoundArrays]
) -> None:
    path = recorded(num_rounds=2)
    store = LMDBHistory(path)
    assert store.verify() == range(2)
    (path / "data.mdb").unlink()
    fresh = replace(manifest, seed=5)
    store.begin(fresh)
    store.append(arrays(0))
    assert store.manifest == fresh
    assert store.verify() == range(1)
    store.close()


def test_pickled_history_reads_in_another_directory(
    recorded: Callable[..., Path],
    arrays: Callable[..., RoundArrays],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = recorded(num_rounds=2)
    monkeypatch.chdir(path.parent)
    history = LMDBHistory(path.name, map_size=2**30)
    assert history.rounds() == range(2)
    data = pickle.dumps(history)
    monkeypatch.chdir("/")
    copy = pickle.loads(data)
    assert copy.path == path
    assert copy.map_size == 2**30
    assert (copy.read_round(1).updates.numpy() == arrays(1).updates).all()
    copy.close()
    history.close()


def test_open_history_survives_a_fork(tmp_path: Path, run_script: Callable[..., str]) -> None:
    code = """
store = LMDBHistory(sys.argv[1])
store.begin(MANIFEST)
for t in range(3):
    store.append(arrays(t))
child = os.fork()
if child == 0:
    assert store._environment.pid != os.getpid()
    check(store, 1)
    assert store._environment.pid == os.getpid()  # opened anew
    try:
        store.append(arrays(3))
    except HistoryLockedError as error:
        assert f"another process ({os.getppid()})" in str(error), error
    else:
        raise AssertionError("the child may not write")
    other = LMDBHistory(sys.argv[1])
    assert other.verify() == range(3)
    other.close()
    store.close()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
store.append(arrays(3))
assert store.verify() == range(4)
child = os.fork()
if child == 0:
    store.close()  # of what was inherited: must not take anything from the parent
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
store.append(arrays(4))
child = os.fork()
if child == 0:
    try:
        LMDBHistory(sys.argv[1]).append(arrays(5))
    except HistoryLockedError:
        os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert store.verify() == range(5)
print("done")
"""
    assert run_script(COMMON + code, tmp_path) == "done\n"


def test_what_a_killed_process_left_beside_the_file_goes(recorded: Callable[..., Path]) -> None:
    path = recorded(num_rounds=1)
    (path / "new").mkdir()
    (path / "new" / "lock.mdb").write_bytes(b"")
    with closing(LMDBHistory(path)) as store:
        record = store.read(0)
        assert (path / "new").exists()  # who reads changes nothing
        store.append(replace(record, round=1))
        assert not (path / "new").exists()
        assert store.verify() == range(2)
