"""What each subcommand does."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from fedrec.recipe import Recipe, load_recipe, run
from fedrec.recipe.folder import existing
from fedrec.recipe.results import collect_results
from fedrec.report import print_results, write_report

__all__ = ["COMMANDS", "Command"]

Command = Callable[[argparse.Namespace], None]


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


def _report(args: argparse.Namespace) -> None:
    folder = existing(args.target)
    results = collect_results(folder)
    folder.write("results.json", results)
    write_report(folder.path)
    _show(folder.path, results)


def _validate(args: argparse.Namespace) -> None:
    recipe: Recipe = load_recipe(args.target, args.overrides, args.allow)
    Console().print(f"{recipe.path} has no mistakes.", markup=False, highlight=False)


def _show(folder: Path, results: dict[str, Any]) -> None:
    console = Console()
    print_results(results, console)
    for name in ("results.json", "report.html"):
        if (folder / name).exists():
            console.print(f"{folder / name}", markup=False, highlight=False, soft_wrap=True)


COMMANDS: dict[str, Command] = {
    "run": _on_recipe("record", "detect", "recover"),
    "record": _on_recipe("record"),
    "detect": _on_folder("detect"),
    "recover": _on_folder("detect", "recover"),
    "report": _report,
    "validate": _validate,
}
