"""The recipes that come with fedrec, and finding a recipe by what a user calls it."""

from __future__ import annotations

import difflib
import functools
from pathlib import Path

import fedrec
from fedrec.exceptions import ConfigurationError

__all__ = ["SCHEMA", "about", "copy_recipe", "find_recipe", "shipped_folder", "shipped_recipes"]

#: The JSON Schema beside the recipes, which the first line of each names.
SCHEMA = "recipe.schema.json"

_SUFFIXES = (".yaml", ".yml")


@functools.cache
def shipped_folder() -> Path:
    """Return the folder of the recipes that come with fedrec.

    In a wheel they lie in the package; an editable install has them beside it, in the repository.
    """
    package = Path(fedrec.__file__).resolve().parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


@functools.cache
def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that come with fedrec, by name; those of folders come last.

    Examples:
        >>> list(shipped_recipes())[:2], "mnist/base" in shipped_recipes()
        (['client_leaves', 'quickstart'], True)
    """
    folder = shipped_folder()
    names = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")]
    return {name: folder / f"{name}.yaml" for name in sorted(names, key=lambda n: ("/" in n, n))}


def find_recipe(recipe: str | Path) -> Path:
    """Return the file of a recipe.

    A file comes first: the one at this path, then the one whose path lacks only `.yaml`. Otherwise
    text can be the name of a recipe that comes with fedrec. A `Path`, and text that begins with
    `./`, are files in any case.

    Args:
        recipe: A path, or a name such as `quickstart` or `mnist/base`.

    Raises:
        ConfigurationError: If there is no such recipe; names that are near are offered.

    Examples:
        >>> find_recipe("quickstart").name
        'quickstart.yaml'
        >>> find_recipe("quickstrat")
        Traceback (most recent call last):
        ...
        fedrec.exceptions.ConfigurationError: Expected `RECIPE` to be a YAML file or the name of...
    """
    path = Path(recipe)
    if path.is_file():
        return path
    if path.suffix not in _SUFFIXES:
        for suffix in _SUFFIXES:
            file = path.with_name(f"{path.name}{suffix}") if path.name else path
            if file.is_file():
                return file
    if isinstance(recipe, str) and recipe in shipped_recipes():
        return shipped_recipes()[recipe]
    raise ConfigurationError(_no_recipe(str(recipe), path))


def about(path: Path) -> str:
    """Return what a recipe says it is: the first sentence of its comment.

    Args:
        path: The recipe's file.

    Examples:
        >>> about(shipped_recipes()["quickstart"])
        "Quickstart: FedRecover on scikit-learn's digits, next to what it is compared with."
    """
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# yaml-language-server:"):
            continue
        text = line.removeprefix("#").strip()
        if not line.startswith("#") or not text:
            break
        lines.append(text)
    sentence, stop, _ = " ".join(lines).partition(". ")
    return sentence + stop.strip()


def copy_recipe(name: str, folder: str | Path = ".") -> list[Path]:
    """Copy a recipe that comes with fedrec, with all that it extends and the schema it names.

    Files keep their names below the folder (`mnist/base.yaml`), so that the copies extend each
    other as the originals do, and `fedrec run NAME` in that folder runs the copy.

    Args:
        name: The recipe's name, such as `mnist/base`.
        folder: Where to copy to; made if it is missing.

    Returns:
        The files that were written, the recipe itself first.

    Raises:
        ConfigurationError: If there is no such recipe, or another file is in the way; then nothing
            is written.
    """
    root, target = shipped_folder(), Path(folder)
    if name not in shipped_recipes():
        raise ConfigurationError(_no_recipe(name, None))
    if target.exists() and not target.is_dir():
        raise ConfigurationError(f"Expected `FOLDER` to be a folder, but `{target}` is a file.")
    copies = {}
    for source in [*_with_bases(shipped_recipes()[name]), root / SCHEMA]:
        copy, content = target / source.relative_to(root), source.read_bytes()
        if copy.exists() and not (copy.is_file() and copy.read_bytes() == content):
            raise ConfigurationError(
                f"Expected to write `{copy}`, but another file of this name is there. HINT: copy "
                f"into another folder: `fedrec cp {name} FOLDER`."
            )
        if not copy.exists():
            copies[copy] = content
    for copy, content in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    return list(copies)


def _with_bases(file: Path) -> list[Path]:
    """Return a recipe's file and those of all recipes that it extends."""
    import yaml

    bases = yaml.safe_load(file.read_text(encoding="utf-8")).get("extends") or []
    found = {file: None}
    for base in [bases] if isinstance(bases, str) else bases:
        found.update(dict.fromkeys(_with_bases((file.parent / base).resolve())))
    return list(found)


def _no_recipe(recipe: str, path: Path | None) -> str:
    """Return the error for a recipe that is not there; without `path`, only names are offered."""
    names = shipped_recipes()
    hint = "`fedrec ls recipes` lists those that come with fedrec."
    requirement, also = "the name of a recipe that comes with fedrec", ""
    files: list[str] = []
    if path is not None:
        requirement = "a YAML file or the name of a recipe that comes with fedrec"
        where = path if path.is_dir() else path.parent
        files = sorted(str(file) for file in where.glob("[!.]*.y*ml")) if where.is_dir() else []
        if path.is_dir():
            also = ", a folder"
            if (path / "recipe.yaml").is_file():
                hint = f"`{path / 'recipe.yaml'}` is the recipe of this run."
            elif files:
                hint = f"it holds {', '.join(files[:5])}{', ...' if len(files) > 5 else ''}."
    stem = recipe.removesuffix(".yaml").removesuffix(".yml")
    within = [name for name in names if name.startswith(f"{stem}/") or name.endswith(f"/{stem}")]
    near = [stem] if stem in names else within
    if not near and not also:
        near = difflib.get_close_matches(recipe, files, n=1)
    near = (near or difflib.get_close_matches(stem, names, n=2))[:3]
    offered = f" Did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else ""
    return f"Expected `RECIPE` to be {requirement}, but got {recipe!r}{also}.{offered} HINT: {hint}"
