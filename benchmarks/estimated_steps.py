"""Rounds in which all updates are estimated: aggregated at once, against kept and then aggregated.

    python benchmarks/estimated_steps.py --csv benchmarks/results/estimated_steps.csv

A round is the estimates of all clients, the abnormality test, the aggregation rule and the server
step. At once, estimates do not leave the cache, and the next round's dot products are computed
along. All ways take turns in one process. Quartiles of CPU time.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from estimation import Anchored, Problem
from timing import interleave, table, write_csv

from fedrec.aggregators import Aggregator, ColumnRule, FedAvg, TrimmedMean
from fedrec.recoverers import Estimator, PairedLBFGS
from fedrec.types import CohortUpdates, RoundRecord

LR = 1e-6  # the pairs are random, and no step of theirs goes downhill


def rounds(
    estimator: Estimator, problem: Problem, rule: Aggregator, at_once: bool
) -> Callable[[], None]:
    """Return a function that does the next round of a recovery."""
    (m, d), generator = problem.historical.shape, torch.Generator().manual_seed(1)
    ids = tuple(f"c{i}" for i in problem.rows.tolist())
    sizes, shares = torch.ones(m, dtype=torch.int64), torch.full((m,), 1 / m)
    sent = CohortUpdates(client_ids=ids, updates=problem.historical, num_samples=sizes)
    step = 1e-3 * torch.randn(d, generator=generator)
    column_rule = ColumnRule(rule.coefficients(shares), rule.trims(m) or 0, LR)
    weights, recorded, t = 0.01 * torch.ones(d), torch.zeros(d), 10**5

    def next_round() -> None:
        nonlocal weights, recorded, t
        record = RoundRecord(round=t, global_weights=recorded, sent=sent, aggregate=step)
        if at_once:
            found = estimator.aggregate(record, weights, column_rule)
            assert found is not None
            aggregate, largest, usable = found
        else:
            updates, largest, usable = estimator.estimate(record, weights)
            aggregate = rule(updates, shares)
        _ = usable & torch.isfinite(largest) & (largest > 1.0)
        weights, recorded, t = weights - LR * aggregate, recorded - LR * step, t + 1

    return next_round


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    problem = Problem(arguments.clients, arguments.pairs, 139_960)
    ways: dict[str, Callable[[], object]] = {}
    for rule in (FedAvg(), TrimmedMean(trim=0.2)):
        for kind in ("anchored", "without curvature", "paired"):
            for at_once in (False, True):  # each with pairs of its own
                anchored = Anchored(problem).estimator
                if kind == "without curvature":
                    anchored._gamma = 0.0  # as it is regressed where curvature tells nothing
                estimator: Estimator = anchored
                if kind == "paired":
                    estimator = PairedLBFGS(buffer_size=arguments.pairs)
                    ids = tuple(f"c{i}" for i in problem.rows.tolist())
                    estimator.start(SimpleNamespace(remaining=ids), range(10**6))
                    estimator._pairs = copy.deepcopy(problem.pairs)
                way = "at once" if at_once else "kept"
                ways[f"{kind}, {type(rule).__name__}, {way}"] = rounds(
                    estimator, problem, rule, at_once
                )
    seconds = interleave(ways, repeats=arguments.repeats, warmup=3, cpu_seconds=True)
    headers = ("what", "lower quartile, ms", "median, ms")
    rows = []
    for name, values in seconds.items():
        low, middle, _ = statistics.quantiles(values, n=4)
        rows.append([name, 1e3 * low, 1e3 * middle])
    table(rows, headers)
    if arguments.csv is not None:
        write_csv(arguments.csv, rows, headers)


if __name__ == "__main__":
    main()
