"""The result table in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["detection_text", "exact_rounds", "fraction", "percent", "print_results"]


def print_results(results: Mapping[str, Any], console: Console) -> None:
    """Print what `results.json` holds.

    Args:
        results: Its content.
        console: Where to.
    """
    name = escape(str(results["recipe"]["name"]))
    table = Table(title=name, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("Model", overflow="fold", min_width=26)
    for heading in ("TER", "ASR", "ACP %", "CP %\nmin-max", "Exact\nrounds", "Seconds"):
        table.add_column(heading, justify="right")
    poisoned = results["poisoned"]
    table.add_row("Poisoned", fraction(poisoned["ter"]), fraction(poisoned["asr"]), "", "", "", "")
    for method in results["methods"]:
        table.add_row(
            escape(method["name"]),
            fraction(method["ter"]),
            fraction(method["asr"]),
            percent(method["acp"]),
            f"{percent(method['cp_min'])}-{percent(method['cp_max'])}",
            f"{exact_rounds(method):.1f}",
            f"{method['seconds']:.1f}",
        )
    console.print(table)
    console.print(detection_text(results["detection"]), markup=False, highlight=False)


def fraction(value: float | None) -> str:
    """Format a fraction in [0, 1].

    Examples:
        >>> fraction(0.0517), fraction(None)
        ('0.052', '-')
    """
    return "-" if value is None else f"{value:.3f}"


def percent(value: float | None) -> str:
    """Format a percentage, without its sign.

    Examples:
        >>> percent(88.9), percent(None)
        ('88.9', '-')
    """
    return "-" if value is None else f"{value:.1f}"


def exact_rounds(method: Mapping[str, Any]) -> float:
    """Return in how many rounds a remaining client was asked, on average.

    Examples:
        >>> exact_rounds({"exact_rounds_by_reason": {"warmup": 20.0, "final": 5.0}})
        25.0
    """
    return float(sum(method["exact_rounds_by_reason"].values()))


def detection_text(detection: Mapping[str, Any] | None) -> str:
    """Say in a sentence or two what was detected.

    Examples:
        >>> detection_text({"malicious": ["a"], "fnr": 0.0, "fpr": 0.5, "round": 40})
        'Flagged as malicious in round 40: a. FNR 0.000, FPR 0.500.'
        >>> detection_text(None)
        'No detection.'
    """
    if detection is None:
        return "No detection."
    if not detection["malicious"]:
        found = "Nobody was flagged as malicious, so recoveries leave nobody out."
    else:
        when = "" if detection["round"] is None else f" in round {detection['round']}"
        found = f"Flagged as malicious{when}: {', '.join(detection['malicious'])}."
    return f"{found} FNR {fraction(detection['fnr'])}, FPR {fraction(detection['fpr'])}."
