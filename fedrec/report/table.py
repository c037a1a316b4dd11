"""Printing results in the terminal, and their figures as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from fedrec.recipe.tables import name_of_recorded

__all__ = [
    "decimal",
    "detection_text",
    "exact_rounds",
    "fraction",
    "percent",
    "print_line",
    "print_results",
    "print_table",
]


def print_results(results: Mapping[str, Any], console: Console) -> None:
    """Print the content of `results.json` as tables.

    Args:
        results: Content of `results.json`.
        console: The console to print to.
    """
    name = str(results["recipe"]["name"])
    title = f"{name} (synthetic data)" if results.get("synthetic_data") else name
    models = [{"name": name_of_recorded(results), **results["poisoned"]}, *results["methods"]]
    targeted = any(model["asr"] is not None for model in models)
    rates = ("TER %", "ASR %") if targeted else ("TER %",)
    heads = (*rates, "Dis-\ntance", "ACP %", "CP %\nmin-max", "Exact\nrounds", "Seconds")
    rows = []
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
        rows.append([model["name"], *cells])
    print_table(console, ["Model", *heads], rows, title=title)
    labels = list(dict.fromkeys(label for model in models for label in model.get("metrics", {})))
    if labels:  # metrics of the recipe's own
        measured = [
            [model["name"], *(fraction(model.get("metrics", {}).get(label)) for label in labels)]
            for model in models
        ]
        print_table(console, ["Model", *labels], measured)
    console.print(detection_text(results["detection"]), markup=False, highlight=False)


def print_table(
    console: Console,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    labels: int = 1,
) -> None:
    """Print a table; where it is wider than the console even with its labels wrapped, as lists.

    Args:
        console: The console to print to.
        headings: What the columns are; one of two lines has a line break in it.
        rows: The cells, as text; those at the end of a row may be missing.
        title: Printed above.
        labels: So many columns come first that say what a row is; the others are figures.

    Examples:
        >>> from rich.console import Console
        >>> print_table(Console(width=20), ["Model", "TER %"], [["FedRecover", "8.7"]])
        <BLANKLINE>
         Model      TER %
         ────────────────
         FedRecover   8.7
        <BLANKLINE>
        >>> print_table(Console(width=12), ["Model", "TER %"], [["FedRecover", "8.7"]])
        <BLANKLINE>
        FedRecover
          TER % 8.7
        <BLANKLINE>
    """
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    for i, heading in enumerate(headings):
        lines = [*heading.split("\n"), *(row[i] for row in rows if i < len(row))]
        # Labels are wrapped, between words; figures are not.
        words = lines if i >= labels else [word for line in lines for word in line.split()]
        width = max(map(len, words))
        table.add_column(
            escape(heading), min_width=width, justify="right" if i >= labels else "left"
        )
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    if title:
        print_line(console, title)
    unlimited = console.options.update(max_width=10_000)
    if Measurement.get(console, unlimited, table).minimum <= console.width:
        console.print(table)
        return
    print_line(console, "")
    names = [heading.replace("-\n", "").replace("\n", " ") for heading in headings]
    for row in rows:
        print_line(console, ", ".join(row[:labels]))
        figures = zip(names[labels:], row[labels:], strict=False)
        text = ", ".join(f"{name} {value}" for name, value in figures)
        for line in textwrap.wrap(text, console.width - 2):
            print_line(console, f"  {line}")
    print_line(console, "")


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


def decimal(value: float | None) -> str:
    """Return a number with one digit after the point as text; a dash for `None`."""
    return "-" if value is None else f"{value:.1f}"


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
