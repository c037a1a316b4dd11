"""The paper's main grid at the paper's scale: MNIST and Fashion-MNIST, 3 rules, 2 attacks.

    OMP_NUM_THREADS=1 FEDREC_DATA=data python benchmarks/paper_grid.py --work runs/paper_grid

100 clients, 2,000 rounds, the CNN with 139,960 parameters (`recipes/paper/`). A cell is a data
set, a rule and an attack; its recording is shared by all of its methods. Three more cells have 40
malicious clients, or a degree of non-iid of 0.9, the latter also with corrections twice as often.
The cell of the trimmed mean and the trim attack on MNIST also has FedRecover without each of its
strategies. `--cells` takes names of cells or of the sets `mnist`, `fashion-mnist`, `malicious-40`,
`q-0.9` and `strategies`, `--methods` names of methods, and both are done in the order given.

A cell is a `fedrec sweep` in the folder `--work`, so the same call goes on after an interruption,
in the middle of a recording or a recovery, too. A recording takes 22 GB and about an hour of one
core, and is deleted when the cell is done; all methods of a cell take about another two. Rows in
the CSV file are kept and not computed again; what is missing is listed at the end. `--table`
collects what is done and prints the table, also while another process computes.

TER, ASR and ACP are fractions. `ter_late` is the mean of the last five evaluations, 100 rounds
apart and on 2,000 test images: where the learning rate is at the edge, the TER of one round is
luck. `distance` is that to the weights of training from scratch, divided by their norm; `fixes`
the updates that a client was asked for because its estimate was abnormal or could not be made.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedrec.cli.quiet import quiet
from fedrec.recipe import sweep
from fedrec.recipe.schema import folder_name

RECIPES = Path(__file__).resolve().parents[1] / "recipes" / "paper"
DATA = {"MNIST": "main_grid.yaml", "Fashion-MNIST": "main_grid_fashion_mnist.yaml"}
RULES = ("TrimmedMean", "Median", "FedAvg")
ATTACKS = {"trim": "TrimAttack", "backdoor": "BackdoorAttack"}
ONE_CORE = ("loop.accelerator=cpu", "loop.num_threads=1")


def fed_recover(label: str, **arguments: Any) -> dict[str, Any]:
    """Return FedRecover by this label, as a recipe has it."""
    return {"class_path": "FedRecover", "label": label, "init_args": arguments}


# The cheap ones first: training from scratch takes as long as all others together.
METHODS: tuple[dict[str, Any], ...] = (
    fed_recover("average", estimator="average"),
    fed_recover("anchored", estimator="anchored"),
    fed_recover("paired", estimator="paired"),
    {"class_path": "TrainFromScratch", "label": "scratch"},
    {"class_path": "HistoricalOnly", "label": "history only"},
    fed_recover("without estimates", estimator="none"),
)
WITHOUT = {
    "periodic correction": {"correction_period": None},
    "abnormality fixing": {"tolerance_rate": None},
    "final tuning": {"final_rounds": 0},
}
STRATEGIES = tuple(
    fed_recover(f"{estimator} w/o {strategy}", estimator=estimator, **arguments)
    for estimator in ("average", "anchored", "paired")
    for strategy, arguments in WITHOUT.items()
)
OFTEN = tuple(
    fed_recover(f"{estimator}, T_c = 5", estimator=estimator, correction_period=5)
    for estimator in ("average", "anchored")
)


@dataclass(frozen=True)
class Cell:
    """A recording, and the methods that start from it."""

    name: str
    data: str
    overrides: tuple[str, ...]
    methods: tuple[dict[str, Any], ...] = METHODS

    def labels(self) -> list[str]:
        """Return the names of its rows."""
        return ["Poisoned", *(method["label"] for method in self.methods)]

    def sweep_name(self, seed: int) -> str:
        """Return the name of its folder."""
        return f"{self.name} {seed}".replace(",", "").replace("%", " percent").replace(" ", "_")


def _cells() -> dict[str, list[Cell]]:
    """Return the cells by set."""

    def cell(data: str, rule: str, attack: str, more: str = "", *overrides: str) -> Cell:
        where = (f"aggregator={rule}", f"attack={ATTACKS[attack]}", *overrides)
        return Cell(f"{data}, {rule}, {attack}{more}", data, (*where, *ONE_CORE))

    sets = {
        data.lower(): [cell(data, rule, attack) for rule in RULES for attack in ATTACKS]
        for data in DATA
    }
    first = sets["mnist"][0]
    sets["strategies"] = [Cell(first.name, first.data, first.overrides, METHODS + STRATEGIES)]
    sets["mnist"][0] = sets["strategies"][0]
    many = "federation.malicious=40"
    sets["malicious-40"] = [
        cell("MNIST", "TrimmedMean", attack, ", 40% malicious", many) for attack in ATTACKS
    ]
    q = "data.init_args.partitioner.init_args.q=0.9"
    unlike = cell("MNIST", "TrimmedMean", "trim", ", q = 0.9", q)
    sets["q-0.9"] = [replace(unlike, methods=METHODS + OFTEN)]
    return sets


def only(cell: Cell, methods: list[str]) -> Cell:
    """Return the cell with these of its methods, in this order."""
    found = {method["label"]: method for method in cell.methods}
    return replace(cell, methods=tuple(found[m] for m in methods if m in found))


SETS = _cells()
CELLS = {cell.name: cell for cells in SETS.values() for cell in cells}
FIGURES = ("ter", "ter_late", "asr", "acp", "fixes", "fallbacks", "distance")
COLUMNS = ("cell", "seed", "method", *FIGURES, "seconds", "history_bytes", "commit")
Key = tuple[str, str, str]
Rows = dict[Key, dict[str, Any]]


def read(path: Path) -> Rows:
    """Return the rows of the file by cell, seed and method."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {(r["cell"], r["seed"], r["method"]): r for r in csv.DictReader(file)}


