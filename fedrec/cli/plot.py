"""`fedrec plot`: pictures of a sweep or a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrec.exceptions import ConfigurationError, expected
from fedrec.recipe.folder import RunFolder
from fedrec.recipe.grid import split_values
from fedrec.recipe.results import collect_results
from fedrec.recipe.tables import POISONED, UNPOISONED, Row, figures_of, read_table
from fedrec.report.figures import draw_box, draw_cost, draw_cp, draw_values
from fedrec.report.looks import save_figure

__all__ = ["plot_command"]


def plot_command(args: argparse.Namespace) -> None:
    """Draw a picture and say where it is."""
    target = Path(args.target)
    if (target / "recipe.yaml").is_file():
        if args.kind not in (None, "cp"):
            hint = "`fedrec report RUN` draws its curves."
            raise ConfigurationError(
                expected("kind", "`cp` for a single run", args.kind, hint=hint)
            )
        results = collect_results(RunFolder(target))
        figure: Any = draw_cp(_cp(target, results), synthetic=results["synthetic_data"])
        output = target / "cp.svg"
    elif not target.is_file() and not (target / "results.csv").is_file():
        hint = "`fedrec sweep` and `fedrec run` make one, with recoveries to draw."
        wanted = "the folder of a sweep, its results.csv, or the folder of a run"
        raise ConfigurationError(expected("PATH", wanted, str(target), hint=hint))
    else:
        rows, keys = read_table(target)
        rows = [row for row in rows if not row["failure"]]
        by = _key(args.by, [*keys, "method"], "by")
        # Those of the whole sweep, so that a figure of some has them in the same colours.
        names = {column: list(dict.fromkeys(r[column] for r in rows)) for column in (by, "method")}
        rows = _where(rows, [*keys, "seed", "method"], args.where)
        x = _key(args.x, [*keys, "method"], "x") if args.x else (keys[0] if keys else "method")
        kind = args.kind or "values"
        folder = target if target.is_dir() else target.parent
        output = folder / f"{kind}.svg"
        known = figures_of(rows)
        y = [_key(name, known, "y") for name in args.y.split(",")] if args.y else []
        if kind == "cost":
            if len(y) > 1:
                raise ConfigurationError(expected("y", "one column for `--kind cost`", args.y))
            figure = draw_cost(rows, keys, y=y[0] if y else "ter", by=by, names=names[by])
        elif kind == "cp":
            figure = draw_box(_with_cp(rows, folder), keys, x=x, names=names["method"])
        else:
            y = y or ["ter", "asr", "acp"]
            figure = draw_values(rows, keys, x=x, y=y, by=by, names=names[by])
    path = save_figure(figure, args.output or output)
    sys.stdout.write(f"{path}\n")


def _cp(folder: Path, results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return CP by client, by method, of a run and its results."""
    where = RunFolder(folder)
    found = {}
    for method in results["methods"]:
        stored = where.read(where.recovery_file(method["name"])) or {}
        found[method["name"]] = stored["result"].get("cp", {})
    return found


def _with_cp(rows: Sequence[Row], folder: Path) -> list[Row]:
    points: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if row["folder"] not in points:
            point = folder / row["folder"]
            points[row["folder"]] = _cp(point, collect_results(RunFolder(point)))
    return [
        {**row, "cp": list(points[row["folder"]].get(row["method"], {}).values())}
        for row in rows
        if row["method"] not in (POISONED, UNPOISONED)
    ]


def _where(rows: list[Row], keys: Sequence[str], conditions: Sequence[str]) -> list[Row]:
    """Return the rows that meet all conditions."""
    for condition in conditions:
        name, _, text = condition.partition("=")
        key = _key(name, keys, "where")
        wanted = split_values(text)
        known = list(dict.fromkeys(row[key] for row in rows))
        for value in wanted:
            if value not in known:
                raise ConfigurationError(
                    expected(key, "a value that was swept", value, known=known)
                )
        rows = [row for row in rows if row[key] in wanted]
    return rows


def _key(name: str, known: Sequence[str], option: str) -> str:
    """Return the column that a name, or the end of one, means."""
    ends = [key for key in known if key == name or key.endswith(f".{name}")]
    if name in known:
        return name
    if len(ends) == 1:
        return ends[0]
    wanted = "a column of the results" if not ends else "the name of one column"
    raise ConfigurationError(expected(option, wanted, name, known=known))
