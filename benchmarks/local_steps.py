"""Several local steps: what fedrec does, and what a first step for all clients at once would gain.

    python benchmarks/local_steps.py --nets cnn mlp --steps 1 2 5

Clients share their weights in the first step alone, so only that one can be computed along
`"grouped"`. `first step grouped` adds up what that one takes, and the other steps along the fastest
other path: what is to be gained at most, since nothing is charged for handing weights and momenta
from one path to the other. Milliseconds of CPU time a round, medians, one thread, in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from local_updates import NETS, data_of, first_round
from timing import interleave, median, table, write_csv

from fedrec.clients import LightningClient
from fedrec.executors import SequentialExecutor, VectorizedExecutor
from fedrec.loop.runtime import keep_freed_memory
from fedrec.models import Classifier

HEADERS = (
    *("net", "clients", "momentum", "steps", "sequential", "vmap", "fedrec takes"),
    *("first step grouped", "gain at most"),
)


def ways(
    module: Classifier, name: str, num_clients: int, steps: int
) -> tuple[dict[str, Callable[[], object]], str]:
    """Return a function for each path that is not refused, and the one that fedrec takes."""
    data = data_of(name, num_clients, 32)
    options = {"batch_size": 32, "local_steps": steps, "local_lr": module.lr}
    clients = [LightningClient(f"c{i}", module, part, **options) for i, part in enumerate(data)]
    weights, ctx = first_round(module, clients)
    found: dict[str, Callable[[], object]] = {
        "sequential": partial(SequentialExecutor().compute, clients, weights, ctx)
    }
    for path in ("grouped", "vmap"):
        executor = VectorizedExecutor(path=path, warn=False, audit=0)
        if executor.plan(clients, weights, ctx)["path"].startswith(path):
            found[path] = partial(executor.compute, clients, weights, ctx)
    taken = VectorizedExecutor(warn=False, audit=0).plan(clients, weights, ctx)["path"]
    return found, str(taken)


def measure(name: str, momentum: float, options: argparse.Namespace) -> list[list[object]]:
    """Return the rows of one net."""
    torch.manual_seed(0)
    module, plain, clients = NETS[name][0](), NETS[name][0](), options.clients

    def optimizer(self: Classifier) -> torch.optim.Optimizer:
        # The first step with momentum is the one without: the buffer is the gradient then.
        rest = 0.0 if self is plain else momentum
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=rest)

    counts = sorted({*options.steps, *(steps - 1 for steps in options.steps)} - {0})
    with patch.object(Classifier, "configure_optimizers", optimizer):
        grouped = ways(plain, name, clients, 1)[0]["grouped"]
        found = {steps: ways(module, name, clients, steps) for steps in counts}
        functions = {
            (steps, path): function
            for steps, (paths, _) in found.items()
            for path, function in paths.items()
        }
        turns = interleave(
            {**functions, (0, "first"): grouped}, repeats=options.repeats, cpu_seconds=True
        )
    time = {key: 1e3 * median(values) for key, values in turns.items()}
    rows: list[list[object]] = []
    for steps in options.steps:
        paths = {path: time[steps, path] for path in found[steps][0]}
        others = [t for (s, path), t in time.items() if s == steps - 1 and path != "grouped"]
        rest = min(others) if steps > 1 else 0.0
        taken = found[steps][1].split(" ")[0]
        together = time[0, "first"] + rest
        row = [name, clients, momentum, steps, paths["sequential"], paths.get("vmap", "")]
        rows.append([*row, taken, together, paths[taken] / together])
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--nets", nargs="+", choices=NETS, default=["cnn", "mlp", "har", "purchase"]
    )
    parser.add_argument("--steps", nargs="+", type=int, default=[2, 5])
    parser.add_argument("--momentum", nargs="+", type=float, default=[0.0, 0.9])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    rows: list[list[object]] = []
    for name in options.nets:
        for momentum in options.momentum:
            rows += measure(name, momentum, options)
            if options.csv is not None:  # what is measured is kept, whatever comes
                write_csv(options.csv, rows, HEADERS)
    table(rows, HEADERS)


if __name__ == "__main__":
    main()
