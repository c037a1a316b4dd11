"""Timing side by side, and tables: what the benchmarks share."""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

__all__ = ["interleave", "median", "size_parser", "table", "write_csv"]


def interleave(
    functions: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 7,
    warmup: int = 1,
    cpu_seconds: bool = False,
) -> dict[str, list[float]]:
    """Time functions in turn, so that a machine that gets slower does so for all of them.

    Args:
        functions: What to time, by name.
        repeats: Measurements of each.
        warmup: Calls of each before that.
        cpu_seconds: Measure CPU time of this process instead of wall time.

    Returns:
        Seconds by name, one number per repeat.
    """
    clock = time.process_time if cpu_seconds else time.perf_counter
    for _ in range(warmup):
        for function in functions.values():
            function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            began = clock()
            function()
            seconds[name].append(clock() - began)
    return seconds


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def size_parser(about: str) -> argparse.ArgumentParser:
    """Return a parser of how many clients and parameters are measured, how, and where it goes."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=139_960)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", type=Path)
    return parser


def table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> None:
    """Print rows below headers as a Markdown table, ready for the documentation."""
    cells = [[str(h) for h in headers], *([_text(v) for v in row] for row in rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(headers))]
    cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("| " + " | ".join(padded) + " |")


def write_csv(path: Path, rows: Sequence[Sequence[object]], headers: Sequence[str]) -> None:
    """Write the same table to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(headers)
        writer.writerows([_text(v) for v in row] for row in rows)


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