def write(path: Path, rows: Rows) -> None:
    """Replace the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows.values())
    temporary.replace(path)


def late(folder: Path, method: str) -> float | None:
    """Return the mean of the last five evaluations during a recovery or the recording."""
    part = "record" if method == "Poisoned" else f"recover/{folder_name(method)}"
    with (folder / part / "metrics.csv").open(newline="") as file:
        points = [float(row["ter"]) for row in csv.DictReader(file) if row.get("ter")]
    return statistics.fmean(points[-5:]) if points else None


def collect(cells: Iterable[Cell], seeds: Iterable[int], work: Path, rows: Rows) -> None:
    """Add what the sweeps have computed, and the distances of what is known already."""
    commit = subprocess.run(
        ("git", "describe", "--always", "--dirty"), capture_output=True, text=True, check=True
    ).stdout.strip()
    for seed in seeds:
        for cell in cells:
            table = work / cell.sweep_name(seed) / "results.csv"
            if not table.exists():
                continue
            with table.open(newline="") as file:
                found = [row for row in csv.DictReader(file) if not row["failure"]]
            # A later point has the methods of the earlier ones, and perhaps training from scratch.
            for row in found:
                key = (cell.name, str(seed), row["method"])
                old = rows.get(key, {})
                own = [float(row[f"exact_{reason}"] or 0) for reason in ("abnormality", "fallback")]
                asked = row["acp"] != ""
                new = {
                    **{figure: row[figure] for figure in ("ter", "asr", "acp")},
                    "ter_late": late(table.parent / row["folder"], row["method"]),
                    "fixes": sum(own) if asked else None,
                    "fallbacks": own[1] if asked else None,
                    "distance": row["relative_distance"],
                    **{figure: row[figure] for figure in ("seconds", "history_bytes")},
                }
                rows[key] = dict(zip(COLUMNS, key, strict=False)) | {
                    "commit": old.get("commit", commit),
                    **{name: _rounded(value) for name, value in new.items()},
                }


def _rounded(value: Any) -> Any:
    return value if value in ("", None) else round(float(value), 5)


def missing(cell: Cell, seed: int, rows: Rows) -> list[str]:
    """Return the names of a cell's rows that are not there."""
    return [label for label in cell.labels() if (cell.name, str(seed), label) not in rows]


def compute(cell: Cell, seed: int, work: Path) -> None:
    """Go on with the sweep of a cell: one method after the other, each beside the earlier ones."""
    sweep(
        RECIPES / DATA[cell.data],
        {"recoverers": [list(cell.methods[: i + 1]) for i in range(len(cell.methods))]},
        overrides=[*cell.overrides, f"seed={seed}", f"name={cell.sweep_name(seed)}"],
        output_dir=work,
        recordings=work / "recordings",
        delete_histories=True,
        progress=False,
    )


def summary(rows: Rows) -> str:
    """Return a Markdown table: mean TER over seeds and ASR, ACP and fixes; a line per cell."""
    labels = list(dict.fromkeys(label for cell in CELLS.values() for label in cell.labels()))
    lines = [["", *labels], ["---"] * (1 + len(labels))]

    def mean(found: list[dict[str, Any]], figure: str, scale: float = 100) -> str | None:
        values = [scale * float(row[figure]) for row in found if row[figure] not in ("", None)]
        if not values:
            return None
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.1f}{spread}"

    for name in CELLS:
        line = [name]
        for label in labels:
            found = [r for (cell, _, method), r in rows.items() if (cell, method) == (name, label)]
            errors = " / ".join(filter(None, (mean(found, "ter"), mean(found, "asr"))))
            cost = mean(found, "acp")
            if cost is not None:
                errors += f"; {cost} ({mean(found, 'fixes', 1)})"
            if label not in CELLS[name].labels():
                errors = " "
            line.append(errors or "missing")
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Do what is missing, and say what still is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--cells", nargs="+", choices=[*SETS, *CELLS], default=list(SETS), metavar="CELL"
    )
    parser.add_argument(
        "--methods", nargs="+", choices=[m["label"] for m in METHODS + STRATEGIES], metavar="METHOD"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/paper_grid"))
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/paper_grid.csv"))
    parser.add_argument("--table", action="store_true", help="collect and print what is done")
    arguments = parser.parse_args()
    cells = {c.name: c for name in arguments.cells for c in SETS.get(name) or [CELLS[name]]}
    rows = read(arguments.csv)
    chosen = [only(c, arguments.methods) if arguments.methods else c for c in cells.values()]
    for seed in arguments.seeds if not arguments.table else []:
        for cell in chosen:
            if not missing(cell, seed, rows):
                continue
            try:
                compute(cell, seed, arguments.work)
            finally:
                rows = read(arguments.csv)
                collect([cell], [seed], arguments.work, rows)
                write(arguments.csv, rows)
    collect(cells.values(), arguments.seeds, arguments.work, rows)
    if rows:
        write(arguments.csv, rows)
    print(summary(rows))
    for cell in cells.values():
        for seed in arguments.seeds:
            if labels := missing(cell, seed, rows):
                print(f"missing: {cell.name}, seed {seed}: {', '.join(labels)}")


if __name__ == "__main__":
    with quiet():
        main()
