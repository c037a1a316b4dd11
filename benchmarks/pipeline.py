"""Record and recover end to end: rounds per second, where the time goes, the gain of recovery.

    python benchmarks/pipeline.py --workload cnn --clients 50 --rounds 300
    python benchmarks/pipeline.py --workload digits --clients 20 --batch-size 6 --rounds 600

Recording, training from scratch and FedRecover run in one process, on the same history, evaluation
off. `speed-up` is the time of training from scratch over that of FedRecover; `ideal` is what it
would be if estimated rounds took no time, 1 / (1 - ACP). Parts are wall-clock shares of the main
thread; what the history does in its own thread is no part of them. With `--cpu-seconds`, for a
machine that others use, everything is CPU time of the process, that of the history's thread
included: it is the rest.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from timing import table, write_csv
from workloads import WORKLOADS, workload

from fedrec.aggregators import Aggregator, FedAvg, Median, TrimmedMean
from fedrec.attacks import TrimAttack
from fedrec.executors import SequentialExecutor, VectorizedExecutor
from fedrec.history import HistoryStore, LMDBHistory, MemoryHistory
from fedrec.history.background import BackgroundWriter, RoundReader
from fedrec.loop import FederatedLoop
from fedrec.recoverers import AnchoredLBFGS, FedRecover, Recoverer, TrainFromScratch
from fedrec.recoverers.estimators.pairs import ClientPairs
from fedrec.types import RunResult

RULES: dict[str, Callable[[], Aggregator]] = {
    "fedavg": FedAvg,
    "trimmed-mean": lambda: TrimmedMean(trim=0.2),
    "median": Median,
}
PARTS = {
    "clients": [(VectorizedExecutor, "compute"), (SequentialExecutor, "compute")],
    "attack": [(TrimAttack, "craft")],
    "aggregation": [(Aggregator, "__call__")],
    "writing": [(BackgroundWriter, "write"), (BackgroundWriter, "wait")],
    "reading": [(RoundReader, "read")],
    "estimates": [
        (AnchoredLBFGS, "aggregate"),
        (ClientPairs, "aggregated"),
        (AnchoredLBFGS, "estimate"),
        (ClientPairs, "estimate"),
    ],
    "learning": [(AnchoredLBFGS, "observe"), (ClientPairs, "push")],
    "threshold": [(FedRecover, "start")],
}


@contextmanager
def parts(clock: Callable[[], float]) -> Iterator[dict[str, float]]:
    """Add up the seconds spent in each part, without the parts inside it."""
    seconds = dict.fromkeys(PARTS, 0.0)
    inner: list[float] = []
    originals = []

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            inner.append(0.0)
            began = clock()
            try:
                return function(*args, **kwargs)
            finally:
                spent = clock() - began
                seconds[name] += spent - inner.pop()
                if inner:
                    inner[-1] += spent

        return wrapper

    for name, methods in PARTS.items():
        for cls, method in methods:
            original = cls.__dict__[method]
            originals.append((cls, method, original))
            setattr(cls, method, timed(name, original))
    try:
        yield seconds
    finally:
        for cls, method, original in originals:
            setattr(cls, method, original)


def measure(
    name: str, run: Callable[[], RunResult], cpu_seconds: bool = False
) -> tuple[list[object], RunResult, float]:
    """Run; return a row of the table, what came out, and the seconds."""
    began = time.process_time()
    with parts(time.thread_time if cpu_seconds else time.perf_counter) as seconds:
        result = run()
    total = time.process_time() - began if cpu_seconds else result.seconds
    shares = [100 * part / total for part in seconds.values()]
    rest = max(0.0, 100 - sum(shares))
    row = [name, result.rounds / total, 1e3 * total / result.rounds]
    return [*row, *(f"{s:.0f}" for s in (*shares, rest))], result, total


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="cnn")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--server-lr", type=float, default=0.05)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=["fedavg", "trimmed-mean"])
    parser.add_argument("--history", nargs="+", default=["memory", "lmdb"])
    parser.add_argument("--estimators", nargs="+", default=["anchored", "average", "paired"])
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--cpu-seconds", action="store_true", help="of the process, not wall time")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    federation = workload(arguments.workload, arguments.clients, batch_size=arguments.batch_size)
    loop = FederatedLoop(
        enable_progress_bar=False,
        logger=False,
        eval_every=10**9,
        eval_samples=1,
        num_threads=arguments.threads,
    )
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for rule in arguments.rules:
            for where in arguments.history:
                path = Path(folder) / f"{rule}-{where}"
                history = MemoryHistory() if where == "memory" else LMDBHistory(path)
                rows += compare(loop, federation, rule, where, history, arguments)
                history.close()
    headers = ["rule", "history", "what", "rounds/s", "ms/round", *(f"% {p}" for p in PARTS)]
    headers += ["% rest", "speed-up", "ideal", "reached %", "ACP"]
    print(
        f"{arguments.workload}, {federation.layout.num_parameters} parameters, "
        f"{arguments.clients} clients, T={arguments.rounds}, "
        f"threads={arguments.threads or torch.get_num_threads()}"
    )
    table(rows, headers)
    if arguments.csv:
        write_csv(arguments.csv, rows, headers)


def compare(
    loop: FederatedLoop,
    federation: Any,
    rule: str,
    where: str,
    history: HistoryStore,
    arguments: argparse.Namespace,
) -> list[list[object]]:
    """Record once, then train from scratch and recover in turn; return a row of each."""
    settings = {"max_rounds": arguments.rounds, "server_lr": arguments.server_lr}
    cpu = arguments.cpu_seconds
    recording, _, _ = measure(
        "record",
        lambda: loop.record(federation, RULES[rule](), history, attack=TrimAttack(), **settings),
        cpu,
    )
    ways: dict[str, Recoverer] = {"scratch": TrainFromScratch()}
    for name in arguments.estimators:
        ways[f"FedRecover, {name}"] = FedRecover(estimator=name)
    turns = [
        {
            name: measure(
                name,
                lambda way=way: loop.recover(federation, history, way, federation.malicious),
                cpu,
            )
            for name, way in ways.items()
        }
        for _ in range(arguments.repeats)
    ]
    rows = [[rule, where, *recording, *[""] * 4]]
    for name in ways:
        turn = sorted(turns, key=lambda t: t["scratch"][2] / t[name][2])[len(turns) // 2]
        row, result, seconds = turn[name]
        gain: list[object] = [""] * 4
        if name != "scratch":
            acp, ratio = result.ledger.acp(), turn["scratch"][2] / seconds
            gain = [ratio, 1 / (1 - acp), f"{100 * ratio * (1 - acp):.0f}", acp]
        rows.append([rule, where, *row, *gain])
    return rows


if __name__ == "__main__":
    main()
