"""The execution plan, which is chosen before round 0: as text, compared, and as carried out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedrec.exceptions import ConfigurationError
from fedrec.executors.base import Executor

__all__ = ["carried_out", "plan_text", "require_same_plan"]


def plan_text(plan: Mapping[str, Any]) -> str:
    """Return in words how updates are computed.

    Examples:
        >>> plan_text({"executor": "SequentialExecutor", "device": "cpu", "threads": 1})
        'Computing on cpu (SequentialExecutor, 1 thread)'
    """
    path = plan.get("path", plan["executor"])
    threads = plan["threads"]
    plural = "" if threads == 1 else "s"
    return f"Computing on {plan['device']} ({path}, {threads} thread{plural})"


def require_same_plan(recorded: Mapping[str, Any], current: Mapping[str, Any], what: str) -> None:
    """Raise `ConfigurationError` if a run is resumed under another execution plan.

    Its bits would change. The number of threads is not compared: a resumed run takes it over.
    """
    names = sorted(set(recorded) | set(current))
    differences = [
        f"{name}: {recorded.get(name)!r} then, {current.get(name)!r} now"
        for name in names
        if name != "threads" and recorded.get(name) != current.get(name)
    ]
    if differences:
        raise ConfigurationError(
            f"Cannot resume {what} under another execution plan, since its bits would differ "
            f"({'; '.join(differences)}). HINT: use the same executor, precision, device, "
            "`num_shards` and packages."
        )


def carried_out(plan: Mapping[str, Any], executor: Executor) -> dict[str, Any]:
    """Return the plan; if the executor left it, with the reason under `departure`."""
    departure = executor.departure
    return {**plan} if departure is None else {**plan, "departure": dict(departure)}
