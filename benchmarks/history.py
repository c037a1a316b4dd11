"""The history on disk beside a plain file, and beside a history in memory.

    python benchmarks/history.py disk
    python benchmarks/history.py record
    python benchmarks/history.py recover --keep /tmp/rounds

`disk` appends rounds to a plain file (write, fsync) and to a history in turn, and reads both again
as a recovery does, each round once. `cold`: the file was closed and its pages dropped from the
page cache (posix_fadvise) before each pass; `warm`: all of it is there.

`record` and `recover` run the loop with FedAvg, by default on the paper's CNN, on the history in
memory and on disk in turn. An estimated round is one in which FedRecover asks nobody. CPU seconds
are those of the whole process, what is written and read in other threads included.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from timing import table, write_csv
from workloads import WORKLOADS, workload

from fedrec.aggregators import FedAvg
from fedrec.callbacks import Callback
from fedrec.history import HistoryStore, LMDBHistory, Manifest, MemoryHistory
from fedrec.history.background import read_ahead
from fedrec.history.view import HistoryView
from fedrec.loop import FederatedLoop
from fedrec.loop.runtime import keep_freed_memory
from fedrec.recoverers import FedRecover, RecoveryContext
from fedrec.types import CohortUpdates, RoundRecord

CPU = torch.device("cpu")
STORES = ("memory", "float32", "float16", "int8", "int8+zstd")


def rounds(num_clients: int, num_parameters: int) -> Iterator[RoundRecord]:
    """Yield rounds in memory that is used again and again, as a recording's is."""
    generator = torch.Generator().manual_seed(0)
    updates = torch.randn(num_clients, num_parameters, generator=generator)
    t = 0
    while True:
        updates[:, ::1000] += 1
        yield RoundRecord(
            round=t,
            global_weights=updates[0].clone(),
            sent=CohortUpdates(
                client_ids=tuple(f"c{k}" for k in range(num_clients)),
                updates=updates,
                num_samples=torch.ones(num_clients, dtype=torch.int64),
            ),
            aggregate=updates[1].clone(),
        )
        t += 1


def manifest(num_clients: int, num_parameters: int) -> Manifest:
    """Return the manifest of such rounds."""
    return Manifest(
        model_fingerprint="f",
        num_parameters=num_parameters,
        clients={f"c{k}": 1 for k in range(num_clients)},
        seed=0,
        aggregator=FedAvg().spec(),
        server_lr=0.1,
        max_rounds=200,
    )


