"""Whether a value from YAML fits a type annotation."""

from __future__ import annotations

import collections.abc as abc
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrec.exceptions import ConfigurationError
from fedrec.recipe.classes import article
from fedrec.recipe.loading import UNUSABLE

__all__ = ["MisfitError", "describe", "fit", "parameter_types"]

_SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_LISTS = (list, set, frozenset, abc.Sequence, abc.Iterable, abc.Collection, abc.Set)
_MAPPINGS = (dict, abc.Mapping, abc.MutableMapping)


class MisfitError(ConfigurationError):
    """A value does not fit its annotation; the caller names the key and what was expected."""


def parameter_types(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the parameters of a class or function, by name.

    An annotation that cannot be resolved is left out.
    """
    if isinstance(function, type):
        function = function.__init__  # type: ignore[misc]
    target = inspect.unwrap(function)
    hints: dict[str, Any] = {}
    for name, annotation in getattr(target, "__annotations__", {}).items():
        # Resolved one by one: a name that is imported for type checkers only fails alone.
        holder = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            hints.update(typing.get_type_hints(holder, getattr(target, "__globals__", {})))
        except (NameError, TypeError, AttributeError):
            continue
    return hints


def fit(value: Any, annotation: Any, component: Callable[[Any, Sequence[type]], Any]) -> Any:
    """Convert a value from YAML to an annotation: lists to tuples, mappings to components.

    Only simple types are checked; any other annotation accepts every value.

    Args:
        value: The value from YAML.
        annotation: The type of the parameter, resolved.
        component: Builds a component from its mapping or class name, given the possible bases.

    Raises:
        MisfitError: If the value has another type.
    """
    if value is UNUSABLE or annotation in (Any, object, inspect.Parameter.empty):
        return value
    options = _options(annotation)
    classes = [o for o in options if _is_class(o)]
    for option in options:
        if option not in classes:
            try:
                return _fit_one(value, option, component)
            except MisfitError:
                continue
    if classes and isinstance(value, (str, Mapping)):
        return component(value, classes)
    raise MisfitError(f"{value!r} is not {describe(annotation)}.")


def _options(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _is_class(option: Any) -> bool:
    plain = (*_SCALARS, *_LISTS, *_MAPPINGS, tuple, type(None), Path)
    return isinstance(option, type) and option not in plain and typing.get_origin(option) is None


def _fit_one(value: Any, option: Any, component: Callable[[Any, Sequence[type]], Any]) -> Any:
    origin, args = typing.get_origin(option) or option, typing.get_args(option)
    if origin is typing.Literal:
        ok = value in args
    elif origin in (None, type(None)):
        ok = value is None
    elif origin is int:
        ok = isinstance(value, int) and not isinstance(value, bool)
    elif origin is float:
        ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    elif origin in (bool, str):
        ok = isinstance(value, origin)
    elif origin is Path:
        return Path(_fit_one(value, str, component))
    elif origin is tuple or origin in _LISTS:
        if not isinstance(value, (list, tuple)):
            raise MisfitError(f"{value!r} is not a list.")
        items = [a for a in args if a is not Ellipsis]
        if len(items) > 1 and len(items) != len(value):
            raise MisfitError(f"{value!r} has {len(value)} entries.")
        annotations = items if len(items) > 1 else (items or [Any]) * len(value)
        fitted = [fit(v, a, component) for v, a in zip(value, annotations, strict=True)]
        return tuple(fitted) if origin is tuple else fitted
    elif origin in _MAPPINGS:
        ok = isinstance(value, Mapping)
    else:
        return value
    if not ok:
        raise MisfitError(f"{value!r} is not {describe(option)}.")
    return value


def describe(annotation: Any) -> str:
    """Return in words which values an annotation accepts.

    Examples:
        >>> describe(int | float), describe(str | None), describe(tuple[int, ...])
        ('an integer or a number', 'text or null', 'a list (of: an integer)')
    """
    return " or ".join(dict.fromkeys(_describe_one(option) for option in _options(annotation)))


def _describe_one(option: Any) -> str:
    origin, args = typing.get_origin(option) or option, typing.get_args(option)
    if origin in (None, type(None)):
        return "null"
    if origin is typing.Literal:
        return f"one of {', '.join(map(repr, args))}"
    if origin in _SCALARS:
        return _SCALARS[origin]
    if origin is Path:
        return "a path"
    if origin is tuple or origin in _LISTS:
        items = list(dict.fromkeys(describe(a) for a in args if a is not Ellipsis))
        return f"a list (of: {', '.join(items)})" if items else "a list"
    if origin in _MAPPINGS:
        return "a mapping"
    return article(getattr(origin, "__name__", "value"))
