"""The errors fedrec raises, and the one way their messages are put together."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "AggregationError",
    "ConfigurationError",
    "FedrecError",
    "FedrecWarning",
    "FileWriteError",
    "ForgottenError",
    "HistoryCorruptedError",
    "HistoryError",
    "HistoryFormatError",
    "HistoryFullError",
    "HistoryKeyError",
    "HistoryLockedError",
    "MethodsFailedError",
    "MissingDependencyError",
    "RankError",
    "RecipeError",
    "RecoveryError",
    "RoundNotFoundError",
    "ShapeError",
    "TrainerAttributeError",
    "UpdateError",
    "expected",
]

# A longer list hides the message that it belongs to.
_MOST_LISTED = 40


class FedrecError(Exception):
    """Base class of every error that fedrec raises on purpose."""


class FedrecWarning(UserWarning):
    """Something works, but not the way that was asked for."""


class ConfigurationError(FedrecError, ValueError):
    """An argument, or a combination of arguments, cannot work."""


class RecipeError(ConfigurationError):
    """One or more mistakes in a recipe, all of them listed.

    Args:
        errors: One message per mistake, each starting with the dotted key it is about.
    """

    def __init__(self, errors: Sequence[str] | str) -> None:
        self.errors = [errors] if isinstance(errors, str) else list(errors)
        head = (
            "The recipe has 1 mistake"
            if len(self.errors) == 1
            else (f"The recipe has {len(self.errors)} mistakes")
        )
        super().__init__("\n  - ".join([f"{head}:", *self.errors]))


class ShapeError(FedrecError, ValueError):
    """A tensor has another shape or dtype than the one asked for."""


class TrainerAttributeError(FedrecError, AttributeError):
    """A module reads something of its trainer that local training does not have."""


class UpdateError(FedrecError, ValueError):
    """A client sent something that cannot be used: non-finite, mis-shaped, or no update."""


class AggregationError(FedrecError, ValueError):
    """An aggregation rule cannot work with these client updates."""


class HistoryError(FedrecError):
    """Base class of everything that goes wrong with a history store."""


class RoundNotFoundError(HistoryError, KeyError):
    """A round or a client of a round is not in the history."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class ForgottenError(RoundNotFoundError):
    """A client was forgotten: nothing it sent is in the history any more."""


class HistoryFormatError(HistoryError):
    """The history was written by another format version, for another model, or is not ours."""


class HistoryCorruptedError(HistoryError):
    """Stored bytes are not the bytes that were written."""


class HistoryFullError(HistoryError):
    """The disk, or the reserved map, cannot hold the next round."""


class HistoryLockedError(HistoryError):
    """Another process is writing to this history."""


class HistoryKeyError(HistoryError):
    """A history is encrypted, and the master key is missing, or another one."""


class RecoveryError(FedrecError):
    """A recovery cannot go on."""


class MethodsFailedError(RecoveryError):
    """Some of the methods of a run failed; what the others came to is kept.

    Args:
        failures: Why, by the method's label.

    Attributes:
        results: What the others came to, as in `results.json`.
    """

    def __init__(self, failures: Mapping[str, str]) -> None:
        self.failures = dict(failures)
        self.results: dict[str, Any] = {}
        number = len(self.failures)
        head = f"{number} {'method' if number == 1 else 'methods'} failed; the others are kept:"
        lines = [f"{label}: {reason}" for label, reason in self.failures.items()]
        super().__init__("\n  - ".join([head, *lines]))


class FileWriteError(FedrecError, OSError):
    """A file, or a folder for it, cannot be written: the disk is full, or the path does not do."""


class RankError(FedrecError):
    """One of the processes of a run has failed, died, hangs, or computes something else."""


class MissingDependencyError(FedrecError, ModuleNotFoundError):
    """An optional package is needed for this and is not installed."""


def expected(
    argument: str,
    requirement: str,
    value: object,
    *,
    known: Iterable[str] | None = None,
    hint: str | None = None,
) -> str:
    """Write an error message the way all of fedrec does.

    Args:
        argument: Name of the argument or dotted recipe key.
        requirement: What it has to be, completing "Expected ... to be".
        value: What was given.
        known: The possible values; the nearest one to `value` is offered as "Did you mean". A list
            of more than forty is left out.
        hint: One thing to do about it.

    Returns:
        One line of text.

    Examples:
        >>> expected("estimator", "a name", "pared", known=["paired"])
        "Expected `estimator` to be a name, but got 'pared'. Did you mean `paired`? Known: paired."
    """
    parts = [f"Expected `{argument}` to be {requirement}, but got {value!r}."]
    if known is not None:
        known = list(known)
        near = difflib.get_close_matches(str(value), known, n=1)
        if near:
            parts.append(f"Did you mean `{near[0]}`?")
        if len(known) <= _MOST_LISTED:
            parts.append(f"Known: {', '.join(known)}.")
    if hint is not None:
        parts.append(f"HINT: {hint}")
    return " ".join(parts)
