"""Random modules along every fast path, against one client after another.

Each seed is a small module that does what research code does, recorded for 30 rounds (see
`tests/integration/random_modules.py`). What is done is kept in the CSV file, one line for a block
of seeds: a run that was stopped goes on with the blocks that are missing. Whatever is wrong says
its seed.

    python benchmarks/random_modules.py --seeds 0 10000
    python benchmarks/random_modules.py --seeds 0 10000 --table     # print what there is
"""

from __future__ import annotations

import argparse
import csv
import logging
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from timing import table, write_csv

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "integration"))

# Found before this file, which has the same name, since it comes first on the path.
from random_modules import Case, Outcome, compare, random_case

BLOCK = 100
PATHS = ("grouped", "vmap", "loop", "sequential")
HEADERS = [
    *("first seed", "last seed", "cases", *PATHS, "left grouped", "left vmap", "reasons"),
    *("silent", "raises", "both raise", "largest agreeing", "largest silent", "wrong"),
]


@dataclass
class Tally:
    """What came of the cases of a block."""

    verdicts: Counter[str] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    departures: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    largest: dict[str, float] = field(default_factory=dict)
    wrong: list[int] = field(default_factory=list)

    def add(self, case: Case, outcome: Outcome) -> None:
        """Count one."""
        verdict = "silent" if outcome.verdict in ("update", "log") else outcome.verdict
        path = outcome.path.partition(" ")[0]
        self.verdicts[verdict] += 1
        self.paths[path] += 1
        if outcome.departure is not None:
            self.departures[path] += 1
            self.reasons[_kind_of(str(outcome.departure["reason"]))] += 1
        self.largest[verdict] = max(self.largest.get(verdict, 0.0), outcome.largest)
        if not outcome.is_right:
            self.wrong.append(case.seed)

    def line(self, first: int, last: int) -> list[str]:
        """Return the line of the table."""
        counts = [self.paths[path] for path in PATHS]
        left = [self.departures[path] for path in PATHS[:2]]
        reasons = "; ".join(f"{why}: {n}" for why, n in sorted(self.reasons.items()))
        verdicts = [self.verdicts[v] for v in ("silent", "raises", "both raise")]
        largest = [f"{self.largest.get(v, 0.0):.1e}" for v in ("agree", "silent")]
        cases = sum(self.verdicts.values())
        wrong = " ".join(map(str, self.wrong))
        values = (first, last, cases, *counts, *left, reasons, *verdicts, *largest, wrong)
        return [str(value) for value in values]


_KINDS = {
    "leaves out samples": "labels left out",
    "reads the value": "reads a value",
    ".item()": "reads a value",
    "data-dependent": "reads a value",
    "reads what it has logged": "reads a value",
    "random": "draws",
    "it changes": "remembers",
    "hook": "hooks",
    "gradient": "gradients of its own",
    "backward pass": "gradients of its own",
    "position": "samples by position",
    "picks samples": "samples by position",
    "updates differ": "audit",
}


def _kind_of(reason: str) -> str:
    """Return which kind of reason it is."""
    return next((kind for part, kind in _KINDS.items() if part in reason), "samples meet")


def do(first: int, last: int) -> list[str]:
    """Compare all cases of a block; return its line."""
    tally = Tally()
    for seed in range(first, last + 1):
        case = random_case(seed)
        outcome = compare(case)
        tally.add(case, outcome)
        if not outcome.is_right:
            print(f"seed {seed}: {outcome}", file=sys.stderr, flush=True)
    return tally.line(first, last)


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
        line = do(first, last)
        done = [*read(arguments.csv), line]  # another process may have done others
        write_csv(arguments.csv, sorted(done, key=lambda line: int(line[0])), HEADERS)
        print(f"seeds {first} to {last}: wrong {line[-1] or 'none'}", flush=True)
    table(read(arguments.csv), HEADERS)


if __name__ == "__main__":
    main()
