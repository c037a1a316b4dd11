"""What the live view of a run costs: whole recordings with and without it.

    python benchmarks/live_view.py --csv benchmarks/results/live_view.csv

Recordings with the view, which is drawn as for a terminal of 100 columns, and without are made in
turn in one process. The difference in wall and CPU time is mostly noise; so a third figure is what
the view's own hooks take of both, measured inside them. Pictures are drawn by the clock: where a
run has a part of a core only, they are a larger part of its CPU time. The last line says what they
take of a core.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

import rich.console
import torch
from timing import median, table, write_csv

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import TrimmedMean
from fedrec.attacks import TrimAttack
from fedrec.callbacks import RichProgressBar
from fedrec.data import Digits
from fedrec.history import LMDBHistory
from fedrec.models import MLP

HEADERS = ("seconds", "without", "with", "more, %", "in its hooks, %")


class Timed(RichProgressBar):
    """The live view, and the wall and CPU seconds that its hooks take."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = [0.0, 0.0]

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return partial(self._measure, found) if name.startswith("on_") else found

    def _measure(self, hook: Callable[..., None], *args: Any) -> None:
        began = time.perf_counter(), time.thread_time()
        hook(*args)
        self.seconds[0] += time.perf_counter() - began[0]
        self.seconds[1] += time.thread_time() - began[1]


def record(num_rounds: int, view: Timed | None) -> tuple[float, float]:
    """Record, and return wall and CPU seconds of the recording."""
    torch.manual_seed(0)
    federation = Federation.from_data(
        Digits(num_clients=20), MLP(in_features=64), malicious=4, batch_size=6
    )
    loop = FederatedLoop(
        logger=False,
        enable_progress_bar=False,
        callbacks=[] if view is None else [view],
        num_threads=1,
        eval_every=20,
    )
    with TemporaryDirectory() as folder, LMDBHistory(Path(folder) / "history") as history:
        wall, cpu = time.perf_counter(), time.process_time()
        loop.record(
            federation,
            TrimmedMean(trim=0.2),
            history,
            max_rounds=num_rounds,
            server_lr=0.05,
            attack=TrimAttack(),
        )
        return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    with Path(os.devnull).open("w") as screen:
        rich.console.Console = partial(_terminal, rich.console.Console, screen)  # type: ignore[misc]
        record(args.rounds // 10, Timed())  # imports, and compiles kernels
        plain, shown, inside = [], [], []
        for _ in range(args.repeats):
            plain.append(record(args.rounds, None))
            view = Timed()
            shown.append(record(args.rounds, view))
            inside.append(view.seconds)
    rows = []
    for i, clock in enumerate(("wall", "CPU")):
        without, with_it = median([p[i] for p in plain]), median([s[i] for s in shown])
        hooks = median([h[i] / s[i] for h, s in zip(inside, shown, strict=True)])
        more = f"{100 * (with_it / without - 1):.1f}"
        rows.append((clock, f"{without:.2f}", f"{with_it:.2f}", more, f"{100 * hooks:.2f}"))
    table(rows, HEADERS)
    share = median([h[1] / s[0] for h, s in zip(inside, shown, strict=True)])
    print(f"The hooks take {1000 * share:.1f} ms of CPU time a second.")
    if args.csv:
        write_csv(args.csv, rows, HEADERS)


def _terminal(console: type[rich.console.Console], screen: TextIO, **_: Any) -> Any:
    return console(file=screen, force_terminal=True, width=100)


if __name__ == "__main__":
    main()
