"""Argument checks shared by all components."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

from fedrec.exceptions import ConfigurationError, expected

__all__ = [
    "as_float",
    "check_bool",
    "check_choice",
    "check_client_id",
    "check_float",
    "check_instance",
    "check_int",
    "check_recording",
    "check_recovery",
    "is_fraction",
    "is_integer",
    "is_number",
    "of_class",
]


def is_number(value: object) -> bool:
    """Whether a value is a real number of Python or NumPy; true and false are not numbers."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """Whether a value is an integer of Python or NumPy; true and false are not integers."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_fraction(value: object) -> bool:
    """Whether a value is a number of another type than the integer types; 1.0 is."""
    return is_number(value) and not is_integer(value)


def check_bool(argument: str, value: object) -> bool:
    """Return `value` if it is true or false, else raise `ConfigurationError`."""
    if not isinstance(value, bool):
        raise ConfigurationError(expected(argument, "true or false", value))
    return value


def check_int(
    argument: str, value: object, *, minimum: int | None = None, hint: str | None = None
) -> int:
    """Return `value` as an `int` of at least `minimum`, else raise `ConfigurationError`."""
    requirement = "an integer" if minimum is None else f"an integer of at least {minimum}"
    number: Any = value
    if not is_integer(value) or (minimum is not None and number < minimum):
        raise ConfigurationError(expected(argument, requirement, value, hint=hint))
    return int(number)


def check_float(
    argument: str,
    value: object,
    *,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    open_minimum: bool = False,
    open_maximum: bool = False,
) -> float:
    """Return `value` as a finite `float` in the interval, else raise `ConfigurationError`."""
    left = "(" if open_minimum or minimum == -math.inf else "["
    right = ")" if open_maximum or maximum == math.inf else "]"
    requirement = f"a finite number in {left}{minimum:g}, {maximum:g}{right}"
    number = as_float(value) if is_number(value) else math.nan
    ok = (
        math.isfinite(number)
        and (number > minimum if open_minimum else number >= minimum)
        and (number < maximum if open_maximum else number <= maximum)
    )
    if not ok:
        raise ConfigurationError(expected(argument, requirement, value))
    return number


def as_float(number: Any) -> float:
    """Return the float that is written like a number: 0.29 for `numpy.float32(0.29)`."""
    try:
        return float(str(number))
    except ValueError:  # a `Fraction` is written as 1/3
        return float(number)


def check_choice(argument: str, value: object, known: Iterable[str]) -> str:
    """Return `value` if it is one of `known`, else raise `ConfigurationError`."""
    known = list(known)
    if not isinstance(value, str) or value not in known:
        raise ConfigurationError(expected(argument, "a known choice", value, known=known))
    return value


def check_client_id(value: object) -> str:
    """Return `value` if it can be a client's id in every file, else raise `ConfigurationError`."""
    ok = isinstance(value, str) and 0 < len(value) <= 200 and "\0" not in value
    # The halves of a character that UTF-8 lacks, as names of files that are no text have them.
    if not ok or any("\ud800" <= letter <= "\udfff" for letter in str(value)):
        requirement = "a string of 1 to 200 characters of Unicode, none of them NUL"
        raise ConfigurationError(expected("client_id", requirement, value))
    return str(value)


def check_instance(argument: str, value: object, kind: type, *, optional: bool = False) -> None:
    """Raise `ConfigurationError` unless `value` is an object of this class, or `None` if allowed.

    Args:
        argument: Name of the argument, for the error.
        value: The argument's value.
        kind: The class.
        optional: Whether `None` is allowed.
    """
    if isinstance(value, kind) or (optional and value is None):
        return
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    hint = of_class(value) if isinstance(value, type) and issubclass(value, kind) else None
    requirement = f"{article} {kind.__name__}{' or None' if optional else ''}"
    raise ConfigurationError(expected(argument, requirement, value, hint=hint))


def of_class(value: object) -> str | None:
    """Return the hint for a class in the place of its object, or `None` if it is none."""
    return (
        f"this is a class; `{value.__name__}(...)` makes one." if isinstance(value, type) else None
    )


def check_recording(
    *,
    max_rounds: object,
    server_lr: object,
    on_bad_update: object = "raise",
    stop_on_detection: object = False,
    detector: object = None,
    **others: object,
) -> tuple[int, float]:
    """Check the plain arguments of `FederatedLoop.record`; return `max_rounds` and `server_lr`."""
    check_choice("on_bad_update", on_bad_update, ("raise", "drop"))
    if check_bool("stop_on_detection", stop_on_detection) and detector is None:
        hint = "add a detector, or record without."
        raise ConfigurationError(
            expected("stop_on_detection", "false without a detector", True, hint=hint)
        )
    return (
        check_int("max_rounds", max_rounds, minimum=1),
        check_float("server_lr", server_lr, minimum=0, open_minimum=True),
    )


def check_recovery(
    *,
    max_rounds: object = None,
    server_lr: object = None,
    batch_policy: object = "replay",
    on_bad_update: object = "raise",
    **others: object,
) -> tuple[int | None, float | None]:
    """Check the plain arguments of `FederatedLoop.recover`; return `max_rounds` and `server_lr`."""
    check_choice("batch_policy", batch_policy, ("replay", "fresh"))
    check_choice("on_bad_update", on_bad_update, ("raise", "drop"))
    return (
        None if max_rounds is None else check_int("max_rounds", max_rounds, minimum=1),
        None
        if server_lr is None
        else check_float("server_lr", server_lr, minimum=0, open_minimum=True),
    )


def check_fraction(
    argument: str, value: float | str, names: tuple[str, ...], *, positive: bool = False
) -> float | str:
    """Return a number in [0, 1], or (0, 1] with `positive`, or one of these names."""
    if isinstance(value, str):
        if value not in names:
            interval = "(0, 1]" if positive else "[0, 1]"
            requirement = f"a number in {interval}, or a name"
            raise ConfigurationError(expected(argument, requirement, value, known=names))
        return value
    return check_float(argument, value, minimum=0, maximum=1, open_minimum=positive)
