"""What every component shares: it can be described by its class and arguments, and rebuilt."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from fedrec.exceptions import ConfigurationError, expected

__all__ = ["Component", "build", "subclasses"]

T = TypeVar("T", bound="Component")


class Component:
    """Base of aggregators, attacks, detectors, recoverers, partitioners and samplers.

    A component stores every constructor argument under the argument's own name, so that its
    `repr`, its recipe and what a history remembers of it agree.

    Examples:
        >>> from fedrec.aggregators import TrimmedMean
        >>> TrimmedMean(trim=2)
        TrimmedMean(trim=2)
        >>> TrimmedMean(trim=2).spec()
        {'class_path': 'fedrec.aggregators.trimmed_mean.TrimmedMean', 'init_args': {'trim': 2}}
    """

    def init_args(self) -> dict[str, Any]:
        """Return the constructor arguments by name, as stored."""
        names = inspect.signature(type(self)).parameters
        return {name: getattr(self, name) for name in names}

    def spec(self) -> dict[str, Any]:
        """Describe the component as `class_path` and `init_args`, nested components included."""
        cls = type(self)
        init_args = {
            name: value.spec() if isinstance(value, Component) else value
            for name, value in self.init_args().items()
        }
        return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": init_args}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.init_args().items())
        return f"{type(self).__name__}({arguments})"


def subclasses(base: type[T]) -> dict[str, type[T]]:
    """Return every loaded concrete subclass of `base` by dotted path."""
    found: dict[str, type[T]] = {}
    queue = [base]
    while queue:
        cls = queue.pop()
        queue.extend(cls.__subclasses__())
        if not inspect.isabstract(cls) and cls is not base:
            found[f"{cls.__module__}.{cls.__qualname__}"] = cls
    return found


def build(spec: Mapping[str, Any], base: type[T], argument: str) -> T:
    """Rebuild a component from `Component.spec`.

    Only classes that are loaded already are considered, so a stored description can never make
    anything be imported.

    Args:
        spec: What `Component.spec` returned.
        base: The component has to be a subclass of this.
        argument: What to name in an error.

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
        name: build(value, Component, f"{argument}.{name}")
        if isinstance(value, Mapping) and set(value) == {"class_path", "init_args"}
        else value
        for name, value in spec["init_args"].items()
    }
    return known[path](**init_args)
