"""`fedrec ls` and `fedrec show`: the components that a recipe can name, and their docstrings."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Iterable
from typing import Any

import click

from fedrec.cli.families import FAMILIES
from fedrec.cli.output import definitions, wrapped, write_json
from fedrec.cli.parser import Options
from fedrec.exceptions import ConfigurationError, expected
from fedrec.recipe.classes import ClassFinder

__all__ = ["argument_texts", "describe", "find", "ls", "sections", "show"]

_HEADING = re.compile(r"^(Args|Attributes|Shape|Raises|Returns|References|Examples):$")


def ls(args: Options) -> None:
    """List the components of a family, or of all families."""
    families = find(args.allow)
    if args.target is not None:
        if args.target not in FAMILIES:
            raise ConfigurationError(
                expected(
                    "FAMILY",
                    "a family of components, or `recipes`",
                    args.target,
                    known=[*FAMILIES, "recipes"],
                )
            )
        families = {args.target: families[args.target]}
    described = [describe(cls, family) for family, group in families.items() for cls in group]
    if args.json:
        keys = ("name", "family", "class_path", "summary", "references")
        write_json([{key: entry[key] for key in keys} for entry in described])
        return
    for family in families:
        click.echo(f"{family}\n")
        listed = {}
        for entry in described:
            if entry["family"] == family:
                papers = "; ".join(short_reference(text) for text in entry["references"])
                listed[entry["name"]] = _plain(entry["summary"]) + (papers and f" ({papers})")
        click.echo(
            textwrap.indent(definitions(listed, shutil.get_terminal_size().columns - 2), "  ")
        )
        click.echo()


def show(args: Options) -> None:
    """Show the components with a name: their arguments, docstring and section of a recipe."""
    known: dict[str, list[tuple[type, str]]] = {}
    for family, group in find(args.allow).items():
        for cls in group:
            known.setdefault(cls.__name__, []).append((cls, family))
    if args.target not in known:
        hint = "`fedrec ls` lists them; `--allow my_package` adds those of a module of yours."
        raise ConfigurationError(
            expected("NAME", "a component", args.target, known=sorted(known), hint=hint)
        )
    described = [describe(cls, family) for cls, family in known[args.target]]
    if args.json:
        write_json(described[0] if len(described) == 1 else described)
        return
    for entry in described:
        click.echo(_as_text(entry), nl=False)


def find(allow: Iterable[str] = ()) -> dict[str, list[type]]:
    """Return the classes that recipes can name, by family.

    Args:
        allow: Modules whose classes are added; they are imported.

    Examples:
        >>> [cls.__name__ for cls in find()["models"]][:2]
        ['CNN', 'HARMLP']
    """
    finder = ClassFinder(allow)
    families = {}
    for family, (path, _) in FAMILIES.items():
        module, _, name = path.rpartition(".")
        known = finder.known([getattr(importlib.import_module(module), name)])
        families[family] = [cls for classes in known.values() for cls in classes]
    return families


def describe(cls: type, family: str) -> dict[str, Any]:
    """Return the documentation of a class as plain values.

    Args:
        cls: The class.
        family: Its family.

    Returns:
        `name`, `family`, `class_path`, `signature`, `summary`, `arguments` (name, type, default,
        description), `references`, `docstring` and `recipe` (the section that names it).
    """
    docstring = inspect.getdoc(cls) or ""
    parts = sections(docstring)
    descriptions = argument_texts(docstring)
    signature = inspect.signature(cls)
    arguments = [
        {
            "name": name,
            "type": _type_name(parameter.annotation),
            "default": None if parameter.default is parameter.empty else repr(parameter.default),
            "description": descriptions.get(name, ""),
        }
        for name, parameter in signature.parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    references = re.split(r"^\s*- ", parts.get("References", ""), flags=re.MULTILINE)
    return {
        "name": cls.__name__,
        "family": family,
        "class_path": f"{cls.__module__}.{cls.__qualname__}",
        "signature": f"{cls.__name__}{_shown(arguments)}",
        "summary": " ".join(parts[""].partition("\n\n")[0].split()),
        "arguments": arguments,
        "references": [" ".join(text.split()) for text in references if text.strip()],
        "docstring": docstring,
        "recipe": _recipe(cls, family),
    }


def sections(docstring: str) -> dict[str, str]:
    r"""Return the sections of a Google-style docstring by heading; the text before them is `""`.

    Examples:
        >>> sections("Does it.\n\nArgs:\n    x: A number.")
        {'': 'Does it.', 'Args': 'x: A number.'}
    """
    parts: dict[str, list[str]] = {"": []}
    current = ""
    for line in docstring.splitlines():
        heading = _HEADING.match(line)
        if heading:
            current = heading[1]
            parts[current] = []
        else:
            parts[current].append(line)
    return {name: inspect.cleandoc("\n".join(lines)) for name, lines in parts.items()}


def short_reference(reference: str) -> str:
    """Return a reference's authors and venue only.

    Examples:
        >>> short_reference("Yin et al., Byzantine-Robust Distributed Learning, ICML 2018 (here).")
        'Yin et al., ICML 2018'
    """
    parts = re.sub(r"\s*\([^)]*\)\.?$", "", reference).rstrip(".").split(", ")
    dated = [part for part in parts[1:] if re.search(r"\b\d{4}$", part)]
    return ", ".join([parts[0], *(dated or parts[1:])[-1:]])


def argument_texts(docstring: str) -> dict[str, str]:
    r"""Return what the section `Args` of a docstring says, by argument.

    Examples:
        >>> argument_texts("Does it.\n\nArgs:\n    x: A number.\n    y: Another one.")
        {'x': 'A number.', 'y': 'Another one.'}
    """
    entries = re.split(r"^(\w+):", sections(docstring).get("Args", ""), flags=re.MULTILINE)[1:]
    pairs = zip(entries[::2], entries[1::2], strict=True)
    return {name: " ".join(description.split()) for name, description in pairs}


def _type_name(annotation: Any) -> str | None:
    if annotation is inspect.Parameter.empty:
        return None
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _shown(arguments: list[dict[str, Any]]) -> str:
    """Return a signature's arguments as text, one a line if they are long."""
    shown = [
        f"{a['name']}{': ' + a['type'] if a['type'] else ''}"
        f"{'' if a['default'] is None else ' = ' + a['default']}"
        for a in arguments
    ]
    one_line = ", ".join(shown)
    return f"({one_line})" if len(one_line) < 80 else "(\n    " + ",\n    ".join(shown) + ",\n)"


