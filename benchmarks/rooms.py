"""How large the house is, and how many rooms an update passes: files, lines, cycles, functions.

    python benchmarks/rooms.py

Cycles are those of imports between modules, once as they happen when a module is loaded and once
with what only type checkers read. Functions are those of fedrec with a name that run in a round,
writer and reader threads included, evaluation left out: of a recording to LMDB (digits, 20 clients,
trimmed mean under the trim attack), and of a recovery by FedRecover in which no client is asked.
`update` leaves out how clients train: what is passed from the executor's answer to the disk.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch
from timing import table

import fedrec
from fedrec import FederatedLoop, Federation
from fedrec.aggregators import TrimmedMean
from fedrec.attacks import TrimAttack
from fedrec.callbacks import Callback
from fedrec.data import Digits
from fedrec.history import LMDBHistory
from fedrec.models import MLP
from fedrec.recoverers import FedRecover

ROOT = Path(fedrec.__file__).parent
ROUNDS = range(31, 39)  # of 60, in which the recovery asks nobody


def modules() -> dict[str, Path]:
    """Return all modules by name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        name = ".".join(("fedrec", *path.relative_to(ROOT).with_suffix("").parts))
        found[name.removesuffix(".__init__")] = path
    return found


def imports_of(path: Path, known: Iterable[str], for_types: bool) -> set[str]:
    """Return the modules that a module imports when it is loaded."""
    found: set[str] = set()
    waiting: list[ast.stmt] = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedrec"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in known else str(node.module))
        elif isinstance(node, ast.If):
            types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            if for_types or not types:
                waiting += node.body + node.orelse
    return found


def cycles(for_types: bool) -> list[set[str]]:
    """Return groups of modules that import each other, by any way round."""
    known = modules()
    graph = {name: imports_of(path, known, for_types) - {name} for name, path in known.items()}

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = list(graph[start])
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += graph.get(name, ())
        return seen

    reach = {name: reached(name) for name in graph}
    groups = {frozenset(b for b in reach[a] if a in reach.get(b, ())) for a in graph}
    return [set(group) for group in groups if len(group) > 1]


class Passed(Callback):
    """Notes the named functions of fedrec that run in some rounds."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self.on = False

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """Note a call."""
        code = frame.f_code
        is_ours = code.co_filename.startswith(str(ROOT)) and not code.co_name.startswith("<")
        if self.on and event == "call" and is_ours:
            self.functions.add((code.co_filename, code.co_qualname))

    def on_round_start(self, loop: Any, ctx: Any) -> None:
        """Begin with the first of the rounds, stop behind the last."""
        self.on = ctx.round in ROUNDS


def passed() -> dict[str, set[tuple[str, str]]]:
    """Return the functions that a recorded and a recovered round pass."""
    torch.manual_seed(0)
    data, attack = Digits(num_clients=20), TrimAttack()
    federation = Federation.from_data(data, MLP(in_features=64), malicious=4, batch_size=6)
    notes = {"record": Passed(), "recover": Passed()}
    with TemporaryDirectory() as folder, LMDBHistory(Path(folder) / "history") as history:
        for verb, note in notes.items():
            sys.setprofile(note.profile)
            threading.setprofile(note.profile)
            loop = FederatedLoop(
                callbacks=note, logger=False, enable_progress_bar=False, eval_every=60
            )
            if verb == "record":
                loop.record(
                    federation,
                    TrimmedMean(trim=0.2),
                    history,
                    max_rounds=60,
                    server_lr=0.05,
                    attack=attack,
                )
            else:
                loop.recover(
                    federation,
                    history,
                    FedRecover(estimator="paired"),
                    exclude=federation.malicious,
                )
            sys.setprofile(None)
            threading.setprofile(None)
    return {verb: note.functions for verb, note in notes.items()}


def main() -> None:
    """Count, and print a table."""
    files = list(modules().values())
    rows: list[tuple[str, int]] = [
        ("modules", len(files)),
        ("modules at the root", sum(path.parent == ROOT for path in files)),
        ("most modules in one folder", max(len(list(p.glob("*.py"))) for p in ROOT.rglob("*"))),
        ("lines", sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)),
        ("import cycles when loaded", len(cycles(for_types=False))),
        ("import cycles, with types", len(cycles(for_types=True))),
    ]
    for verb, functions in passed().items():
        training = tuple(str(ROOT / room) for room in ("clients", "executors", "models"))
        update = {one for one in functions if not one[0].startswith(training)}
        for what, passed_by in (("a round", functions), ("an update", update)):
            rows.append((f"functions of {what}, {verb}", len(passed_by)))
            rows.append((f"files of {what}, {verb}", len({file for file, _ in passed_by})))
    table(rows, ("what", "number"))


if __name__ == "__main__":
    main()
