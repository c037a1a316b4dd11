"""`fedrec schema`: a JSON Schema of recipes, by which editors complete and check them."""

from __future__ import annotations

import collections.abc as abc
import importlib
import inspect
import json
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from fedrec._files import write_atomically
from fedrec.cli.families import FAMILIES
from fedrec.cli.listing import argument_texts, sections
from fedrec.cli.parser import Options
from fedrec.recipe.annotations import parameter_types
from fedrec.recipe.classes import ClassFinder
from fedrec.recipe.schema import ARGUMENTS, LOGGER, SECTIONS

__all__ = ["recipe_schema", "schema_command"]

# What is known only when a recipe is read: `${key}`, and `???` for what the command line gives.
_LATER = r"\$\{.+\}|^\?\?\?$"
# A class of any module: `--allow` decides whether it may be used.
_DOTTED = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$"

_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_LISTS = (list, set, frozenset, abc.Sequence, abc.Iterable, abc.Collection, abc.Set)
_MAPPINGS = (dict, abc.Mapping, abc.MutableMapping)
_LABELLED = ("recoverers", "metrics")

_ABOUT = {
    "name": "Name of the run folder, `runs/<name>`; by default that of the file.",
    "seed": "Decides every random draw.",
    "extends": "Recipes to build on, relative to this file: a path, or a list of them.",
    "data": "Data set and partition.",
    "model": "The LightningModule that clients train.",
    "federation": "Who is malicious, and how clients train.",
    "aggregator": "Aggregation rule.",
    "attack": "What malicious clients do.",
    "detector": "Who looks for malicious clients.",
    "history": "Where rounds are stored; an LMDBHistory by default.",
    "loop": "Device, precision, evaluation, loggers.",
    "record": "Rounds, and the learning rate of the server.",
    "recover": "Whom to exclude, and what a recovery does in another way than the recording.",
    "recoverers": "Ways to recover, each on the same recording.",
    "metrics": "What to measure of every model beside test error rate and attack success rate.",
}


def schema_command(args: Options) -> None:
    """Write the schema to a file, or to standard output."""
    text = json.dumps(recipe_schema(args.allow), indent=1, ensure_ascii=False) + "\n"
    if args.output is None:
        click.echo(text, nl=False)
    else:
        write_atomically(Path(args.output), text.encode())
        click.echo(args.output)


def recipe_schema(allow: Iterable[str] = ()) -> dict[str, Any]:
    """Return a JSON Schema (draft 2020-12) of recipes.

    It knows the sections, the classes of every family by their short names, and names, types,
    defaults and descriptions of their arguments. It refuses no dotted class path, whose arguments
    it does not know. Missing keys are not refused either, since another recipe (`extends`) or the
    command line may give them: `fedrec validate` finds what is missing.

    Args:
        allow: Modules whose classes are added by their short names; they are imported.

    Raises:
        ConfigurationError: If a module in `allow` cannot be imported.

    Examples:
        >>> schema = recipe_schema()
        >>> schema["$defs"]["recoverers.FedRecover"]["properties"]["warmup_rounds"]["default"]
        20
    """
    writer = _Writer(ClassFinder(allow))
    properties: dict[str, Any] = {
        "name": {"type": "string"},
        "seed": {"type": ["integer", "string"], "pattern": _LATER, "minimum": 0, "default": 0},
        "extends": {"type": ["string", "array"], "items": {"type": "string"}},
    }
    bases = {}
    for family, (path, section) in FAMILIES.items():
        module, _, name = path.rpartition(".")
        bases[family] = getattr(importlib.import_module(module), name)
        if section in SECTIONS:
            properties[section] = writer.component([bases[family]])
    for section, (function, given) in ARGUMENTS.items():
        special = {"logger": LOGGER} if section == "loop" else {}
        properties[section] = writer.arguments(function, given, special)
    properties["recover"]["properties"]["exclude"] = {
        "type": ["string", "array"],
        "pattern": rf"^detected$|{_LATER}",
        "items": {"type": "string"},
        "default": "detected",
        "description": "`detected`, or the ids of the clients to leave out.",
    }
    for family in _LABELLED:
        items = writer.component([bases[family]])
        properties[family] = {"type": ["array", "null"], "items": items}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Recipe of fedrec",
        "type": "object",
        "additionalProperties": False,
        "properties": {key: {"description": _ABOUT[key], **properties[key]} for key in SECTIONS},
        "$defs": writer.defs,
    }


