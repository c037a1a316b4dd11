"""Aggregation rules against what torch, NumPy and SciPy offer, and against one read of the data.

    python benchmarks/aggregation.py --csv benchmarks/results/aggregation.csv
    python benchmarks/aggregation.py --clients 20 --parameters 2900

Everything is measured in turn in one process, so that drift hits all alike; figures are medians of
wall-clock time. A ratio above 1 in `faster than torch.sort` or `faster than np.sort` is a gain;
both sort along the clients. `times one read` divides by the time of `torch.sum` over the updates.
A matrix product is among the rows to show what a second thread gains on this machine at best.
`faster than plain torch` divides the time of the same rule in a few lines of torch, see
`plain_rules.py`, by that of a whole call of fedrec's, checks included. Rules are timed with the
first number of threads only. NumPy and SciPy use one thread whatever is asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from plain_rules import plain_rules
from timing import interleave, median, table, write_csv
from torch import Tensor

import fedrec.aggregators as aggregators
from fedrec.functional import (
    coordinate_median,
    pairwise_squared_distances,
    trimmed_mean,
    use_kernel,
    weighted_mean,
)
from fedrec.functional.aggregation.order_statistics import choose_kernel

HEADERS = (
    "clients",
    "parameters",
    "threads",
    "what",
    "with",
    "ms",
    "faster than torch.sort",
    "faster than np.sort",
    "times one read",
    "faster than plain torch",
)
FEDREC, PLAIN = "fedrec", "plain torch"
PRODUCT = ("matrix product", "torch.mm, 1024 x 1024")
READ, TORCH_SORT, NP_SORT = ("one read", "torch.sum"), ("sort", "torch.sort"), ("sort", "np.sort")


def functions_of(updates: Tensor, num_trim: int) -> dict[tuple[str, str], Callable[[], object]]:
    """Return what to time, by what it computes and with what."""
    array = updates.numpy()
    m, d = array.shape
    middle = sorted({(m - 1) // 2, m // 2})
    weights = torch.arange(1, m + 1)
    square = torch.ones(1024, 1024)

    def with_kernel(kernel: str | None, rule: Callable[[Tensor], Tensor]) -> Tensor:
        with use_kernel(kernel) if kernel is not None else nullcontext():
            return rule(updates)

    functions: dict[tuple[str, str], Callable[[], object]] = {
        READ: updates.sum,
        PRODUCT: partial(torch.mm, square, square),
        TORCH_SORT: partial(updates.sort, dim=0),
        NP_SORT: partial(np.sort, array, axis=0),
        ("median", "torch.median (the lower one)"): partial(updates.median, dim=0),
        ("median", "np.median"): partial(np.median, array, axis=0),
        ("median", "np.partition"): partial(np.partition, array, middle, axis=0),
        ("trimmed mean", "np.partition"): lambda: np.partition(
            array, [num_trim, m - num_trim - 1], axis=0
        )[num_trim : m - num_trim].mean(axis=0),
    }
    try:
        from scipy.stats import trim_mean
    except ImportError:
        print("SciPy is not installed: trim_mean is left out")
    else:
        functions["trimmed mean", "scipy.stats.trim_mean"] = partial(
            trim_mean, array, num_trim / m, axis=0
        )
    taken = choose_kernel(updates.device, m, d)
    for kernel in dict.fromkeys((taken, "numpy")):
        name = f"fedrec, {kernel}" + (" (as chosen)" if kernel == taken else "")
        functions["median", name] = partial(with_kernel, kernel, coordinate_median)
        functions["trimmed mean", name] = partial(
            with_kernel, kernel, partial(trimmed_mean, num_trim=num_trim)
        )
    functions["FedAvg", "fedrec"] = partial(weighted_mean, updates, weights)
    functions["distances", "fedrec"] = partial(pairwise_squared_distances, updates)
    functions["distances", "torch.cdist"] = partial(torch.cdist, updates, updates)
    functions["finite", "row sums, as fedrec"] = lambda: torch.isfinite(updates.sum(dim=1)).all()
    functions["finite", "torch.isfinite"] = lambda: torch.isfinite(updates).all()
    return functions


def calls_of(updates: Tensor, num_byzantine: int) -> dict[tuple[str, str], Callable[[], object]]:
    """Return calls of rules, and of the same written plainly."""
    f = num_byzantine
    rules = [
        aggregators.Krum(num_byzantine=f),
        aggregators.MultiKrum(num_byzantine=f),
        aggregators.Bulyan(num_byzantine=f),
        aggregators.MeanAroundMedian(num_byzantine=f),
        aggregators.GeometricMedian(),
        aggregators.NormClipping(),
        aggregators.DnC(num_byzantine=f),
        aggregators.CAF(num_byzantine=f),
    ]
    calls = {(type(rule).__name__, FEDREC): partial(rule, updates) for rule in rules}
    plain = plain_rules(updates, f)
    return calls | {(name, PLAIN): function for name, function in plain.items()}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=139_960)
    parser.add_argument("--trim", type=float, default=0.2, help="fraction trimmed at each end")
    parser.add_argument("--byzantine", type=float, default=0.2, help="fraction rules are told")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    size = (arguments.clients, arguments.parameters)
    updates = torch.randn(size, generator=torch.Generator().manual_seed(0))
    functions = functions_of(updates, int(arguments.trim * arguments.clients))
    calls = calls_of(updates, int(arguments.byzantine * arguments.clients))

    def on(threads: int, function: Callable[[], object]) -> object:
        torch.set_num_threads(threads)
        return function()

    keys = {
        f"{threads} | {' | '.join(key)}": (threads, *key)
        for number, threads in enumerate(arguments.threads)
        for key in [*functions, *(calls if number == 0 else ())]
    }
    seconds = interleave(
        {
            name: partial(on, threads, (functions | calls)[key[0], key[1]])
            for name, (threads, *key) in keys.items()
        },
        repeats=arguments.repeats,
    )
    took = {keys[name]: median(values) for name, values in seconds.items()}
    rows = [
        (
            *size,
            threads,
            *key,
            1e3 * value,
            took[threads, *TORCH_SORT] / value,
            took[threads, *NP_SORT] / value,
            value / took[threads, *READ],
            _ratio(took.get((threads, key[0], PLAIN)), value),
        )
        for (threads, *key), value in took.items()
    ]
    table(rows, HEADERS)
    if arguments.csv is not None:
        write_csv(arguments.csv, rows, HEADERS)


def _ratio(plain: float | None, value: float) -> float | str:
    return "" if plain is None else plain / value


if __name__ == "__main__":
    main()
