"""Argument checks shared by all components."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fedrec.exceptions import ConfigurationError, expected

__all__ = [
    "check_bool",
    "check_choice",
    "check_float",
    "check_int",
    "check_recording",
    "check_recovery",
]


def check_bool(argument: str, value: object) -> bool:
    """Return `value` if it is true or false, else raise `ConfigurationError`."""
    if not isinstance(value, bool):
        raise ConfigurationError(expected(argument, "true or false", value))
    return value


def check_int(
    argument: str, value: object, *, minimum: int | None = None, hint: str | None = None
) -> int:
    """Return `value` if it is an integer of at least `minimum`, else raise `ConfigurationError`."""
    requirement = "an integer" if minimum is None else f"an integer of at least {minimum}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationError(expected(argument, requirement, value, hint=hint))
    if minimum is not None and value < minimum:
        raise ConfigurationError(expected(argument, requirement, value, hint=hint))
    return value


def check_float(
    argument: str,
    value: object,
    *,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    open_minimum: bool = False,
    open_maximum: bool = False,
    hint: str | None = None,
) -> float:
    """Return `value` as a finite float inside the interval, else raise `ConfigurationError`."""
    left = "(" if open_minimum or minimum == -math.inf else "["
    right = ")" if open_maximum or maximum == math.inf else "]"
    requirement = f"a finite number in {left}{minimum:g}, {maximum:g}{right}"
    ok = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and (value > minimum if open_minimum else value >= minimum)
        and (value < maximum if open_maximum else value <= maximum)
    )
    if not ok:
        raise ConfigurationError(expected(argument, requirement, value, hint=hint))
    return float(value)  # type: ignore[arg-type]


def check_choice(argument: str, value: object, known: Iterable[str]) -> str:
    """Return `value` if it is one of `known`, else raise `ConfigurationError`."""
    known = list(known)
    if not isinstance(value, str) or value not in known:
        raise ConfigurationError(expected(argument, "a known choice", value, known=known))
    return value


def check_recording(
    *, max_rounds: object, server_lr: object, on_bad_update: object = "raise", **others: object
) -> None:
    """Check the plain arguments of `FederatedLoop.record`."""
    check_int("max_rounds", max_rounds, minimum=1)
    check_float("server_lr", server_lr, minimum=0, open_minimum=True)
    check_choice("on_bad_update", on_bad_update, ("raise", "drop"))


def check_recovery(
    *,
    max_rounds: object = None,
    server_lr: object = None,
    batch_policy: object = "replay",
    on_bad_update: object = "raise",
    **others: object,
) -> None:
    """Check the plain arguments of `FederatedLoop.recover`."""
    check_choice("batch_policy", batch_policy, ("replay", "fresh"))
    check_choice("on_bad_update", on_bad_update, ("raise", "drop"))
    if max_rounds is not None:
        check_int("max_rounds", max_rounds, minimum=1)
    if server_lr is not None:
        check_float("server_lr", server_lr, minimum=0, open_minimum=True)
