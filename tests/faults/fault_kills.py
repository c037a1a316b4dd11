"""R1, R2, R17: processes that are killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

from fault_stores import (
    Child,
    Facts,
    arrays,
    fork,
    manifest,
    record,
    require_whole,
    same,
    stored,
    verify_command,
)

import fedrec.history
from fedrec.history import LMDBHistory
from fedrec.history.lmdb.environment import Environment
from fedrec.history.tools import repair as maintenance

LONGEST = 0.25  # seconds until the kill; a round takes 2 to 10 ms


def record_until_killed(
    path: Path, codec: str, transaction_bytes: int, send: Callable[[object], None]
) -> None:
    """Record without end, and send each round's number when it is stored."""
    store = LMDBHistory(path)
    store.transaction_bytes = transaction_bytes
    if store.is_empty:
        store.begin(manifest(codec))
    for t in range(len(store.rounds()), 10**6):
        store.append(arrays(t))
        send(t)


def killed_recording(codec: str, transaction_bytes: int, rng: random.Random, folder: Path) -> Facts:
    """R1: kill -9 at a uniformly random instant."""
    path = folder / "history"
    child = fork(partial(record_until_killed, path, codec, transaction_bytes))
    sleep_while_it_records(child, rng)
    child.kill()
    return after_kill(path, child.wait(), codec, command=rng.random() < 0.02)


def sleep_while_it_records(child: Child, rng: random.Random) -> None:
    """Let a random time pass: in one of five trials from the start on, else from round 0 on."""
    if rng.random() < 0.8:
        child.read(1)
    time.sleep(rng.uniform(0, LONGEST))  # nothing is awaited: the instant is what is drawn


def after_kill(
    path: Path, child: Child, codec: str, *, ahead: int = 1, command: bool = False
) -> Facts:
    """Check what a killed recording left, and go on with it."""
    assert child.code == -signal.SIGKILL, (child.code, child.lines)
    acknowledged = len(child.lines)
    assert child.lines == [str(t) for t in range(acknowledged)]
    store = LMDBHistory(path)
    if store.is_empty:
        assert acknowledged == 0, "what was acknowledged is gone"
        store.begin(manifest(codec))
        head = 0
    else:
        head = require_whole(path, codec, command=command)
        assert acknowledged <= head <= acknowledged + ahead, (head, acknowledged)
    for t in range(head, head + 2):
        store.append(arrays(t))
    store.close()
    assert require_whole(path, codec) == head + 2
    return {"rounds acked": acknowledged, "head ahead": head - acknowledged}


# -- R2 -------------------------------------------------------------------------------------------

_OURS = str(Path(fedrec.history.__file__).parent)
TORN = 3  # rounds that are stored before an operation


def _tear(path: Path) -> None:
    """Leave the first transactions of a round that was not finished."""

    def stop(self: Environment, txn: Any, database: str, *rest: bytes) -> None:
        if database == "rounds":
            os._exit(0)
        append(self, txn, database, *rest)

    def write(send: Callable[[object], None]) -> None:
        store = LMDBHistory(path)
        store.transaction_bytes = 10_000
        Environment.append = stop
        store.append(arrays(TORN))

    append = Environment.append
    assert fork(write).wait().code == 0


def _damage(path: Path) -> None:
    """Flip a bit in the update of a client in round 1."""
    store = LMDBHistory(path)
    with store.snapshot() as snapshot:
        cursor = snapshot.environment.cursor(snapshot.txn, "updates")
        assert cursor.set_key((1).to_bytes(4, "big") + (2).to_bytes(4, "big"))
        value = bytes(cursor.value())
    store.close()
    data = (path / "data.mdb").read_bytes()
    place = data.index(value) + 100
    with (path / "data.mdb").open("r+b") as file:
        file.seek(place)
        file.write(bytes([data[place] ^ 4]))


def _write(path: Path, transaction_bytes: int = 2**28) -> None:
    store = LMDBHistory(path)
    store.transaction_bytes = transaction_bytes
    for t in range(len(store.rounds()), TORN + 2):
        store.append(arrays(t))
    store.close()


def _begin(path: Path) -> None:
    store = LMDBHistory(path)
    if store.is_empty:
        store.begin(manifest())
    if not store.rounds():
        store.append(arrays(0))
    store.close()


def _repair(path: Path) -> None:
    maintenance.repair(path)


def _compact(path: Path) -> None:
    maintenance.compact(path)


def _require_repairable(path: Path) -> None:
    """Check for the damaged history or the repaired one, and for nothing else."""
    store = LMDBHistory(path)
    damage = store.damage()
    assert [(one.round, one.client_id) for one in damage] in ([], [(1, "c")]), damage
    for t in (0, 2):
        assert same(store.read(t), arrays(t))
    present = [c for c in store.index(1).present if c != "c"]
    assert same(store.read(1, present), arrays(1, tuple("abdef")))
    store.close()