def _recipe(cls: type, family: str) -> str:
    """Return the section of a recipe that names the class with its default arguments."""
    values: dict[str, Any] = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if isinstance(parameter.default, (bool, int, float, str, type(None), list, tuple)):
            values[name] = parameter.default
        elif parameter.default is parameter.empty:
            values[name] = "..."
    lines: list[str] = []
    indent = ""
    for key in FAMILIES[family][1].split("."):
        if lines and lines[-1].endswith("- "):
            lines[-1] += f"{key}:"
        else:
            lines.append(f"{indent}{'- ' if key.isdigit() else key + ':'}")
        indent += "  "
    if lines[-1].endswith("- "):  # an entry of a list begins on the line of its dash
        lines[-1] += f"class_path: {cls.__name__}"
    else:
        lines.append(f"{indent}class_path: {cls.__name__}")
    if values:
        lines.append(f"{indent}init_args: {json.dumps(values)}")
    return "\n".join(lines)


def _as_text(entry: dict[str, Any]) -> str:
    head = f"{entry['name']} ({entry['family']}, {entry['class_path']})"
    text = wrapped("\n\n".join([head, entry["signature"], entry["docstring"]]))
    recipe = "\n".join(f"    {line}" for line in entry["recipe"].splitlines())
    return f"{text}\n\nRecipe:\n\n{recipe}\n\n"


def _plain(text: str) -> str:
    return text.replace("`", "").replace("$", "")
