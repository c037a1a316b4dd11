"""How time at the server and memory grow with clients n, parameters d, rounds T and pairs s.

    python benchmarks/scaling.py --csv benchmarks/results/scaling.csv
    python benchmarks/scaling.py --repeats 1 --vary n d

Clients are quadratic and take next to no time; what is measured is the rest of a FedRecover run
from an LMDB history, reading, estimates, pairs, aggregation, in CPU seconds of all its threads, so
that a busy machine matters little. Each point runs in a process of its own, whose peak of anonymous
memory, less what it was after the imports, is that of the recording and of the recovery. Exponents
are slopes of a least-squares line through logarithms.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from timing import table, write_csv

BASE = {"n": 20, "d": 50_000, "T": 120, "s": 2}
POINTS = {
    "n": (10, 20, 40, 80),
    "d": (25_000, 50_000, 100_000, 200_000),
    "T": (60, 120, 240, 480),
    "s": (1, 2, 4, 8),
}


def anonymous_bytes() -> int:
    """Return the memory of this process that is not a file's."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return 1024 * int(found[1]) if found else 0


def peak_of(run: Callable[[], Any]) -> tuple[Any, int]:
    """Run; return the result and the highest growth of memory that was seen."""
    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = run()
    done.set()
    watcher.join()
    return result, peak - before


def point(n: int, d: int, T: int, s: int) -> dict[str, float]:  # noqa: N803 - the paper's letter
    """Record and recover once; return seconds at the server and bytes."""
    import torch
    from torch import Tensor

    from fedrec.aggregators import FedAvg
    from fedrec.clients import Client
    from fedrec.federation import Federation
    from fedrec.history import LMDBHistory
    from fedrec.loop import FederatedLoop
    from fedrec.recoverers import FedRecover, PairedLBFGS
    from fedrec.testing.problems import VectorModule
    from fedrec.types import ClientUpdate, RoundContext

    torch.set_num_threads(1)
    curvature = torch.linspace(0.5, 2.0, d)
    spent = [0.0]

    class Quadratic(Client):
        def local_update(self, global_weights: Tensor, ctx: RoundContext) -> ClientUpdate:
            began = time.thread_time()
            shift = int(self.client_id) / n
            update = (curvature + shift) * (global_weights - shift)
            spent[0] += time.thread_time() - began
            return ClientUpdate(update=update, num_samples=1)

    clients = [Quadratic(str(i), num_samples=1) for i in range(n)]
    federation = Federation(
        clients, VectorModule(size=d), malicious=[str(i) for i in range(n // 5)]
    )
    loop = FederatedLoop(enable_progress_bar=False, logger=False, num_threads=1)
    with tempfile.TemporaryDirectory() as folder, LMDBHistory(Path(folder) / "h") as history:
        _, recording = peak_of(
            lambda: loop.record(federation, FedAvg(), history, max_rounds=T, server_lr=0.1)
        )
        spent[0] = 0.0
        recoverer = FedRecover(estimator=PairedLBFGS(buffer_size=s), correction_period=20)
        began = time.process_time()
        _, recovery = peak_of(
            lambda: loop.recover(federation, history, recoverer, federation.malicious)
        )
        seconds = time.process_time() - began - spent[0]
    return {"seconds": seconds, "recording": recording, "recovery": recovery}


def measure(settings: dict[str, int]) -> dict[str, float]:
    """Run a point in a new process."""
    command = [sys.executable, __file__, "--point", json.dumps(settings)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    ).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def slope(values: list[float], found: list[float]) -> float:
    """Return the exponent that fits best."""
    return float(np.polyfit(np.log(values), np.log(found), 1)[0])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vary", nargs="+", choices=POINTS, default=list(POINTS))
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--point", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point:
        print(json.dumps(point(**json.loads(arguments.point))))
        return
    rows: list[list[object]] = []
    for letter in arguments.vary:
        values = POINTS[letter]
        runs = [
            [measure({**BASE, letter: value}) for value in values] for _ in range(arguments.repeats)
        ]
        found = [
            {key: statistics.median(one[key] for one in point) for key in point[0]}
            for point in zip(*runs, strict=True)
        ]
        seconds = [one["seconds"] for one in found]
        memory = [[one[key] / 2**20 for one in found] for key in ("recording", "recovery")]
        rows.append(
            [
                letter,
                " ".join(map(str, values)),
                " ".join(f"{s:.2f}" for s in seconds),
                f"{slope(list(values), seconds):.2f}",
                *(
                    text
                    for mib in memory
                    for text in (
                        " ".join(f"{x:.0f}" for x in mib),
                        f"{slope(list(values), mib):.2f}",
                    )
                ),
            ]
        )
    headers = ["", "values", "server CPU s", "exponent"]
    headers += ["recording MiB", "exponent", "recovery MiB", "exponent"]
    print(", ".join(f"{k}={v}" for k, v in BASE.items()) + ", one thread; one of them varied")
    table(rows, headers)
    if arguments.csv:
        write_csv(arguments.csv, rows, headers)


if __name__ == "__main__":
    main()
