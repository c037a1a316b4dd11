"""The functions of the subcommands."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fedrec.cli.detect import compare_run
from fedrec.cli.listing import ls, show
from fedrec.cli.plot import plot_command
from fedrec.cli.sweep import sweep_command
from fedrec.data import FederatedDataModule
from fedrec.exceptions import ConfigurationError, FedrecError, MethodsFailedError, RecipeError
from fedrec.loop.footprint import num_bytes_text
from fedrec.recipe import Recipe, load_recipe, run
from fedrec.recipe.folder import RunFolder, existing
from fedrec.recipe.model_fit import check_fit
from fedrec.recipe.planning import forecast_history, recoveries_there
from fedrec.recipe.recovered import lines_to_load
from fedrec.recipe.results import collect_results
from fedrec.recipe.runner import is_recorded
from fedrec.recipe.schema import build_parts
from fedrec.report import print_results, write_comparison, write_report
from fedrec.report.table import print_line

__all__ = ["COMMANDS", "Command"]

# `validate` lists the ids of so many clients at most, and of more only the first and last ones.
_MOST_NAMED = 20

#: Takes the parsed arguments; returns an exit code, or `None` for 0.
Command = Callable[[argparse.Namespace], int | None]


def _on_recipe(*steps: str) -> Command:
    """Return a command that does these steps of a recipe, in the recipe's run folder."""

    def command(args: argparse.Namespace) -> None:
        recipe = load_recipe(args.target, args.overrides, args.allow)
        folder = Path(args.output_dir) / recipe.name
        _run(args, recipe, folder, steps, overwrite=args.overwrite)

    return command


def _on_folder(*steps: str) -> Command:
    """Return a command that does these steps of the recipe in an existing run folder."""

    def command(args: argparse.Namespace) -> None:
        path = existing(args.target)
        recipe = load_recipe(path.recipe_file, args.overrides, args.allow)
        _run(args, recipe, path.path, steps)

    return command


def _run(
    args: argparse.Namespace,
    recipe: Recipe,
    folder: Path,
    steps: Sequence[str],
    *,
    overwrite: bool = False,
) -> None:
    """Run a recipe and show its results, also if some of the methods failed."""
    progress = not args.no_progress
    try:
        results = run(recipe, folder=folder, overwrite=overwrite, steps=steps, progress=progress)
    except MethodsFailedError as error:
        _show(folder, error.results)
        raise
    _show(folder, results)
    for line in lines_to_load(recipe, folder) if "recover" in steps else ():
        print_line(Console(), line)


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
        for label, reason in results["failures"].items():
            print_line(console, f"{label} failed: {reason}")
    if len(folders) == 1:
        path = write_report(folders[0].path, args.output)
    else:
        path = write_comparison([f.path for f in folders], args.output or "report.html")
    print_line(console, str(path))


def _validate(args: argparse.Namespace) -> None:
    recipe: Recipe = load_recipe(args.target, args.overrides, args.allow)
    parts = build_parts(recipe)
    data, lines = parts.data, [f"{recipe.path} has no mistakes.", *parts.remarks]
    try:
        data.test_dataset  # noqa: B018 - a property that loads
    except Exception as error:  # noqa: BLE001 - the data may be on another machine
        lines.append(
            f"Its data are not here, so neither their split nor the model was checked: {error}"
        )
    else:
        _split(data)
        check_fit(recipe, data)
    history = forecast_history(recipe)
    if history is not None:
        assumed = ", if updates compress as expected" if history.assumed else ""
        size = num_bytes_text(history.num_bytes)
        lines.append(f"Its history will take about {size} of disk{assumed}.")
    lines.append(_plan(recipe, RunFolder(Path(args.output_dir) / recipe.name)))
    ids = data.client_ids
    named = ", ".join(ids) if len(ids) <= _MOST_NAMED else f"{ids[0]}, {ids[1]}, ..., {ids[-1]}"
    lines.append(f"Its clients are {named}.")
    console = Console()
    for line in lines:
        print_line(console, line)


def _split(data: FederatedDataModule) -> None:
    """Split the data over the clients, to find out whether that can be done."""
    try:
        sets = data.client_datasets()
    except (FedrecError, ValueError) as error:
        raise RecipeError(f"data: {error}") from error
    empty = [client for client, samples in sets.items() if not len(samples)]
    if empty:
        hint = "use fewer clients or another partition."
        raise RecipeError(f"data: Clients {empty[:10]} have no data. HINT: {hint}")


def _plan(recipe: Recipe, folder: RunFolder) -> str:
    """Return a sentence on what a run consists of, and which of its parts are done."""
    recoveries = len(recipe.config.get("recoverers") or [])
    text = (
        f"It makes a recording and {recoveries} {'recovery' if recoveries == 1 else 'recoveries'}"
    )
    if not folder.recipe_file.exists() or not is_recorded(recipe, folder.path):
        return f"{text}."
    there = sum(recoveries_there(recipe, [folder]))
    return f"{text}; the recording and {there} of these are in {folder.path} already."


def _show(folder: Path, results: dict[str, Any]) -> None:
    console = Console()
    print_results(results, console)
    for name in ("results.json", "report.html"):
        if (folder / name).exists():
            print_line(console, f"{folder / name}")


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
