"""The results of a sweep as two tables: every run, and mean and deviation over repeats."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrec._files import write_atomically
from fedrec.exceptions import ConfigurationError, expected
from fedrec.metrics import REASONS
from fedrec.recipe.step_results import CONVERGENCE

__all__ = [
    "COLUMNS",
    "METRIC",
    "POISONED",
    "UNPOISONED",
    "figures_of",
    "method_rows",
    "name_of_recorded",
    "read_table",
    "summarize",
    "synthetic_text",
    "write_table",
]

#: Names of the recorded model in the column `method`: with and without malicious clients.
POISONED = "Poisoned"
UNPOISONED = "Recorded"

#: Prefix of the columns of a recipe's own metrics, which follow `COLUMNS`.
METRIC = "metrics."

_FIGURES = (
    "ter",
    "asr",
    "distance",
    "relative_distance",
    "acp",
    "cp_min",
    "cp_max",
    "exact_rounds",
    *(f"exact_{reason}" for reason in REASONS),
    "client_bytes",
    *CONVERGENCE,
    "seconds",
    "num_excluded",
    "fnr",
    "fpr",
    "history_bytes",
)

#: Columns of `results.csv` that follow those of the swept keys.
COLUMNS = ("seed", "repeat", "method", *_FIGURES, "synthetic_data", "failure", "folder")

Row = dict[str, Any]


def name_of_recorded(results: Mapping[str, Any]) -> str:
    """Return the name of a run's recorded model: "Recorded" if no client was malicious.

    Args:
        results: Content of `results.json`. If it has no list of malicious clients, the name is
            "Poisoned".

    Examples:
        >>> name_of_recorded({"recording": {"malicious": ["client-3"]}})
        'Poisoned'
        >>> name_of_recorded({"recording": {"malicious": []}})
        'Recorded'
    """
    return UNPOISONED if results.get("recording", {}).get("malicious") == [] else POISONED


def method_rows(results: Mapping[str, Any]) -> list[Row]:
    """Return one row for the recorded model and one for every method of a run.

    Args:
        results: Content of `results.json`.

    Returns:
        Rows with the columns from `method` on, except `folder`; a figure that does not apply is
        `None`. A recipe's own metrics go by `METRIC` and their label.

    Examples:
        >>> method = {"name": "A", "ter": 0.1, "asr": None, "acp": 0.75, "cp_min": 0.7,
        ...     "cp_max": 0.8, "exact_rounds_by_reason": {"warmup": 2.0, "final": 0.5},
        ...     "client_bytes": 80, "seconds": 1.5, "excluded": ["a", "b"], "metrics": {}}
        >>> results = {"poisoned": {"ter": 0.9, "asr": None, "metrics": {}}, "detection": None,
        ...     "methods": [method], "history": {"bytes": 1000}, "synthetic_data": False}
        >>> [(r["method"], r["ter"], r["exact_rounds"]) for r in method_rows(results)]
        [('Poisoned', 0.9, None), ('A', 0.1, 2.5)]
    """
    detection = results["detection"] or {}
    shared = {
        "fnr": detection.get("fnr"),
        "fpr": detection.get("fpr"),
        "history_bytes": results["history"]["bytes"],
        "failure": None,
    }
    shared["synthetic_data"] = str(results["synthetic_data"]).lower()
    empty = dict.fromkeys(_FIGURES)
    poisoned = {k: v for k, v in results["poisoned"].items() if k != "metrics"}
    poisoned |= _metrics(results["poisoned"])
    rows = [{"method": name_of_recorded(results), **empty, **poisoned, **shared}]
    for method in results["methods"]:
        reasons = {f"exact_{k}": v for k, v in method["exact_rounds_by_reason"].items()}
        figures = {name: method[name] for name in _FIGURES if name in method}
        more = {
            "exact_rounds": sum(reasons.values()),
            "num_excluded": len(method["excluded"]),
            **_metrics(method),
        }
        rows.append({"method": method["name"], **empty, **figures, **reasons, **more, **shared})
    return rows


def _metrics(model: Mapping[str, Any]) -> Row:
    return {f"{METRIC}{label}": value for label, value in model["metrics"].items()}


def figures_of(rows: Sequence[Row]) -> list[str]:
    """Return the names of the columns with numbers, those of a recipe's own metrics included.

    Args:
        rows: Rows of `results.csv`.

    Examples:
        >>> figures_of([{"method": "A", "ter": 0.25, "metrics.auc": 0.5}])[-1]
        'metrics.auc'
    """
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(METRIC))
    return [*_FIGURES, *names]


def synthetic_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a remark for rows about made-up data; an empty text if all data are real.

    Args:
        rows: Rows of `results.csv` or `summary.csv`.

    Examples:
        >>> made_up, real = {"synthetic_data": "true"}, {"synthetic_data": "false"}
        >>> synthetic_text([made_up]), synthetic_text([made_up, real]), synthetic_text([real])
        ('synthetic data', 'in part synthetic data', '')
    """
    known = {row.get("synthetic_data") or None for row in rows} - {None}
    if "true" not in known:
        return ""
    return "synthetic data" if len(known) == 1 else "in part synthetic data"


