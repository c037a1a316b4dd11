"""The functions of the subcommands."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fedrec.cli.detect import compare_run
from fedrec.cli.listing import ls, show
from fedrec.cli.output import write_json
from fedrec.cli.parser import Options
from fedrec.cli.plot import plot_command
from fedrec.cli.schema import schema_command
from fedrec.cli.sweep import sweep_command
from fedrec.data import FederatedDataModule
from fedrec.exceptions import FedrecError, MethodsFailedError, RecipeError
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

_log = logging.getLogger(__name__)

# `validate` lists the ids of so many clients at most, and of more only the first and last ones.
_MOST_NAMED = 20

#: Takes the parsed arguments; returns an exit code, or `None` for 0.
Command = Callable[[Options], int | None]


def _on_recipe(*steps: str) -> Command:
    """Return a command that does these steps of a recipe, in the recipe's run folder."""

    def command(args: Options) -> None:
        recipe = load_recipe(args.target, args.overrides, args.allow)
        if str(recipe.path) != args.target:
            _log.info("Recipe %s.", recipe.path)
        folder = Path(args.output_dir) / recipe.name
        _run(args, recipe, folder, steps, overwrite=args.overwrite)

    return command


def _on_folder(*steps: str) -> Command:
    """Return a command that does these steps of the recipe in an existing run folder."""

    def command(args: Options) -> None:
        path = existing(args.target)
        recipe = load_recipe(path.recipe_file, args.overrides, args.allow)
        _run(args, recipe, path.path, steps)

    return command


def _run(
    args: Options,
    recipe: Recipe,
    folder: Path,
    steps: Sequence[str],
    *,
    overwrite: bool = False,
) -> None:
    """Run a recipe and show its results, also if some of the methods failed."""
    progress = not (args.no_progress or args.quiet)
    try:
        results = run(recipe, folder=folder, overwrite=overwrite, steps=steps, progress=progress)
    except MethodsFailedError as error:
        _show(folder, error.results, args)
        raise
    _show(folder, results, args)
    if not args.json and "recover" in steps:
        for line in lines_to_load(recipe, folder):
            print_line(Console(), line)


def _detect(args: Options) -> None:
    if args.detector:
        compare_run(args)
    else:
        _on_folder("detect")(args)


def _report(args: Options) -> None:
    folders = [existing(target) for target in args.target]
    runs = [collect_results(folder) for folder in folders]
    for folder, results in zip(folders, runs, strict=True):
        for text in results["warnings"]:
            _log.warning("%s", text)
        folder.write("results.json", results)
    if len(folders) == 1:
        path = write_report(folders[0].path, args.output)
    else:
        path = write_comparison([f.path for f in folders], args.output or "report.html")
    if args.json:
        write_json({"page": str(path), "runs": runs})
        return
    console = Console()
    for results in runs:
        print_results(results, console)
        for label, reason in results["failures"].items():
            print_line(console, f"{label} failed: {reason}")
    print_line(console, str(path))


def _validate(args: Options) -> None:
    recipe: Recipe = load_recipe(args.target, args.overrides, args.allow)
    parts = build_parts(recipe)
    data, remarks = parts.data, list(parts.remarks)
    try:
        data.test_dataset  # noqa: B018 - a property that loads
    except Exception as error:  # noqa: BLE001 - the data may be on another machine
        remarks.append(
            f"Its data are not here, so neither their split nor the model was checked: {error}"
        )
    else:
        _split(data)
        check_fit(recipe, data)
    history, ids = forecast_history(recipe), list(data.client_ids)
    folder = RunFolder(Path(args.output_dir) / recipe.name)
    recorded = folder.recipe_file.exists() and is_recorded(recipe, folder.path)
    plan = {
        "recipe": str(recipe.path),
        "remarks": remarks,
        "history_bytes": None if history is None else history.num_bytes,
        "folder": str(folder.path),
        "recorded": recorded,
        "recoveries": len(recipe.config.get("recoverers") or []),
        "recoveries_there": sum(recoveries_there(recipe, [folder])) if recorded else 0,
        "clients": ids,
    }
    if args.json:
        write_json(plan)
        return
    lines = [f"{recipe.path} has no mistakes.", *remarks]
    if history is not None:
        assumed = ", if updates compress as expected" if history.assumed else ""
        size = num_bytes_text(history.num_bytes)
        lines.append(f"Its history will take about {size} of disk{assumed}.")
    lines.append(_plan_text(plan))
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


def _plan_text(plan: Mapping[str, Any]) -> str:
    """Return a sentence on what a run consists of, and which of its parts are done."""
    noun = "recovery" if plan["recoveries"] == 1 else "recoveries"
    text = f"It makes a recording and {plan['recoveries']} {noun}"
    if not plan["recorded"]:
        return f"{text}."
    there = plan["recoveries_there"]
    return f"{text}; the recording and {there} of these are in {plan['folder']} already."


def _show(folder: Path, results: dict[str, Any], args: Options) -> None:
    if args.json:
        write_json(results)
        return
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
    "schema": schema_command,
}