def drop(path: Path) -> None:
    """Take a file that nobody maps out of the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def disk(arguments: argparse.Namespace, folder: Path) -> list[list[object]]:
    """Return rows: what, raw GB/s, history GB/s, their ratio."""
    n, d, count = arguments.clients, arguments.parameters, arguments.rounds
    num_bytes = 4 * n * d
    raw, history = folder / "raw", LMDBHistory(folder / "history")
    history.begin(manifest(n, d))
    written: tuple[list[float], list[float]] = [], []
    file = os.open(raw, os.O_WRONLY | os.O_CREAT)
    for record, _ in zip(rounds(n, d), range(count), strict=False):
        began = time.perf_counter()
        for tensor in (record.updates, record.global_weights, record.aggregate):
            left = memoryview(tensor.numpy()).cast("B")
            while left:
                left = left[os.write(file, left) :]
        os.fsync(file)
        middle = time.perf_counter()
        history.write_round(record)
        written[0].append(middle - began)
        written[1].append(time.perf_counter() - middle)
    os.close(file)
    history.close()
    buffer = mmap.mmap(-1, num_bytes + 8 * d)

    def read_raw() -> None:
        with raw.open("rb", buffering=0) as source:
            for _ in range(count):
                left = memoryview(buffer)
                while left:
                    left = left[source.readinto(left) :]

    def replay() -> None:
        with history:
            for record in read_ahead(HistoryView(history), range(count), CPU):
                assert record.updates.shape == (n, d)

    def one_by_one() -> None:
        with history:
            for t in range(count):
                record = history.read_round(t)
            assert record.round == count - 1

    ways = {"raw": read_raw, "replay": replay, "read_round": one_by_one}
    seconds: dict[tuple[str, str], list[float]] = {}
    for state in ("cold", "warm"):
        for _ in range(arguments.repeats):
            for name, way in ways.items():
                for path in (raw, folder / "history" / "data.mdb") if state == "cold" else ():
                    drop(path)
                began = time.perf_counter()
                way()
                seconds.setdefault((state, name), []).append(time.perf_counter() - began)
    rows = [compare("record", num_bytes, *written)]
    total = num_bytes * count
    for state, name in itertools.product(("cold", "warm"), ("replay", "read_round")):
        rows += [compare(f"{state} {name}", total, seconds[state, "raw"], seconds[state, name])]
    return rows


def compare(what: str, num_bytes: int, raw: list[float], ours: list[float]) -> list[object]:
    """Return a row of medians."""
    rates = [num_bytes / statistics.median(s) / 1e9 for s in (raw, ours)]
    return [what, *rates, rates[1] / rates[0]]


class RoundTimes(Callback):
    """Keeps how long rounds took in which everybody, and in which nobody, was asked."""

    def __init__(self) -> None:
        self.exact: list[tuple[float, float]] = []
        self.estimated: list[tuple[float, float]] = []

    def on_round_start(self, loop: FederatedLoop, ctx: RecoveryContext) -> None:
        self._began = now()

    def on_round_end(self, loop: FederatedLoop, ctx: Any, values: dict[str, float]) -> None:
        spent = since(self._began)
        asked = values.get("asked", len(ctx.client_ids))
        if asked in (0, len(ctx.client_ids)):
            (self.exact if asked else self.estimated).append(spent)


def now() -> tuple[float, float]:
    """Return wall-clock and CPU seconds."""
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float]) -> tuple[float, float]:
    """Return the wall-clock and CPU seconds since then."""
    return time.perf_counter() - began[0], time.process_time() - began[1]


def medians(spent: list[tuple[float, float]]) -> list[float]:
    """Return the median wall-clock and CPU milliseconds."""
    return [1e3 * statistics.median(column) for column in zip(*spent, strict=True)]


def make_loop(arguments: argparse.Namespace, *callbacks: Callback) -> FederatedLoop:
    """Return a loop that does nothing but the rounds."""
    return FederatedLoop(
        enable_progress_bar=False,
        logger=False,
        eval_every=10**9,
        eval_samples=1,
        num_threads=arguments.threads,
        callbacks=list(callbacks),
    )


def open_store(name: str, path: Path) -> HistoryStore:
    """Return a history in memory or on disk."""
    return MemoryHistory() if name == "memory" else LMDBHistory(path, codec=name)


def record(arguments: argparse.Namespace, folder: Path) -> list[list[object]]:
    """Return rows: store, ms a round, ratio to memory."""
    federation = workload(arguments.workload, arguments.clients)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in arguments.stores}
    for k in range(arguments.repeats + 1):
        for name in arguments.stores:
            with open_store(name, folder / f"{name}-{k}") as history:
                began = now()
                make_loop(arguments).record(
                    federation, FedAvg(), history, max_rounds=arguments.rounds, server_lr=0.05
                )
                spent = since(began)
            if k:  # the first time is for warming up
                times[name].append((spent[0] / arguments.rounds, spent[1] / arguments.rounds))
    first = [wall for wall, _ in times[arguments.stores[0]]]
    return [
        [name, *medians(spent), ratio([wall for wall, _ in spent], first)]
        for name, spent in times.items()
    ]


def recover(arguments: argparse.Namespace, folder: Path) -> list[list[object]]:
    """Return rows: store, ms of an estimated and an exact round, seconds in all, ratios."""
    federation = workload(arguments.workload, arguments.clients)
    kept = LMDBHistory((arguments.keep or folder) / "rounds")
    if kept.is_empty:
        make_loop(arguments).record(
            federation, FedAvg(), kept, max_rounds=arguments.rounds, server_lr=0.05
        )
    stores = {}
    for name in arguments.stores:
        stores[name] = open_store(name, folder / name)
        stores[name].begin(kept.manifest)
        for t in range(arguments.rounds):
            stores[name].write_round(kept.read_round(t))
    kept.close()
    watch = {name: RoundTimes() for name in stores}
    total: dict[str, list[float]] = {name: [] for name in stores}
    for _ in range(arguments.repeats):
        for name, history in stores.items():
            recoverer = FedRecover(warmup_rounds=10, final_rounds=1, estimator="paired")
            loop = make_loop(arguments, watch[name])
            result = loop.recover(federation, history, recoverer, federation.malicious)
            total[name].append(result.seconds)
    rows: list[list[object]] = []
    first = arguments.stores[0]
    for name in stores:
        estimated, exact = medians(watch[name].estimated), medians(watch[name].exact)
        faster = estimated[0] / medians(watch[first].estimated)[0]
        seconds = statistics.median(total[name])
        rows.append([name, *estimated, *exact, seconds, faster, ratio(total[name], total[first])])
        stores[name].close()
    return rows


def ratio(ours: list[float], first: list[float]) -> float:
    """Return the median of the ratios of what was measured in turn."""
    return statistics.median(a / b for a, b in zip(ours, first, strict=True))


PARTS: dict[str, tuple[Callable[..., list[list[object]]], tuple[str, ...]]] = {
    "disk": (disk, ("what", "raw GB/s", "history GB/s", "ratio")),
    "record": (record, ("history", "ms/round", "CPU ms", "time, memory = 1")),
    "recover": (
        recover,
        (
            *("history", "estimated round, ms", "CPU ms", "exact round, ms", "CPU ms"),
            *("recovery, s", "estimated, memory = 1", "recovery, memory = 1"),
        ),
    ),
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=139_960, help="for `disk`")
    parser.add_argument("--workload", choices=WORKLOADS, default="cnn", help="for the others")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--stores", nargs="+", choices=STORES, default=list(STORES))
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--keep", type=Path, help="keep the recording here, and use it")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    keep_freed_memory()  # as the loop does
    function, headers = PARTS[arguments.part]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows = function(arguments, Path(folder))
    print(
        f"{arguments.part}: {arguments.clients} clients, {arguments.rounds} rounds, "
        f"{arguments.threads} threads"
    )
    table(rows, headers)
    if arguments.csv:
        write_csv(arguments.csv, rows, headers)


if __name__ == "__main__":
    main()
