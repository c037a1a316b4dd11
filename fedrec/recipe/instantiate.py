"""Building objects from `class_path` and `init_args`, and collecting every mistake."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from fedrec.exceptions import ConfigurationError, FedrecError, expected
from fedrec.recipe.annotations import MisfitError, describe, fit, parameter_types
from fedrec.recipe.classes import ClassFinder, article
from fedrec.recipe.failures import reason_of
from fedrec.recipe.loading import UNUSABLE, is_usable

__all__ = ["Instantiator"]

# Errors that a constructor may raise about its arguments; any other error is its own fault.
_REFUSALS = (
    FedrecError,
    ValueError,
    TypeError,
    ImportError,
    OSError,
    RuntimeError,
    AttributeError,
    ArithmeticError,
    LookupError,
)
# Values to put in place of a required argument that is wrong, so that the other arguments can be
# checked. There is none for text: it may name a file or an address that a constructor would open.
_STAND_INS: dict[Any, Any] = {int: 1, float: 1.0}
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Instantiator:
    """Builds components from a recipe.

    In place of a component that cannot be built, `UNUSABLE` is returned, and `errors` has the
    reasons: one line a mistake, each starting with the dotted key.

    Args:
        finder: Finds the class of a name.

    Examples:
        >>> from fedrec.aggregators import Aggregator
        >>> instantiator = Instantiator(ClassFinder())
        >>> instantiator.component("Median", "aggregator", [Aggregator])
        Median()
        >>> instantiator.component("Medain", "aggregator", [Aggregator])
        UNUSABLE
        >>> instantiator.errors[0][:75]
        "aggregator: Expected `class_path` to be an Aggregator, but got 'Medain'. Di"
    """

    def __init__(self, finder: ClassFinder) -> None:
        self.finder = finder
        self.errors: list[str] = []

    def mistake(self, key: str, text: str) -> Any:
        """Note a mistake and return `UNUSABLE`."""
        self.errors.append(f"{key}: {text}")
        return UNUSABLE

    def component(
        self,
        node: Any,
        key: str,
        bases: Sequence[type],
        *,
        extra: Collection[str] = (),
        defaults: Mapping[str, Any] | None = None,
    ) -> Any:
        """Build a component.

        Args:
            node: A class name, or a mapping with `class_path` and possibly `init_args`.
            key: The dotted key of the node.
            bases: The class has to be a subclass of one of these.
            extra: Keys that may stand beside `class_path` and `init_args`.
            defaults: Arguments for a class that takes them, where the recipe does not give them.

        Returns:
            The component, or `UNUSABLE`.
        """
        before = len(self.errors)
        checked = self.arguments_of(node, key, bases, extra=extra, defaults=defaults)
        if checked is UNUSABLE:
            return UNUSABLE
        cls, arguments = checked
        built = self.construct(cls, arguments, f"{key}.init_args")
        return built if len(self.errors) == before else UNUSABLE

    def construct(self, cls: Callable[..., Any], arguments: Mapping[str, Any], key: str) -> Any:
        """Call a class or a function, and note every argument that it refuses.

        After a refusal, it is called again without the refused argument, to check the others.

        Args:
            cls: The class or function.
            arguments: Its keyword arguments.
            key: The dotted key of the arguments.

        Returns:
            The object, or `UNUSABLE` if an argument was refused.
        """
        try:
            return cls(**arguments)
        except _REFUSALS as error:
            name, text = _refusal(error, arguments)
        self.mistake(key if name is None else f"{key}.{name}", text)
        if name is not None:
            self._check_others(cls, {k: v for k, v in arguments.items() if k != name}, key)
        return UNUSABLE

    def _check_others(
        self, cls: Callable[..., Any], arguments: Mapping[str, Any], key: str
    ) -> None:
        """Check the arguments that remain, with defaults in place of those that were wrong."""
        parameters = inspect.signature(cls).parameters
        types = parameter_types(cls.func if isinstance(cls, partial) else cls)
        left, required = dict(arguments), {}
        for name, parameter in parameters.items():
            if parameter.default is inspect.Parameter.empty and parameter.kind not in _VARIADIC:
                if name not in left and types.get(name) not in _STAND_INS:
                    return
                required[name] = _STAND_INS.get(types.get(name))
        while left:
            try:
                cls(**{**required, **left})
                return
            except _REFUSALS as error:
                about, text = _refusal(error, left)
            if about is None:
                return
            # A text that names an argument that was left out may be about its stand-in.
            if not any(re.search(rf"\b{name}\b", text) for name in parameters.keys() - left.keys()):
                self.mistake(f"{key}.{about}", text)
            del left[about]

    def arguments_of(
        self,
        node: Any,
        key: str,
        bases: Sequence[type],
        *,
        extra: Collection[str] = (),
        given: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> Any:
        """Check a component without constructing it.

        Args:
            node: As in `component`.
            key: As in `component`.
            bases: As in `component`.
            extra: As in `component`.
            given: Arguments that a recipe must not have: by name, a hint that says where they come
                from.
            defaults: As in `component`.

        Returns:
            The class and its keyword arguments, or `UNUSABLE`.
        """
        if node is UNUSABLE:
            return UNUSABLE
        if isinstance(node, str):
            node, class_key = {"class_path": node}, key
        else:
            class_key = f"{key}.class_path"
        if not isinstance(node, Mapping) or "class_path" not in node:
            requirement = article(bases[0].__name__)
            hint = "write a class name, or a mapping with `class_path` and `init_args`."
            return self.mistake(key, expected(key.rpartition(".")[2], requirement, node, hint=hint))
        known = ["class_path", "init_args", *extra]
        for name in sorted(node.keys() - set(known)):
            hint = f"arguments of the class go under `{key}.init_args`."
            self.mistake(f"{key}.{name}", expected("key", "known", name, known=known, hint=hint))
        if node["class_path"] is UNUSABLE:
            return UNUSABLE
        try:
            cls = self.finder.find(str(node["class_path"]), bases)
        except ConfigurationError as error:
            return self.mistake(class_key, str(error))
        init_args = node.get("init_args")
        arguments = self.arguments(
            {} if init_args is None else init_args,
            f"{key}.init_args",
            cls,
            given=given or {},
            check=cls,
        )
        if arguments is UNUSABLE:
            return UNUSABLE
        names = inspect.signature(cls).parameters
        return cls, {**{k: v for k, v in (defaults or {}).items() if k in names}, **arguments}

    def arguments(
        self,
        node: Any,
        key: str,
        function: Callable[..., Any],
        *,
        given: Mapping[str, str],
        types: Mapping[str, Any] | None = None,
        check: Callable[..., Any] | None = None,
    ) -> Any:
        """Check keyword arguments against a signature.

        Args:
            node: The mapping from the recipe.
            key: Its dotted key.
            function: The class or function that takes the arguments.
            given: As in `arguments_of`; with an empty hint, the argument counts as unknown.
            types: Types by argument, in place of the annotations.
            check: Called with the arguments that fit, if others do not, to find more mistakes.

        Returns:
            The arguments with nested components built, or `UNUSABLE`.
        """
        if node is UNUSABLE:
            return UNUSABLE
        if not isinstance(node, Mapping):
            return self.mistake(key, expected(key.rpartition(".")[2], "a mapping", node))
        before = len(self.errors)
        parameters = {
            n: p for n, p in inspect.signature(function).parameters.items() if n != "self"
        }
        anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        named = {n: p for n, p in parameters.items() if p.kind not in _VARIADIC and n not in given}
        hints = {**parameter_types(function), **(types or {})}
        arguments: dict[str, Any] = {}
        for name, value in node.items():
            where = f"{key}.{name}"
            if name in named or (anything and name not in given):
                fitted = self._fit(value, hints.get(name, Any), where)
                if fitted is not UNUSABLE:
                    arguments[name] = fitted
            elif given.get(name):
                self.mistake(where, expected(name, "left out", value, hint=given[name]))
            else:
                requirement = f"an argument of {function.__qualname__}"
                self.mistake(where, expected("key", requirement, name, known=named))
        for name, parameter in named.items():
            if parameter.default is inspect.Parameter.empty and name not in node:
                values = describe(hints[name]) if name in hints else "given"
                text = f"Expected `{name}` to be {values}, but it is missing."
                self.mistake(f"{key}.{name}", text)
        if is_usable(node) and len(self.errors) == before:
            return arguments
        if check is not None:
            self._check_others(check, arguments, key)
        return UNUSABLE

    def _fit(self, value: Any, annotation: Any, key: str) -> Any:
        before = len(self.errors)

        def component(node: Any, bases: Sequence[type]) -> Any:
            return self.component(node, key, bases)

        try:
            fitted = fit(value, annotation, component)
        except MisfitError:
            name = key.rpartition(".")[2]
            return self.mistake(key, expected(name, describe(annotation), value))
        return fitted if is_usable(fitted) and len(self.errors) == before else UNUSABLE


def _refusal(error: Exception, arguments: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the argument that an error is about, or `None`, and the error's text."""
    text = reason_of(error)
    about = re.match(r"Expected `(\w+)`", text)
    return (about[1] if about is not None and about[1] in arguments else None), text
