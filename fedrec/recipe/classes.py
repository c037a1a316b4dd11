"""Finding the class that a recipe names, among the classes that recipes may name."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Sequence

from fedrec.exceptions import ConfigurationError, expected

__all__ = ["ClassFinder", "article"]

_SAFE = ("fedrec", "torch", "torchmetrics", "lightning", "pytorch_lightning")

# The module that short names are looked up in, for base classes of other packages.
_FAMILIES = {
    "LightningModule": "fedrec.models",
    "Logger": "pytorch_lightning.loggers",
    "Metric": "fedrec.metrics",
}


def article(name: str) -> str:
    """Return the name with "a" or "an" in front.

    Examples:
        >>> article("Aggregator"), article("Detector")
        ('an Aggregator', 'a Detector')
    """
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


class ClassFinder:
    """Finds classes by short name or dotted path.

    A recipe is data that may come from anywhere, so it must not decide what is imported. Classes
    come from fedrec, torch, torchmetrics and Lightning, or from modules that the caller allows, and
    have to be subclasses of the base of their place in the recipe.

    Args:
        allow: Further modules or packages that classes may come from; they are imported.

    Raises:
        ConfigurationError: If an allowed module cannot be imported.
    """

    def __init__(self, allow: Iterable[str] = ()) -> None:
        self.allow = tuple(allow)
        for module in self.allow:
            try:
                importlib.import_module(module)
            except (Exception, SystemExit) as error:
                raise ConfigurationError(
                    "Expected `allow` to name modules that can be imported, but "
                    f"`{module}` cannot: {_cause(error, module)}"
                ) from error

    def find(self, name: str, bases: Sequence[type], argument: str = "class_path") -> type:
        """Return the class that a name stands for.

        Args:
            name: A short name such as `TrimmedMean`, or a dotted path.
            bases: The class has to be a subclass of one of these.
            argument: Name of the argument, for errors.

        Raises:
            ConfigurationError: If there is no such class, it is no subclass of `bases`, it is
                abstract, or its module is not allowed.
        """
        requirement = article(bases[0].__name__)
        if "." in name:
            cls = self._import(name, bases, argument)
            if not (isinstance(cls, type) and issubclass(cls, tuple(bases))):
                raise ConfigurationError(
                    expected(argument, requirement, name, known=self.known(bases) or None)
                )
        else:
            classes = self.known(bases).get(name, [])
            if not classes:
                raise ConfigurationError(
                    expected(
                        argument,
                        requirement,
                        name,
                        known=self.known(bases) or None,
                        hint=self._hint(bases[0], name),
                    )
                )
            if len(classes) > 1:
                paths = [f"{c.__module__}.{c.__qualname__}" for c in classes]
                raise ConfigurationError(
                    expected(argument, "one class", name, hint=f"write {' or '.join(paths)}.")
                )
            cls = classes[0]
        if inspect.isabstract(cls):
            requirement += " that can be used as it is"
            raise ConfigurationError(expected(argument, requirement, name, known=self.known(bases)))
        return cls

    def known(self, bases: Sequence[type]) -> dict[str, list[type]]:
        """Return the concrete subclasses of `bases` that go by a short name, by that name."""
        classes: dict[str, list[type]] = {}
        for base in bases:
            for cls in [*self._family(base), *self._allowed(base)]:
                same_name = classes.setdefault(cls.__name__, [])
                if cls not in same_name:
                    same_name.append(cls)
        return {name: classes[name] for name in sorted(classes)}

    def _hint(self, base: type, name: str) -> str:
        """Return a hint on how to name a class that was not found."""
        if base.__module__.startswith("torchmetrics."):
            return "those of torchmetrics go by dotted paths: `torchmetrics.classification.Name`."
        if not self.allow:
            return "`--allow my_package` makes the classes of a module of yours known."
        return (
            f"what importing `{self.allow[0]}` does not import goes by its dotted path: "
            f"`{self.allow[0]}.module.{name}`."
        )

    def _family(self, base: type) -> list[type]:
        """Return the subclasses of a base that the package of its family exports."""
        own = ".".join(base.__module__.split(".")[:2]) if base.__module__[:7] == "fedrec." else None
        package = _FAMILIES.get(base.__name__, own)
        if package is None:
            return []
        module = importlib.import_module(package)
        values = [getattr(module, name) for name in getattr(module, "__all__", ())]
        classes = [v for v in values if isinstance(v, type) and issubclass(v, base)]
        # A base without subclasses, such as `ClientSampler`, stands for itself.
        return [c for c in classes if _usable(c, base)] or [c for c in classes if c is base]

    def _allowed(self, base: type) -> list[type]:
        """Return the subclasses of a base that allowed modules define."""
        classes, queue = [], [base]
        while queue:
            cls = queue.pop()
            queue.extend(type.__subclasses__(cls))
            # A class that its module no longer has is left over from before the module's reload.
            current = getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
            if current and self._inside(cls.__module__, self.allow) and _usable(cls, base):
                classes.append(cls)
        return classes

    def _import(self, path: str, bases: Sequence[type], argument: str) -> object:
        """Import the object at a dotted path, if its module is allowed."""
        if not self._inside(path, (*_SAFE, *self.allow)):
            root = path.partition(".")[0]
            raise ConfigurationError(
                expected(
                    argument,
                    f"a class of {', '.join(_SAFE)} or of an allowed module",
                    path,
                    hint=f"if you trust it, allow it: `--allow {root}`, or `allow=[{root!r}]`.",
                )
            )
        module_name, _, name = path.rpartition(".")
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            message = expected(argument, article(bases[0].__name__), path)
            raise ConfigurationError(f"{message} ({_fault(error)})") from error
        if not hasattr(module, name):
            names = [k for k, v in vars(module).items() if isinstance(v, type) and k[0] != "_"]
            fitting = [k for k in names if issubclass(getattr(module, k), tuple(bases))]
            raise ConfigurationError(
                expected(argument, f"a name in `{module_name}`", name, known=fitting or None)
            )
        return getattr(module, name)

    @staticmethod
    def _inside(path: str, roots: Iterable[str]) -> bool:
        return any(path == root or path.startswith(f"{root}.") for root in roots)


def _cause(error: BaseException, module: str) -> str:
    """Return why a module cannot be imported, with a hint."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and (module == missing or module.startswith(f"{missing}.")):
        return f"{error}. HINT: run from the folder that holds it, or install it."
    if missing is not None:
        return f"{_fault(error)}. HINT: install `{missing}`, which it imports."
    return f"{_fault(error)}. HINT: `python -c 'import {module}'` shows where."


def _fault(error: BaseException) -> str:
    """Return an error's text, with the error's class unless it is an `ImportError`."""
    return str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"


def _usable(cls: type, base: type) -> bool:
    return issubclass(cls, base) and cls is not base and not inspect.isabstract(cls)
