"""The fault table: every row of tests/faults with release counts.

Each row is a number of independent trials with seeds 0, 1, 2, ...; one that fails says its seed.
What is done is kept in the CSV file: a row that has fewer trials than it should goes on with those
that are missing.

    python benchmarks/faults.py                  # all rows, one after another
    python benchmarks/faults.py R1 R7            # some of them
    python benchmarks/faults.py R1 --again       # do them anew
    python benchmarks/faults.py --table          # print what there is
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from pathlib import Path

from timing import table, write_csv

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "faults"))

import fault_rows

HEADERS = ["id", "what", "mode", "trials", "failed", "at most", "seen", "seconds"]
# For these a disk makes no difference: the kernel has what a killed process wrote. Memory is
# quicker.
IN_MEMORY = ("fault_damage", "fault_kills")


def read(path: Path) -> dict[tuple[str, str, str], list[str]]:
    """Return the rows of the CSV file, by id, name and mode."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return {(row[0], row[1], row[2]): row for row in rows}


def do(row: fault_rows.Row, count: int, most_seconds: float, before: list[str]) -> list[str]:
    """Do trials of a row, the first `count` that are not done; return its line of the table."""
    trials, failed, facts, seconds = _numbers(before)
    shared = Path("/dev/shm")
    in_memory = row.module in IN_MEMORY and shared.is_dir()
    with tempfile.TemporaryDirectory(dir=shared if in_memory else None) as folder:
        found = row.run(count - trials, Path(folder), first=trials, most_seconds=most_seconds)
    for seed, text in found.failures[:5]:
        print(f"{row.key}: the trial with seed {seed} failed:\n{text}", file=sys.stderr)
    trials += found.trials
    failed += len(found.failures)
    seconds += found.seconds
    for name, number in found.facts.items():
        facts[name] = facts.get(name, 0) + number
    # 0 failures in N trials: the rate is below 3/N with 95% confidence.
    bound = "" if failed or trials < 10 else f"{3 / trials:.2%}"
    seen = "; ".join(f"{name}: {number:,}" for name, number in facts.items())
    numbers = [str(trials), str(failed), bound, seen, f"{seconds:.0f}"]
    return [row.id, row.name, row.mode, *numbers]


def _numbers(line: list[str]) -> tuple[int, int, dict[str, int], float]:
    """Return trials, failures, facts and seconds of a line of the table."""
    if not line or line[3] == "0":
        return 0, 0, {}, 0.0
    pairs = [fact.rsplit(": ", 1) for fact in line[6].split("; ") if fact]
    facts = {name: int(number.replace(",", "")) for name, number in pairs}
    return int(line[3]), int(line[4]), facts, float(line[7])


def main() -> None:
    """Do the rows that are missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", help="ids, or beginnings of `id: name, mode`; all")
    parser.add_argument("--scale", type=float, default=1.0, help="times the release counts")
    parser.add_argument(
        "--most-seconds", type=float, default=600, help="no trial of a row begins later"
    )
    parser.add_argument("--again", action="store_true", help="also rows that are done")
    parser.add_argument("--table", action="store_true", help="print the table and do nothing")
    parser.add_argument(
        "--csv", type=Path, default=Path(__file__).parent / "results" / "faults.csv"
    )
    args = parser.parse_args()
    rows = [row for row in fault_rows.ROWS if row.release]
    # The history's core has to work without torch, which no row may have imported before.
    for row in sorted(rows, key=lambda row: row.needs_torch):
        name = (row.id, row.name, row.mode)
        if args.table or not row.is_one_of(args.rows):
            continue
        count = max(1, round(args.scale * row.release))
        before = [] if args.again else read(args.csv).get(name, [])
        if _numbers(before)[0] >= count:
            continue
        if row.needs_mounts and not fault_rows.can_mount():
            line = [*name, "0", "", "", "not run: mounting file systems is for root", "0"]
        else:
            line = do(row, count, args.most_seconds, before)
        done = {**read(args.csv), name: line}  # another process may have done others
        names = [(row.id, row.name, row.mode) for row in rows]
        write_csv(args.csv, [done[name] for name in names if name in done], HEADERS)
        print(" | ".join(line), flush=True)
    table(list(read(args.csv).values()), HEADERS)


if __name__ == "__main__":
    main()
