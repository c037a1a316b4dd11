"""Printing results in the terminal, and their figures as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedrec.recipe.tables import name_of_recorded

__all__ = ["detection_text", "exact_rounds", "fraction", "percent", "print_line", "print_results"]

# Width in letters of all columns of figures, which are as long as 12.3, 0.123, 100.0-100.0 and
# 12345.6, with the space between them.
_FIGURES = 53


def print_results(results: Mapping[str, Any], console: Console) -> None:
    """Print the content of `results.json` as tables.

    Args:
        results: Content of `results.json`.
        console: The console to print to.
    """
    name = str(results["recipe"]["name"])
    title = escape(f"{name} (synthetic data)" if results.get("synthetic_data") else name)
    models = [{"name": name_of_recorded(results), **results["poisoned"]}, *results["methods"]]
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    # Names are not broken, unless the figures would not fit.
    room = max(console.width - _FIGURES, 20)
    longest = max(len(model["name"]) for model in models)
    table.add_column("Model", overflow="fold", min_width=min(longest, room))
    targeted = any(model["asr"] is not None for model in models)
    rates = ("TER %", "ASR %") if targeted else ("TER %",)
    heads = (*rates, "Dis-\ntance", "ACP %", "CP %\nmin-max", "Exact\nrounds", "Seconds")
    for heading in heads:
        table.add_column(heading, justify="right")
    for model in models:
        cells = [percent(model["ter"]), *([percent(model["asr"])] if targeted else [])]
        cells.append(fraction(model.get("relative_distance")))
        if "acp" in model:
            cells += [
                percent(model["acp"]),
                f"{percent(model['cp_min'])}-{percent(model['cp_max'])}",
                f"{exact_rounds(model):.1f}",
                f"{model['seconds']:.1f}",
            ]
        table.add_row(escape(model["name"]), *cells)
    console.print(table)
    _print_metrics(models, console)
    console.print(detection_text(results["detection"]), markup=False, highlight=False)


def _print_metrics(models: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print a table of the recipe's own metrics, if there are any."""
    labels = list(dict.fromkeys(label for model in models for label in model.get("metrics", {})))
    if not labels:
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("Model", overflow="fold", min_width=26)
    for label in labels:
        table.add_column(escape(label), justify="right", overflow="fold")
    for model in models:
        values = [fraction(model.get("metrics", {}).get(label)) for label in labels]
        table.add_row(escape(model["name"]), *values)
    console.print(table)


def print_line(console: Console, text: str) -> None:
    """Print a line of text as it is: without markup, colours or line breaks."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def fraction(value: float | None) -> str:
    """Return a fraction in [0, 1] as text.

    Examples:
        >>> fraction(0.0517), fraction(None)
        ('0.052', '-')
    """
    return "-" if value is None else f"{value:.3f}"


def percent(value: float | None) -> str:
    """Return a fraction in percent as text, without the sign, which a heading or label has.

    Examples:
        >>> percent(0.8888), percent(None)
        ('88.9', '-')
    """
    return "-" if value is None else f"{100 * value:.1f}"


def exact_rounds(method: Mapping[str, Any]) -> float:
    """Return the mean number of rounds in which a remaining client was asked.

    Examples:
        >>> exact_rounds({"exact_rounds_by_reason": {"warmup": 20.0, "final": 5.0}})
        25.0
    """
    return float(sum(method["exact_rounds_by_reason"].values()))


def detection_text(detection: Mapping[str, Any] | None) -> str:
    """Return a detection in a sentence or two.

    Examples:
        >>> detection_text({"malicious": ["a"], "fnr": 0.0, "fpr": 0.5, "round": 40})
        'Flagged as malicious in round 40: a. FNR 0.000, FPR 0.500.'
        >>> detection_text(None)
        'No detection.'
    """
    if detection is None:
        return "No detection."
    if not detection["malicious"]:
        verdict = "Nobody was flagged as malicious; recoveries need `recover.exclude`."
    else:
        when = "" if detection["round"] is None else f" in round {detection['round']}"
        verdict = f"Flagged as malicious{when}: {', '.join(detection['malicious'])}."
    return f"{verdict} FNR {fraction(detection['fnr'])}, FPR {fraction(detection['fpr'])}."
