"""All rows of the fault table: their trials, and how many of them the tests and a release run.

Run as a script it does some and prints what came of it as JSON; without torch where that is not
needed, so that it starts at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fault_disks import can_mount
from fault_stores import Outcome, Trial, run_trials

MANY = 2**28


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table.

    Args:
        id: Its name in the requirements.
        name: What is done.
        mode: In which of the modes that exist.
        module: Module of the trial; imported when the row runs.
        trial: Makes the trial from the module.
        tests: Trials in the tests.
        release: Trials in a release run.
        slow: Whether the tests that one runs while working leave it out.
    """

    id: str
    name: str
    mode: str
    module: str
    trial: Callable[[object], Trial]
    tests: int
    release: int
    slow: bool = False

    @property
    def key(self) -> str:
        """Name of the row on the command line."""
        return f"{self.id}: {self.name}, {self.mode}"

    def is_one_of(self, words: Sequence[str]) -> bool:
        """Whether it is meant by one of these words: its id, or the beginning of its key."""
        return not words or any(
            word == self.id or (":" in word and self.key.startswith(word)) for word in words
        )

    @property
    def needs_torch(self) -> bool:
        """Whether the trial is of whole recordings and recoveries."""
        return self.module == "fault_federations"

    @property
    def needs_mounts(self) -> bool:
        """Whether it mounts file systems, which is for root."""
        return self.mode in ("tmpfs", "ext4")

    def run(
        self, count: int, folder: Path, *, first: int = 0, most_seconds: float = 1e9
    ) -> Outcome:
        """Do the trials."""
        trial = self.trial(__import__(self.module))
        return run_trials(trial, count, folder, first=first, most_seconds=most_seconds)


def _row(
    id: str,
    name: str,
    mode: str,
    where: str,
    *args: object,
    n: tuple[int, int],
    slow: bool = False,
) -> Row:
    module, function = where.split(".")
    return Row(
        id=id,
        name=name,
        mode=mode,
        module=module,
        trial=lambda found: partial(getattr(found, function), *args),
        tests=n[0],
        release=n[1],
        slow=slow,
    )


_KILL = "kill -9 while recording"
_FLIP = "a flipped bit in a record"
_FORGED = "forged records, without a file"
_PAGE = "a flipped bit in LMDB's pages"
ROWS = [
    _row("R1", _KILL, "float32", "fault_kills.killed_recording", "float32", MANY, n=(5, 1000)),
    _row(
        *("R1", _KILL, "int8+zstd", "fault_kills.killed_recording", "int8+zstd", MANY),
        n=(5, 1000),
        slow=True,
    ),
    _row(
        *("R1", _KILL, "rounds in several transactions", "fault_kills.killed_recording"),
        *("float32", 10_000),
        n=(5, 1000),
    ),
    *(
        _row(
            *("R1", _KILL, f"{codec}, background writer"),
            *("fault_federations.killed_background_writer", codec),
            n=(2, 1000),
            slow=codec == "float32",
        )
        for codec in ("float32", "int8+zstd")
    ),
    *(
        _row("R2", "kill -9 before a line of", name, "fault_kills.killed_operation", name, n=n)
        for name, n in {
            "begin": (4, 120),
            "round in one transaction": (4, 120),
            "round in several": (4, 120),
            "round after a torn one": (4, 120),
            "compact": (4, 120),
            "repair": (4, 120),
        }.items()
    ),
    _row(
        "R3",
        "recording killed and resumed",
        "digits",
        "fault_federations.killed_run",
        "record",
        n=(2, 100),
    ),
    _row(
        "R4",
        "recovery killed and resumed",
        "digits",
        "fault_federations.killed_run",
        "recover",
        n=(3, 100),
        slow=True,
    ),
    _row("R5", "power cut", "ext4", "fault_disks.power_cut", n=(2, 100)),
    _row("R6", "full disk", "tmpfs", "fault_disks.full_disk", "tmpfs", n=(2, 100)),
    _row("R6", "full disk", "ext4", "fault_disks.full_disk", "ext4", n=(2, 60)),
    _row("R6", "full disk", "limit on file sizes", "fault_disks.limited_file", n=(4, 100)),
    _row("R6", "device that fails (EIO)", "ext4", "fault_disks.failing_disk", n=(1, 40)),
    _row("R7", _FLIP, "float32", "fault_damage.flipped_record", "float32", n=(20, 4000)),
    _row(
        *("R7", _FLIP, "int8+zstd", "fault_damage.flipped_record", "int8+zstd"),
        n=(20, 3000),
        slow=True,
    ),
    _row("R7", _PAGE, "float32", "fault_damage.flipped_structure", "float32", n=(30, 3000)),
    _row("R8", "a file that is cut", "float32", "fault_damage.truncated", "float32", n=(20, 500)),
    _row("R9", "records swapped", "float32", "fault_damage.swapped", n=(5, 100)),
    _row(
        "R13",
        "clients that misbehave",
        "random schedules",
        "fault_federations.schedule",
        n=(6, 500),
    ),
    _row("R14", "a round without an update", "random", "fault_federations.all_dropped", n=(2, 20)),
    _row("R15", "8 readers", "500 rounds", "fault_load.many_readers", 8, 500, n=(0, 10)),
    _row("R15", "8 readers", "40 rounds", "fault_load.many_readers", 8, 40, n=(1, 0), slow=True),
    _row("R17", "readers killed", "float32", "fault_kills.killed_readers", 200, 1000, n=(0, 1)),
    _row("R17", "readers killed", "shortened", "fault_kills.killed_readers", 20, 50, n=(1, 0)),
    _row("S2", "forged records", "float32", "fault_damage.forged", "float32", n=(30, 800)),
    _row(
        *("S2", "forged records", "int8+zstd", "fault_damage.forged", "int8+zstd"),
        n=(20, 700),
        slow=True,
    ),
    _row("S2", _FORGED, "10,000 at a time", "fault_parsers.parsed", 10_000, n=(0, 1000)),
    _row("S2", _FORGED, "shortened", "fault_parsers.parsed", 2_000, n=(1, 0)),
    _row(
        *("P2", "memory while recording", "float32", "fault_load.flat_memory"),
        *("float32", 100, 1000),
        n=(0, 1),
    ),
    _row(
        *("P2", "memory while recording", "int8+zstd", "fault_load.flat_memory"),
        *("int8+zstd", 100, 1000),
        n=(0, 1),
    ),
    _row("P2", "a round of 600 MB", "float32", "fault_load.large_round", 600, n=(0, 1)),
]


def main() -> None:
    """Do some rows, each as often as the tests do, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help="ids, or beginnings of `id: name, mode`; all")
    parser.add_argument("--torch", action="store_true", help="those that need torch, no others")
    parser.add_argument("--count", type=int, help="trials of each, instead of the tests' number")
    parser.add_argument("--first", type=int, default=0, help="seed of the first trial")
    args = parser.parse_args()
    found, skipped = {}, []
    for row in ROWS:
        if row.needs_torch != args.torch or not row.is_one_of(args.rows):
            continue
        if row.needs_mounts and not can_mount():
            skipped.append(row.key)
            continue
        count = row.tests if args.count is None else args.count
        with tempfile.TemporaryDirectory() as folder:
            found[row.key] = dataclasses.asdict(row.run(count, Path(folder), first=args.first))
    result = {"rows": found, "skipped": skipped, "torch": "torch" in sys.modules}
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
