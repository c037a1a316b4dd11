"""`fedrec plot`: pictures of a sweep or a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from fedrec.cli.output import write_json
from fedrec.cli.parser import Options
from fedrec.exceptions import ConfigurationError, expected
from fedrec.recipe.folder import RunFolder
from fedrec.recipe.grid import split_values
from fedrec.recipe.results import collect_results
from fedrec.recipe.tables import POISONED, UNPOISONED, Row, figures_of, read_table
from fedrec.report.figures import draw_box, draw_cost, draw_cp, draw_values
from fedrec.report.looks import save_figure

__all__ = ["plot_command"]


def plot_command(args: Options) -> None:
    """Draw a picture and print its path."""
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
        requirement = "the folder of a sweep, its results.csv, or the folder of a run"
        raise ConfigurationError(expected("PATH", requirement, str(target), hint=hint))
    else:
        rows, keys = read_table(target)
        rows = [row for row in rows if not row["failure"]]
        by = _key(args.by, [*keys, "method"], "by")
        # All names of the sweep: with `--where`, too, each keeps its colour.
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
    if args.json:
        write_json({"file": str(path)})
    else:
        click.echo(path)


def _cp(folder: Path, results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the CP of every client in every recovery of a run: by method, then by client."""
    run = RunFolder(folder)
    by_method = {}
    for method in results["methods"]:
        stored = run.read(run.recovery_file(method["name"])) or {}
        by_method[method["name"]] = stored["result"].get("cp", {})
    return by_method


def _with_cp(rows: Sequence[Row], folder: Path) -> list[Row]:
    """Return the rows of recoveries, with the CP of all clients under `"cp"`."""
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
        values = split_values(text)
        known = list(dict.fromkeys(row[key] for row in rows))
        for value in values:
            if value not in known:
                raise ConfigurationError(
                    expected(key, "a value that was swept", value, known=known)
                )
        rows = [row for row in rows if row[key] in values]
    return rows


def _key(name: str, known: Sequence[str], option: str) -> str:
    """Return the column with a name; the end of a dotted name will do if only one column has it."""
    ends = [key for key in known if key == name or key.endswith(f".{name}")]
    if name in known:
        return name
    if len(ends) == 1:
        return ends[0]
    requirement = "a column of the results" if not ends else "the name of one column"
    raise ConfigurationError(expected(option, requirement, name, known=known))
