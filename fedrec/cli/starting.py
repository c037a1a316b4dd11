"""`fedrec new`, `fedrec cp` and `fedrec ls recipes`: files to begin with. Imports no torch."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import click

from fedrec.cli.output import definitions, write_json
from fedrec.cli.parser import Options
from fedrec.exceptions import ConfigurationError, expected
from fedrec.recipe.shipped import SCHEMA, about, copy_recipe, shipped_folder, shipped_recipes

__all__ = ["STARTING"]

_TEMPLATES = Path(__file__).parent / "templates"
# What stands for the project's name in the names and texts of a template's files.
_NAME = "my_project"


def _new(args: Options) -> None:
    """Make a project of a template, and say what to do with it."""
    folder = Path(args.target)
    template = "flower" if args.flower else "project"
    files = [str(path) for path in _make_project(folder, template)]
    if args.json:
        write_json({"folder": str(folder), "files": files})
        return
    for file in files:
        click.echo(file)
    name = folder.name
    run = f"fedrec run {name}.yaml"
    run += "\n  python start.py" if args.flower else f" --allow {name}"
    click.echo(f"\nNext:\n  cd {folder}\n  {run}\n  pytest")


def _make_project(folder: Path, template: str) -> list[Path]:
    """Copy a template's files, with the project's name in place of the template's.

    Args:
        folder: The folder to make; its name is that of the project and of its module.
        template: A folder in `templates`.

    Returns:
        The files that were made.

    Raises:
        ConfigurationError: If the name cannot be that of a module, or the folder is not empty.
    """
    name = folder.name
    if not name.isidentifier() or keyword.iskeyword(name):
        plain = re.sub(r"\W", "_", name)
        hint = f"`fedrec new {plain}`." if plain.isidentifier() else "begin with a letter."
        requirement = "a name that Python can import (letters, digits and _)"
        raise ConfigurationError(expected("NAME", requirement, name, hint=hint))
    spec = find_spec(name)
    if spec is not None and spec.origin is not None:  # a mere folder hides nothing
        hint = "choose another name: the project's module would hide that one, or be hidden by it."
        requirement = "a name that no installed module has"
        raise ConfigurationError(expected("NAME", requirement, name, hint=hint))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(
            expected("NAME", "a new folder, or an empty one", str(folder), hint="choose another.")
        )
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for source in sorted((_TEMPLATES / template).iterdir()):
        if source.is_file():
            made.append(folder / source.name.replace(_NAME, name))
            text = source.read_text(encoding="utf-8").replace(_NAME, name)
            made[-1].write_text(text, encoding="utf-8")
    made.append(folder / SCHEMA)
    made[-1].write_bytes((shipped_folder() / SCHEMA).read_bytes())
    return made


def _cp(args: Options) -> None:
    """Copy a recipe, and say which files were written."""
    files = [str(path) for path in copy_recipe(args.target, args.folder)]
    if args.json:
        write_json({"recipe": str(Path(args.folder, f"{args.target}.yaml")), "files": files})
    else:
        click.echo("\n".join(files) or "All of its files are there already.")


def _ls_recipes(args: Options) -> None:
    """List the recipes that come with fedrec."""
    recipes = [
        {"name": name, "about": about(path), "path": str(path)}
        for name, path in shipped_recipes().items()
    ]
    if args.json:
        write_json(recipes)
        return
    click.echo(definitions({recipe["name"]: recipe["about"] for recipe in recipes}))


#: The functions of these commands; `ls` is that of `ls recipes` alone.
STARTING: dict[str, Callable[[Options], None]] = {"new": _new, "cp": _cp, "ls": _ls_recipes}