def summarize(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """Return mean and standard deviation over repeats.

    Args:
        rows: Rows of `results.csv`.
        keys: The swept keys.

    Returns:
        A row for every point and method, in the order of `rows`. It has the keys, `method`,
        `failures` and `repeats` (the numbers of repeats that failed and that did not),
        `synthetic_data`, and for every figure its `_mean` and `_std` over the repeats that have it.
        `_std` is the deviation of the sample ($n - 1$), `None` for a single repeat.

    Examples:
        >>> rows = [{"k": "1", "method": "A", "ter": 0.25}, {"k": "1", "method": "A", "ter": 0.75}]
        >>> row, = summarize(rows, ["k"])
        >>> row["repeats"], row["ter_mean"], round(row["ter_std"], 4), row["acp_mean"]
        (2, 0.5, 0.3536, None)
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in (*keys, "method")), []).append(row)
    summary, figures = [], figures_of(rows)
    for point, group in groups.items():
        line: Row = dict(zip((*keys, "method"), point, strict=True))
        line["failures"] = sum(bool(row.get("failure")) for row in group)
        line["repeats"] = len(group) - line["failures"]
        # The same for all repeats, but missing in those that failed.
        texts = (row["synthetic_data"] for row in group if row.get("synthetic_data"))
        line["synthetic_data"] = next(texts, None)
        for figure in figures:
            values = [row[figure] for row in group if row.get(figure) is not None]
            line[f"{figure}_mean"] = statistics.fmean(values) if values else None
            line[f"{figure}_std"] = statistics.stdev(values) if len(values) > 1 else None
        summary.append(line)
    return summary


def write_table(path: Path, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Write rows to a CSV file; `None` is an empty cell, and numbers keep all of their digits.

    Args:
        path: The file.
        rows: The rows.
        columns: The columns, in order.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())


def read_table(path: str | Path) -> tuple[list[Row], list[str]]:
    """Read `results.csv`.

    Args:
        path: The file, or the folder of a sweep.

    Returns:
        The rows, with figures as numbers and everything else as text; and the swept keys.

    Raises:
        ConfigurationError: If the file is not a sweep's `results.csv`.
    """
    path = Path(path)
    path = path / "results.csv" if path.is_dir() else path
    hint = "`fedrec sweep RECIPE key=value,value` makes one."
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            rows: list[Row] = list(reader)
            columns = list(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        requirement = "the folder of a sweep or its results.csv"
        raise ConfigurationError(expected("SWEEP", requirement, str(path), hint=hint)) from error
    missing = [column for column in COLUMNS if column not in columns]
    if missing:
        raise ConfigurationError(
            f"Expected `{path}` to have the columns of a sweep, but it lacks "
            f"{', '.join(missing)}. HINT: {hint}"
        )
    figures = figures_of(rows)
    for row in rows:
        for figure in figures:
            try:
                row[figure] = float(row[figure]) if row[figure] else None
            except ValueError as error:
                raise ConfigurationError(
                    f"{path}: {expected(figure, 'a number', row[figure])}"
                ) from error
    return rows, columns[: columns.index("seed")]
