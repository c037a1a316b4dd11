"""Random modules along every fast path, against one client after another.

Each seed is a small module that does what research code does, recorded for 30 rounds (see
`tests/integration/random_modules.py`). What is done is kept in the CSV file, one line for a block
of seeds and an executor: a run that was stopped goes on with the blocks that are missing. Whatever
is wrong says its seed.

    python benchmarks/random_modules.py --seeds 0 10000
    python benchmarks/random_modules.py --seeds 0 10000 --table     # print what there is
"""

from __future__ import annotations

import argparse
import csv
import logging
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from timing import table, write_csv

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "integration"))

# Found before this file, which has the same name, since it comes first on the path.
from random_modules import Case, Outcome, compare, executors, random_case, record

BLOCK = 100
PATHS = ("grouped", "vmap", "loop", "sequential")
HEADERS = [
    *("first seed", "last seed", "executor", "cases", *PATHS, "departures", "reasons"),
    *("silent", "noted", "raises", "both raise", "largest agreeing", "largest silent", "wrong"),
]


@dataclass
class Tally:
    """What came of the cases of a block with one executor."""

    verdicts: Counter[str] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    largest: dict[str, float] = field(default_factory=dict)
    wrong: list[int] = field(default_factory=list)

    def add(self, case: Case, outcome: Outcome) -> None:
        """Count one."""
        self.verdicts[outcome.verdict] += 1
        self.paths[outcome.path.partition(" ")[0]] += 1
        if outcome.departure:
            self.reasons[re.sub(r"[0-9.e+-]*\d", "#", outcome.departure)[:80]] += 1
        before = self.largest.get(outcome.verdict, 0.0)
        self.largest[outcome.verdict] = max(before, outcome.largest)
        if not outcome.is_right:
            self.wrong.append(case.seed)

    def line(self, first: int, last: int, executor: str) -> list[str]:
        """Return the line of the table."""
        counts = [self.paths[path] for path in PATHS]
        reasons = "; ".join(f"{why}: {n}" for why, n in sorted(self.reasons.items()))
        verdicts = [self.verdicts[v] for v in ("silent", "noted", "raises", "both raise")]
        largest = [f"{self.largest.get(v, 0.0):.1e}" for v in ("agree", "silent")]
        cases = sum(self.verdicts.values())
        numbers = (first, last, executor, cases, *counts, sum(self.reasons.values()), reasons)
        wrong = " ".join(map(str, self.wrong))
        return [str(value) for value in (*numbers, *verdicts, *largest, wrong)]


def do(first: int, last: int) -> list[list[str]]:
    """Compare all cases of a block; return a line for each executor."""
    tallies = {name: Tally() for name in executors(random_case(first))}
    for seed in range(first, last + 1):
        case = random_case(seed)
        reference = record(case, "sequential")
        taken = ""
        for name, executor in executors(case).items():
            if name == taken:  # by the rule
                continue
            outcome = compare(case, executor, reference)
            taken = taken or outcome.path
            tallies[name].add(case, outcome)
            if not outcome.is_right:
                print(f"seed {seed}, {name}: {outcome}", file=sys.stderr, flush=True)
    return [tally.line(first, last, name) for name, tally in tallies.items()]


def read(path: Path) -> list[list[str]]:
    """Return the lines of the CSV file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.reader(file))[1:]


def main() -> None:
    """Do the blocks that are missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs=2, default=[0, 10000], help="first, and end")
    parser.add_argument("--table", action="store_true", help="print the table and do nothing")
    parser.add_argument(
        "--csv", type=Path, default=Path(__file__).parent / "results" / "random_modules.csv"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("fedrec").setLevel(logging.ERROR)
    begin, end = arguments.seeds
    for first in range(begin, end, BLOCK) if not arguments.table else ():
        last = min(first + BLOCK, end) - 1
        if any(line[:2] == [str(first), str(last)] for line in read(arguments.csv)):
            continue
        lines = do(first, last)
        done = [*read(arguments.csv), *lines]  # another process may have done others
        write_csv(arguments.csv, sorted(done, key=lambda line: (int(line[0]), line[2])), HEADERS)
        print(f"seeds {first} to {last}: {sum(int(line[10]) for line in lines)} silent", flush=True)
    table(read(arguments.csv), HEADERS)


if __name__ == "__main__":
    main()
