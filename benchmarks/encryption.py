"""What encryption at rest costs: rounds written and read, encrypted and not, side by side.

    python benchmarks/encryption.py --csv benchmarks/results/encryption.csv

A round is 100 clients times 139,960 parameters (the paper's CNN on MNIST), normally distributed.
It is encoded, written, and waited for (one commit with fsync); then it is read back from the page
cache, checked and decoded. Wall time and CPU time are medians of the repeats, in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
from timing import interleave, median, table, write_csv

from fedrec.history import LMDBHistory, Manifest
from fedrec.history.rounds import RoundArrays

HEADERS = (
    *("codec", "threads", "write s", "encrypted", "ratio", "read s", "encrypted", "ratio"),
    *("write CPU s", "encrypted", "read CPU s", "encrypted"),
)


def stores(folder: Path, codec: str, manifest: Manifest) -> dict[str, LMDBHistory]:
    """Return an empty store and an empty encrypted one."""
    found = {
        "plain": LMDBHistory(folder / f"{codec}-plain", codec=codec),
        "encrypted": LMDBHistory(
            folder / f"{codec}-encrypted", codec=codec, master_key="env:BENCHMARK_KEY"
        ),
    }
    for store in found.values():
        store.begin(manifest)
    return found


def measure(found: dict[str, LMDBHistory], record: RoundArrays, repeats: int) -> dict[str, float]:
    """Return seconds by name."""
    rounds = {name: count() for name in found}

    def write(name: str) -> None:
        found[name].append(dataclasses.replace(record, round=next(rounds[name])))

    writing: dict[str, Callable[[], object]] = {name: partial(write, name) for name in found}
    reading: dict[str, Callable[[], object]] = {
        name: partial(store.read, 0) for name, store in found.items()
    }
    seconds = {}
    for what, functions in (("write", writing), ("read", reading)):
        for cpu in (False, True):
            times = interleave(functions, repeats=repeats, cpu_seconds=cpu)
            for name, values in times.items():
                seconds[f"{what} {name}{' CPU' if cpu else ''}"] = median(values)
    return seconds


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codecs", nargs="+", default=["float32", "float16", "int8"])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=139_960)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary one)")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    os.environ["BENCHMARK_KEY"] = os.urandom(32).hex()
    m, d = arguments.clients, arguments.parameters
    generator = np.random.default_rng(0)
    ids = tuple(f"client-{i}" for i in range(m))
    manifest = Manifest(
        model_fingerprint="benchmark",
        num_parameters=d,
        clients=dict.fromkeys(ids, 100),
        seed=0,
        aggregator={},
        server_lr=0.1,
        max_rounds=2 * arguments.repeats + 2,
    )
    record = RoundArrays(
        round=0,
        global_weights=generator.standard_normal(d, np.float32),
        client_ids=ids,
        updates=generator.standard_normal((m, d), np.float32),
        num_samples=np.full(m, 100),
        aggregate=generator.standard_normal(d, np.float32),
    )
    lines: list[list[object]] = []
    for codec in arguments.codecs:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            found = stores(Path(folder), codec, manifest)
            s = measure(found, record, arguments.repeats)
            for store in found.values():
                store.close()
        lines.append(
            [
                codec,
                len(os.sched_getaffinity(0)),
                *(s["write plain"], s["write encrypted"]),
                s["write encrypted"] / s["write plain"],
                *(s["read plain"], s["read encrypted"]),
                s["read encrypted"] / s["read plain"],
                *(s["write plain CPU"], s["write encrypted CPU"]),
                *(s["read plain CPU"], s["read encrypted CPU"]),
            ]
        )
    table(lines, HEADERS)
    if arguments.csv:
        write_csv(arguments.csv, lines, HEADERS)


if __name__ == "__main__":
    main()