class _Writer:
    """Writes the parts of the schema, and keeps those that are referred to in `defs`."""

    def __init__(self, finder: ClassFinder) -> None:
        self.finder = finder
        self.defs: dict[str, Any] = {}
        self.families = {path.rpartition(".")[2]: family for family, (path, _) in FAMILIES.items()}

    def component(self, bases: Sequence[type]) -> dict[str, Any]:
        """Return a reference to the schema of components of a base."""
        (base,) = bases
        family = self.families.get(base.__name__, base.__name__.lower())
        if family not in self.defs:
            self.defs[family] = {}  # in place before its classes, whose arguments may refer to it
            self.defs[family].update(self._component(base, family))
        return {"$ref": f"#/$defs/{family}"}

    def _component(self, base: type, family: str) -> dict[str, Any]:
        known = {name: classes[0] for name, classes in self.finder.known([base]).items()}
        names = [{"enum": list(known)}, {"type": "string", "pattern": f"{_DOTTED}|{_LATER}"}]
        given = {"path": ""} if family == "histories" else {}
        for name, cls in known.items():
            self.defs[f"{family}.{name}"] = self._class(cls, given)
        labels = {"label": {"type": "string"}} if family in _LABELLED else {}
        return {
            "type": ["string", "object", "null"],
            "if": {"type": "string"},
            "then": {"anyOf": names},
            "else": {
                "properties": {
                    "class_path": {"anyOf": names},
                    "init_args": {"type": ["object", "null"]},
                    **labels,
                },
                "additionalProperties": False,
                "allOf": [
                    {
                        "if": {
                            "properties": {"class_path": {"const": name}},
                            "required": ["class_path"],
                        },
                        "then": {"properties": {"init_args": {"$ref": f"#/$defs/{family}.{name}"}}},
                    }
                    for name in known
                ],
            },
        }

    def _class(self, cls: type, given: Collection[str]) -> dict[str, Any]:
        summary = " ".join(sections(inspect.getdoc(cls) or "")[""].partition("\n\n")[0].split())
        about = {"description": summary} if summary else {}
        if not cls.__module__.startswith("fedrec.") and cls.__module__.startswith(_FOREIGN):
            return {**about, "type": ["object", "null"]}
        return {**about, **self.arguments(cls, given, {})}

    def arguments(
        self, function: Callable[..., Any], given: Collection[str], special: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the schema of the arguments of a class or function, without those in `given`."""
        hints = {**parameter_types(function), **special}
        texts = argument_texts(inspect.getdoc(function) or "")
        properties, anything = {}, False
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                anything = True
            if parameter.kind in _VARIADIC or name == "self" or name in given:
                continue
            value = self.value(hints.get(name, Any))
            if name in texts:
                value["description"] = texts[name]
            if isinstance(parameter.default, (bool, int, float, str, list, tuple, type(None))):
                value["default"] = parameter.default
            properties[name] = value
        schema = {"type": ["object", "null"], "properties": properties}
        return schema if anything else {**schema, "additionalProperties": False}

    def value(self, annotation: Any) -> dict[str, Any]:
        """Return the schema of the values that fit an annotation, as `annotations.fit` sees it."""
        origin = typing.get_origin(annotation)
        options = (
            typing.get_args(annotation)
            if origin in (typing.Union, types.UnionType)
            else (annotation,)
        )
        parts = [self._option(option) for option in options]
        if {} in parts:  # one of them takes anything
            return {}
        others = [part for part in parts if "type" not in part]
        plain = _merged([part for part in parts if "type" in part])
        if not others:
            texts = {} if "string" in plain["type"] else {"pattern": _LATER}
            kinds = plain["type"] if not texts else [*plain["type"], "string"]
            return {**plain, **texts, "type": kinds if len(kinds) > 1 else kinds[0]}
        # A component may be null in any case.
        anything = [plain] if plain and plain["type"] != ["null"] else []
        return others[0] if not anything and len(others) == 1 else {"anyOf": [*anything, *others]}

    def _option(self, option: Any) -> dict[str, Any]:
        """Return the schema of one option of a union; without a `type`, it stands by itself."""
        origin, args = typing.get_origin(option) or option, typing.get_args(option)
        if origin in _SCALARS:
            return {"type": [_SCALARS[origin]]}
        if origin is typing.Literal:
            return {"anyOf": [{"enum": list(args)}, {"type": "string", "pattern": _LATER}]}
        if origin in (Path, os.PathLike):
            return {"type": ["string"]}
        if origin is tuple and args and Ellipsis not in args:
            items = [self.value(arg) for arg in args]
            return {
                "type": ["array"],
                "prefixItems": items,
                "minItems": len(items),
                "maxItems": len(items),
            }
        if origin is tuple or origin in _LISTS:
            return {"type": ["array"], "items": self.value(args[0]) if args else {}}
        if origin in _MAPPINGS:
            return {"type": ["object"]}
        if isinstance(origin, type) and origin not in (Any, object, abc.Callable):
            return self.component([origin])
        return {}


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one schema for values of several types, of which each has keywords of its own."""
    merged = {key: value for part in parts for key, value in part.items()}
    kinds = dict.fromkeys(kind for part in parts for kind in part["type"])
    return {**merged, "type": list(kinds)} if parts else {}


# Their arguments depend on the version that is installed.
_FOREIGN = ("torch", "torchmetrics", "lightning", "pytorch_lightning")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
