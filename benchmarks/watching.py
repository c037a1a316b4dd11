"""What watching every round, and auditing a client in it, cost: whole rounds of a recording.

    python benchmarks/watching.py --csv benchmarks/results/watching.csv

Recordings with and without are measured in turn in one process, so that drift hits both alike: the
grouped path as it is, without its audit, and without audit and watch, which are replaced by what
does nothing. Trimmed mean under the trim attack, recorded to LMDB, on one thread; CPU time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from timing import interleave, median, table, write_csv
from torch.overrides import TorchFunctionMode

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import TrimmedMean
from fedrec.attacks import TrimAttack
from fedrec.data import MNIST, Digits
from fedrec.executors import VectorizedExecutor, grouped, vectorized
from fedrec.executors.winners import Deferrals
from fedrec.history import LMDBHistory
from fedrec.models import CNN, MLP

NETS: dict[str, tuple[Callable[[], Any], Any, int, int]] = {
    "digits": (partial(MLP, in_features=64), Digits(num_clients=20), 4, 6),
    "cnn": (CNN, MNIST(num_clients=100), 20, 32),
}
HEADERS = ("net", "clients", "way", "ms/round", "more than unwatched, %")


class Unwatched(TorchFunctionMode):
    """In place of `SampleWatch`: computes, and looks at nothing but outputs that are put off."""

    def __init__(self, batch: Any, num_samples: int, deferrals: Deferrals | None) -> None:
        super().__init__()
        self.deferrals = deferrals
        self.num_bytes = 0

    def __enter__(self) -> Unwatched:
        return self if self.deferrals is None else super().__enter__()

    def __exit__(self, *exception: object) -> None:
        if self.deferrals is not None:
            super().__exit__(*exception)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waiting = self.deferrals.call(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if waiting is None else waiting

    def layer(self, name: str, x: torch.Tensor, compute: Any) -> Any:
        with torch._C.DisableTorchFunction():
            if self.deferrals is not None:
                self.deferrals.settle(x)
            return compute(x)

    def kind(self, value: Any) -> None:
        return None

    def parts_of_mean(self, what: str, value: Any, count: int) -> int:
        return 1


@contextmanager
def without_watch() -> Iterator[None]:
    """Leave out everything that looks at a round while it is computed."""

    @contextmanager
    def nothing(state: Any) -> Iterator[None]:
        yield

    kept = grouped.SampleWatch, grouped.refuse_custom_gradients, vectorized.traceless
    grouped.SampleWatch = Unwatched
    grouped.refuse_custom_gradients = lambda loss, known: None
    vectorized.traceless = nothing
    try:
        yield
    finally:
        grouped.SampleWatch, grouped.refuse_custom_gradients, vectorized.traceless = kept


class Blind(VectorizedExecutor):
    """Plans as usual, then looks at nothing."""

    def compute(self, *args: Any) -> Any:
        with without_watch():
            return super().compute(*args)


def ways_of(net: str, num_rounds: int) -> dict[str, Callable[[], None]]:
    """Return one recording of each way."""
    make, data, num_malicious, batch_size = NETS[net]

    def recording(executor: VectorizedExecutor) -> None:
        torch.manual_seed(0)
        federation = Federation.from_data(
            data, make(), malicious=num_malicious, batch_size=batch_size
        )
        loop = FederatedLoop(
            executor=executor,
            logger=False,
            enable_progress_bar=False,
            num_threads=1,
            eval_every=num_rounds,
        )
        with (
            TemporaryDirectory() as folder,
            LMDBHistory(Path(folder) / "history") as history,
        ):
            result = loop.record(
                federation,
                TrimmedMean(trim=0.2),
                history,
                max_rounds=num_rounds,
                server_lr=0.01,
                attack=TrimAttack(),
            )
        if "grouped" not in result.execution["path"] or "departure" in result.execution:
            raise RuntimeError(
                f"Expected all rounds on the grouped path, but got {result.execution}"
            )

    return {
        "watched and audited": partial(recording, VectorizedExecutor()),
        "watched": partial(recording, VectorizedExecutor(audit=0)),
        "neither": partial(recording, Blind(audit=0)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    rows = []
    for net in args.nets:
        num_rounds = 300 if net == "digits" else 5
        ways = ways_of(net, num_rounds)
        seconds = interleave(ways, repeats=args.repeats, cpu_seconds=True)
        base = median(seconds["neither"])
        for way, found in seconds.items():
            more = 100 * (median(found) / base - 1)
            ms = 1e3 * median(found) / num_rounds
            rows.append((net, NETS[net][1].num_clients, way, f"{ms:.3g}", f"{more:.1f}"))
    table(rows, HEADERS)
    if args.csv:
        write_csv(args.csv, rows, HEADERS)


if __name__ == "__main__":
    main()
