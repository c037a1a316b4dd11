"""What each subcommand does."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from fedrec.cli.detect import compare_run
from fedrec.cli.listing import ls, show
from fedrec.cli.plot import plot_command
from fedrec.cli.sweep import sweep_command
from fedrec.exceptions import ConfigurationError
from fedrec.history import Forecast, LMDBHistory, forecast
from fedrec.memory import num_bytes_text
from fedrec.parameters import ParameterVector
from fedrec.recipe import Recipe, load_recipe, run
from fedrec.recipe.folder import existing
from fedrec.recipe.results import collect_results
from fedrec.recipe.schema import build_parts
from fedrec.report import print_results, write_comparison, write_report

__all__ = ["COMMANDS", "Command"]

# Of a federation with more clients, `validate` shows how their ids look.
_MOST_NAMED = 20

# An exit code, or nothing for 0.
Command = Callable[[argparse.Namespace], int | None]


def _on_recipe(*steps: str) -> Command:
    def command(args: argparse.Namespace) -> None:
        recipe = load_recipe(args.target, args.overrides, args.allow)
        folder = Path(args.output_dir) / recipe.name
        results = run(
            recipe,
            folder=folder,
            overwrite=args.overwrite,
            steps=steps,
            progress=not args.no_progress,
        )
        _show(folder, results)

    return command


def _on_folder(*steps: str) -> Command:
    def command(args: argparse.Namespace) -> None:
        path = existing(args.target)
        recipe = load_recipe(path.recipe_file, args.overrides, args.allow)
        results = run(recipe, folder=path.path, steps=steps, progress=not args.no_progress)
        _show(path.path, results)

    return command


def _detect(args: argparse.Namespace) -> None:
    if args.detector:
        compare_run(args)
    elif args.json:
        raise ConfigurationError("Expected `--detector` beside `--json`, but there is none.")
    else:
        _on_folder("detect")(args)


def _report(args: argparse.Namespace) -> None:
    folders, console = [existing(target) for target in args.target], Console()
    for folder in folders:
        results = collect_results(folder)
        folder.write("results.json", results)
        print_results(results, console)
    if len(folders) == 1:
        path = write_report(folders[0].path, args.output)
    else:
        path = write_comparison([f.path for f in folders], args.output or "report.html")
    console.print(str(path), markup=False, highlight=False, soft_wrap=True)


def _validate(args: argparse.Namespace) -> None:
    recipe: Recipe = load_recipe(args.target, args.overrides, args.allow)
    console = Console()
    console.print(f"{recipe.path} has no mistakes.", markup=False, highlight=False)
    told = _forecast(recipe)
    if told is not None:
        assumed = ", if updates compress as expected" if told.assumed else ""
        console.print(
            f"Its history will take about {num_bytes_text(told.num_bytes)} of disk{assumed}.",
            markup=False,
            highlight=False,
        )
    ids = build_parts(recipe).data.client_ids
    named = ", ".join(ids) if len(ids) <= _MOST_NAMED else f"{ids[0]}, {ids[1]}, ..., {ids[-1]}"
    console.print(f"Its clients are {named}.", markup=False, highlight=False, soft_wrap=True)


def _forecast(recipe: Recipe) -> Forecast | None:
    """Tell how much room the history will take on disk, if it is kept there."""
    parts = build_parts(recipe)
    store, given = parts.history
    if not issubclass(store, LMDBHistory):
        return None
    ids, sampler = parts.data.client_ids, parts.record.get("sampler")
    return forecast(
        num_clients=len(ids),
        num_parameters=ParameterVector(parts.model).num_parameters,
        max_rounds=parts.record["max_rounds"],
        codec=given.get("codec") or "float32",
        keep=given.get("keep"),
        clients_per_round=None if sampler is None else len(sampler.sample(ids, 0, 0)),
        encrypted=given.get("master_key") is not None,
    )


def _show(folder: Path, results: dict[str, Any]) -> None:
    console = Console()
    print_results(results, console)
    for name in ("results.json", "report.html"):
        if (folder / name).exists():
            console.print(f"{folder / name}", markup=False, highlight=False, soft_wrap=True)


COMMANDS: dict[str, Command] = {
    "run": _on_recipe("record", "detect", "recover"),
    "record": _on_recipe("record"),
    "detect": _detect,
    "recover": _on_folder("detect", "recover"),
    "report": _report,
    "validate": _validate,
    "sweep": sweep_command,
    "plot": plot_command,
    "ls": ls,
    "show": show,
}