Step = Callable[[Path], Any]
#: By name: what is there before, the operation, a check of what a kill left, what is there after.
OPERATIONS: dict[str, tuple[Step, Step, Step, int]] = {
    "begin": (lambda path: None, _begin, lambda path: None, 1),
    "round in one transaction": (lambda path: record(path, TORN), _write, require_whole, TORN + 2),
    "round in several": (
        lambda path: record(path, TORN),
        partial(_write, transaction_bytes=10_000),
        require_whole,
        TORN + 2,
    ),
    "round after a torn one": (
        lambda path: (record(path, TORN), _tear(path)),
        _write,
        require_whole,
        TORN + 2,
    ),
    "compact": (lambda path: record(path, TORN), _compact, require_whole, TORN),
    "repair": (
        lambda path: (record(path, TORN), _damage(path)),
        _repair,
        _require_repairable,
        TORN,
    ),
}


class _Lines:
    """Counts the lines of the store that are executed, and kills the process before one."""

    def __init__(self, kill_before: int | None) -> None:
        self.kill_before = kill_before
        self.lines: list[str] = []

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        if event == "line":
            if len(self.lines) == self.kill_before:
                os.kill(os.getpid(), signal.SIGKILL)
            self.lines.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return self


def _traced(operation: Step, path: Path, kill_before: int | None, _send: Any) -> list[str]:
    counter = _Lines(kill_before)
    sys.settrace(counter)
    operation(path)
    sys.settrace(None)
    return counter.lines


@cache
def kill_points(name: str, folder: Path) -> tuple[int, ...]:
    """Return where an operation can be killed: each line, first, middle and last time it runs."""
    place = folder / "points"
    before, operation, _, _ = OPERATIONS[name]
    before(place)
    lines = fork(partial(_traced, operation, place, None)).result()
    shutil.rmtree(place)
    times: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        times.setdefault(line, []).append(number)
    return tuple(sorted({p for t in times.values() for p in (t[0], t[len(t) // 2], t[-1])}))


def killed_operation(name: str, rng: random.Random, folder: Path) -> Facts:
    """R2: kill -9 before one of the lines of an operation, then do it again."""
    points = kill_points(name, folder.parent)
    return killed_at(name, points[rng.randrange(len(points))], folder)


def killed_at(name: str, point: int, folder: Path) -> Facts:
    """Kill an operation before its `point`-th line; check what is left; finish it."""
    path = folder / "history"
    before, operation, check, rounds = OPERATIONS[name]
    before(path)
    child = fork(partial(_traced, operation, path, point)).wait()
    # Lines that loop over the mounts there are may be fewer by now; then the last point is not met.
    assert child.code in (-signal.SIGKILL, 0), (child.code, child.lines)
    if not LMDBHistory(path).is_empty:
        check(path)
    operation(path)
    store = LMDBHistory(path)
    assert store.verify() == range(rounds)
    for t in range(rounds):
        present = store.index(t).present
        assert same(store.read(t), arrays(t, present))
        assert len(present) == 6 - (name == "repair" and t == 1)
    store.close()
    assert verify_command(path) == 0
    left = {entry.name for entry in path.iterdir()}
    assert left <= {"data.mdb", "lock.mdb", "writer.lock", "data.mdb.damaged"}, left
    return {"killed": child.code == -signal.SIGKILL}


# -- R17 ------------------------------------------------------------------------------------------


def killed_readers(num_readers: int, num_rounds: int, rng: random.Random, folder: Path) -> Facts:
    """R17: readers that are killed while they read hold no slot and no page for ever."""
    sizes = []
    for name, readers in (("calm", 0), ("haunted", num_readers)):
        path = folder / name
        store = LMDBHistory(path)
        store.begin(manifest())
        for t in range(5):
            store.append(arrays(t))
        for _ in range(readers):
            child = fork(partial(_read_until_killed, path))
            child.read(1)
            time.sleep(rng.uniform(0, 0.002))
            child.kill()
            child.wait()
        store.close()  # the next one to open the history finds the dead readers' slots
        for t in range(5, 5 + num_rounds):
            store.append(arrays(t))
        assert store.rounds() == range(5 + num_rounds)
        assert same(store.read(4), stored(4, "float32"))
        sizes.append(store.num_bytes())
        store.close()
    assert sizes[1] <= 1.05 * sizes[0], sizes
    return {
        "readers killed": num_readers,
        "commits": num_rounds,
        "extra bytes": sizes[1] - sizes[0],
    }


def _read_until_killed(path: Path, send: Callable[[object], None]) -> None:
    store = LMDBHistory(path)
    store.read(0)
    with store.snapshot():
        send("reading")
        while True:
            store.read(1)
