"""The base of every component: described by its class and arguments, and rebuilt from them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from fedrec.exceptions import ConfigurationError, expected

__all__ = ["Component", "build", "goes_with", "subclasses"]

T = TypeVar("T", bound="Component")

# Numbers the classes in the order of their definition.
_definitions = itertools.count(1)

_WITHOUT_NAMES = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Component:
    """Base of aggregators, attacks, detectors, recoverers, partitioners and samplers.

    A component stores every constructor argument under the argument's own name, so that its
    `repr`, its recipe and its entry in a history's manifest agree.

    Examples:
        >>> from fedrec.aggregators import TrimmedMean
        >>> TrimmedMean(trim=2)
        TrimmedMean(trim=2)
        >>> TrimmedMean(trim=2).spec()
        {'class_path': 'fedrec.aggregators.trimmed_mean.TrimmedMean', 'init_args': {'trim': 2}}
    """

    _definition: ClassVar[int] = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._definition = next(_definitions)

    def init_args(self) -> dict[str, Any]:
        """Return the constructor arguments by name, as stored.

        Raises:
            ConfigurationError: If the constructor takes `*args` or `**kwargs`, or an argument is
                not stored.
        """
        parameters = inspect.signature(type(self)).parameters
        not_stored = [
            str(parameter)
            for name, parameter in parameters.items()
            if parameter.kind in _WITHOUT_NAMES or not hasattr(self, name)
        ]
        if not_stored:
            raise ConfigurationError(
                f"Expected {type(self).__name__} to store every constructor argument under its own "
                f"name, but it does not for {', '.join(f'`{name}`' for name in not_stored)}. "
                "HINT: write out the arguments in `__init__` (no `*args`, no `**kwargs`) and do "
                "`self.name = name` for each."
            )
        return {name: getattr(self, name) for name in parameters}

    def spec(self) -> dict[str, Any]:
        """Describe the component as `class_path` and `init_args`, nested components included.

        Tuples become lists, so that the description equals itself after a way through JSON or YAML.
        """
        cls = type(self)
        init_args = {name: _described(value) for name, value in self.init_args().items()}
        return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": init_args}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.init_args().items())
        return f"{type(self).__name__}({arguments})"


def _described(value: Any) -> Any:
    if isinstance(value, Component):
        return value.spec()
    if isinstance(value, (list, tuple)):
        return [_described(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _described(item) for key, item in value.items()}
    return value


def _rebuilt(value: Any, argument: str) -> Any:
    if isinstance(value, list):
        return [_rebuilt(item, argument) for item in value]
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"class_path", "init_args"}:
        return build(value, Component, argument)
    return {key: _rebuilt(item, argument) for key, item in value.items()}


def goes_with(component: Component, name: str, *methods: str) -> bool:
    """Whether what a component says of its methods goes for them: no subclass replaced one since.

    Args:
        component: The component.
        name: The attribute or method that says it.
        methods: What it is said of.
    """
    order = type(component).__mro__
    said, *places = (
        next(k for k, c in enumerate(order) if attribute in vars(c))
        for attribute in (name, *methods)
    )
    return said <= min(places)


def subclasses(base: type[T]) -> dict[str, type[T]]:
    """Return every loaded concrete subclass of `base` by dotted path.

    Of several classes with the same path, as after a notebook cell has been run again, the newest
    is returned.
    """
    classes: list[type[T]] = []
    queue = [base]
    while queue:
        cls = queue.pop()
        queue.extend(cls.__subclasses__())
        if not inspect.isabstract(cls) and cls is not base:
            classes.append(cls)
    classes.sort(key=lambda cls: getattr(cls, "_definition", 0))
    return {f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes}


def build(spec: Mapping[str, Any], base: type[T], argument: str) -> T:
    """Rebuild a component from `Component.spec`.

    Only classes that are loaded already are considered, so that a stored description never imports
    a module.

    Args:
        spec: The description that `Component.spec` returned.
        base: Class that the component has to be a subclass of.
        argument: Name of the argument, for errors.

    Raises:
        ConfigurationError: If no loaded subclass of `base` has this path.
    """
    known = subclasses(base)
    path = spec["class_path"]
    if path not in known:
        raise ConfigurationError(
            expected(
                argument,
                f"a {base.__name__} that is loaded",
                path,
                hint=f"import the module that defines it, or pass `{argument}=` yourself.",
            )
        )
    init_args = {
        name: _rebuilt(value, f"{argument}.{name}") for name, value in spec["init_args"].items()
    }
    return known[path](**init_args)
