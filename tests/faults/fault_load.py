"""R15, P2: many readers, many rounds, large rounds."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from fault_stores import (
    Facts,
    arrays,
    fork,
    manifest,
    record,
    require_whole,
    same,
    verify_command,
)

from fedrec.history import LMDBHistory
from fedrec.history.rounds import RoundArrays

# -- R15 ------------------------------------------------------------------------------------------


def many_readers(num_readers: int, num_rounds: int, rng: random.Random, folder: Path) -> Facts:
    """R15: processes read while one records: as fast as they can, and ten times a second.

    The median time of a round is put beside that of recording alone, and while as many processes
    compute, and read nothing.
    """
    alone, facts = 0, Facts()
    ways = {
        "alone": None,
        "beside processes that compute": _spin,
        "beside readers": partial(_follow, 0.0),
        "beside readers that pause": partial(_follow, 0.1),
    }
    for name, way in ways.items():
        path = folder / name
        record(path, 1)
        others = [fork(partial(way, path, num_rounds)) for _ in range(num_readers if way else 0)]
        for one in others:  # starting takes a moment, which is not what is measured
            one.read(1)
        size, facts[f"{name}, us"] = _timed(path, num_rounds)
        alone = alone or size
        if way is _spin:
            for one in others:
                one.kill()
                one.wait()
            continue
        looks = [other.result() for other in others]
        seen = [[before for before, _ in look] for look in looks]
        assert all(len(lengths) >= 2 and lengths == sorted(lengths) for lengths in seen)
        assert require_whole(path) == num_rounds
        # Pages of keys that a reader sees are not written over meanwhile: no more than that. They
        # are six a round, for the rounds that are recorded while a reader looks.
        held = max((after - before for look in looks for before, after in look), default=0)
        assert size <= 1.05 * alone + max(2**18, 6 * 4096 * held), (size, alone, held)
        facts["reads"] = facts.get("reads", 0) + sum(map(len, seen))
    return facts


def _timed(path: Path, num_rounds: int) -> tuple[int, int]:
    """Record all rounds but the first; return the size of the file, and a round's microseconds."""
    store = LMDBHistory(path)
    seconds = []
    for t in range(1, num_rounds):
        made = arrays(t)
        began = time.perf_counter()
        store.append(made)
        seconds.append(time.perf_counter() - began)
    size = store.num_bytes()
    store.close()
    return size, round(1e6 * statistics.median(seconds))


def _spin(_path: Path, _num_rounds: int, send: Callable[[object], None]) -> None:
    send("computing")
    while True:
        pass


def _follow(
    pause: float, path: Path, num_rounds: int, send: Callable[[object], None]
) -> list[tuple[int, int]]:
    """Look again and again; return how many rounds there were before and after each look."""
    store = LMDBHistory(path)
    looks: list[tuple[int, int]] = []
    while not looks or looks[-1][0] < num_rounds:
        length = len(store.rounds())
        for t in (0, length // 2, length - 1):
            assert same(store.read(t), arrays(t)), t
        looks.append((length, len(store.rounds())))
        if len(looks) == 1:
            send("reading")
        time.sleep(pause)
    return looks


# -- P2 -------------------------------------------------------------------------------------------


def _resident() -> int:
    """Return the memory of this process that is no file's, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def flat_memory(codec: str, first: int, last: int, rng: random.Random, folder: Path) -> Facts:
    """P2: memory at a late round is that at an early one."""

    def run(send: Callable[[object], None]) -> list[int]:
        store = LMDBHistory(folder / "history")
        store.begin(manifest(codec))
        seen = []
        for t in range(last):
            store.append(arrays(t))
            if t + 1 in (first, last):
                seen.append(_resident())
        return seen

    early, late = fork(run).result()
    assert late - early < 2 * 2**20, (early, late)
    return {"early, KB": early // 1024, "late, KB": late // 1024}


def large_round(megabytes: int, rng: random.Random, folder: Path) -> Facts:
    """P2: a round above the size of a transaction takes bounded memory beside itself."""

    def run(send: Callable[[object], None]) -> int:
        d, m = 2 * 2**20, megabytes // 8
        clients = {f"c{i:03d}": 1 for i in range(m)}
        store = LMDBHistory(folder / "history")
        store.begin(manifest(num_parameters=d, clients=clients, max_rounds=1))
        updates = np.ones((m, d), np.float32)
        one = RoundArrays(
            round=0,
            global_weights=updates[0],
            client_ids=tuple(clients),
            updates=updates,
            num_samples=np.ones(m, np.int64),
            aggregate=updates[0],
        )
        before = _resident()
        peak = _Peak()
        store.append(one)
        extra = peak.stop() - before
        assert len(store.rounds()) == 1
        store.close()
        return extra

    extra = fork(run).result()
    assert extra <= 2**30, extra
    assert verify_command(folder / "history") == 0
    return {"updates, MB": megabytes, "beside them, MB": extra // 2**20}


class _Peak:
    """Watches the memory of this process from a child of it."""

    def __init__(self) -> None:
        parent = os.getpid()
        self._child = fork(partial(self._watch, parent))

    @staticmethod
    def _watch(parent: int, send: Callable[[object], None]) -> int:
        stop = []
        signal.signal(signal.SIGUSR1, lambda *_: stop.append(True))
        send("ready")
        most = 0
        while not stop:
            text = Path(f"/proc/{parent}/status").read_text()
            line = next(one for one in text.splitlines() if one.startswith("RssAnon"))
            most = max(most, int(line.split()[1]) * 1024)
            time.sleep(0.002)
        return most

    def stop(self) -> int:
        os.kill(self._child.pid, signal.SIGUSR1)
        return int(self._child.result())
