"""A page that compares several runs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from fedrec._files import write_atomically
from fedrec.recipe.tables import name_of_recorded
from fedrec.report.bars import cost_bars
from fedrec.report.curves import line_chart, line_key, linear_axis
from fedrec.report.html import breakable, document, note, number, section, table
from fedrec.report.run import REFERENCE, Run, styles_of
from fedrec.report.sections import CURVES, synthetic
from fedrec.report.table import decimal, detection_text, exact_rounds, fraction, percent

__all__ = ["write_comparison"]


_Method = Mapping[str, Any]
_Tables = tuple[tuple[str, Callable[[_Method], float | None], Callable[[float | None], str]], ...]
_TABLES: _Tables = (
    ("Test error rate (TER, %)", lambda m: m["ter"], percent),
    ("Attack success rate (ASR, %)", lambda m: m["asr"], percent),
    ("Relative distance to training from scratch", lambda m: m.get("relative_distance"), fraction),
    ("Average cost-saving percentage (ACP, %)", lambda m: m.get("acp"), percent),
    (
        "Exact rounds per client",
        lambda m: exact_rounds(m) if "exact_rounds_by_reason" in m else None,
        decimal,
    ),
    ("Seconds", lambda m: m.get("seconds"), decimal),
)


def write_comparison(folders: Sequence[str | Path], output: str | Path = "report.html") -> Path:
    """Write one page about several runs: their results, and the settings that differ.

    Args:
        folders: Run folders with `results.json`.
        output: File to write.

    Returns:
        The file.
    """
    runs = [Run(Path(folder)) for folder in folders]
    names = _names(runs)
    styles = styles_of(*(run.results["recipe"] for run in runs))
    pairs = list(zip(names, runs, strict=True))
    parts = [
        section("Methods and runs", _tables(pairs, styles)),
        *(section(title, _curves(pairs, figure, styles)) for figure, title in CURVES.items()),
        section("What recovery costs clients, by reason", _costs(pairs)),
        section("Detection", _detections(pairs)),
        section("Settings that differ", _differences(pairs, "recipe")),
        section("Versions and execution that differ", _differences(pairs, "execution", "versions")),
        section("Do it again", _again(runs, Path(output))),
    ]
    header = f"<p>{escape(', '.join(names))}</p>" + "".join(
        synthetic(run).replace(">Synthetic data:", f">{escape(name)}: synthetic data:", 1)
        for name, run in pairs
    )
    path = Path(output)
    title = f"Comparison of {len(runs)} runs"
    write_atomically(path, document(title, "fedrec report", header, "".join(parts)))
    return path


def _names(runs: Sequence[Run]) -> list[str]:
    """Return the names of the recipes, or the folders if two names are the same."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def _tables(pairs: Sequence[tuple[str, Run]], styles: Mapping[str, str]) -> str:
    """Return one table of methods and runs for each figure."""
    by_run: list[dict[str, _Method]] = []
    for _, run in pairs:
        by_name = {method["name"]: method for method in run.methods}
        name = f"{name_of_recorded(run.results)} model"
        by_run.append({name: run.results["poisoned"], **by_name})
    methods = list(dict.fromkeys(name for models in by_run for name in models))
    blocks = []
    labels = dict.fromkeys(
        k for models in by_run for m in models.values() for k in m.get("metrics", {})
    )
    own: _Tables = tuple((label, partial(_metric, label), fraction) for label in labels)
    for title, value_of, show in (*_TABLES, *own):
        rows = []
        for method in methods:
            values = [value_of(models[method]) if method in models else None for models in by_run]
            if any(value is not None for value in values):
                style = styles.get(method, "poisoned")
                remark = " <small>(reference)</small>" if style == REFERENCE else ""
                cells = [number(value, show(value)) for value in values]
                rows.append([f"{line_key(style)}{breakable(method)}{remark}", *cells])
        if rows:
            heads = ("Model", *(name for name, _ in pairs))
            blocks.append(f"<h3>{escape(title)}</h3>{table(title, heads, rows)}")
    return "".join(blocks) + note(
        "TER and ASR: on the whole test set. Methods with the same name share a row, even if their "
        "settings differ."
    )


def _metric(label: str, model: _Method) -> float | None:
    value: float | None = model.get("metrics", {}).get(label)
    return value


def _curves(pairs: Sequence[tuple[str, Run]], figure: str, styles: Mapping[str, str]) -> str:
    """Draw the runs' curves side by side, with the same axis of values."""
    series = [(name, run.curves(figure, styles)) for name, run in pairs]
    values = [v for _, curves in series for curve in curves for _, v in curve.points]
    if not values:
        return ""
    axis, title = linear_axis(values), CURVES[figure].removesuffix(" by round")
    blocks = [
        f"<div><h3>{escape(name)}</h3>{line_chart(curves, f'{name}: {title}', axis)}</div>"
        for name, curves in series
        if curves
    ]
    return f'<div class="side charts">{"".join(blocks)}</div>'


def _costs(pairs: Sequence[tuple[str, Run]]) -> str:
    longest = max((exact_rounds(m) for _, run in pairs for m in run.methods), default=0.0)
    return "".join(
        f"<h3>{escape(name)}</h3>{cost_bars(run.methods, longest)}"
        for name, run in pairs
        if run.methods
    )


def _detections(pairs: Sequence[tuple[str, Run]]) -> str:
    rows = [[escape(name), escape(detection_text(run.results["detection"]))] for name, run in pairs]
    return table("Detection", (), rows, "facts")


def _differences(pairs: Sequence[tuple[str, Run]], *parts: str) -> str:
    """Return a table of the settings that are not the same in all runs."""
    by_run = [
        {key: value for part in parts for key, value in _flat(run.results[part]).items()}
        for _, run in pairs
    ]
    keys = list(dict.fromkeys(key for values in by_run for key in values))
    rows = [
        [escape(key), *(escape(str(values.get(key, "-"))) for values in by_run)]
        for key in keys
        if key != "name" and len({repr(values.get(key)) for values in by_run}) > 1
    ]
    if not rows:
        return "<p>None.</p>"
    heads = ("Setting", *(name for name, _ in pairs))
    return table("What differs", heads, rows, "differences")


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """Return the values of nested mappings and lists by dotted key, without `.class_path`."""
    if isinstance(value, Mapping):
        items = [(str(k), v) for k, v in value.items()]
    elif isinstance(value, list) and any(isinstance(v, Mapping | list) for v in value):
        items = [(str(i), v) for i, v in enumerate(value)]
    else:
        return {key.removesuffix(".class_path"): value}
    nested = [_flat(v, f"{key}.{k}" if key else k) for k, v in items]
    return {k: v for part in nested for k, v in part.items()}


def _again(runs: Sequence[Run], output: Path) -> str:
    """Return the commands that repeat the runs and write the page again."""
    lines = [["fedrec", "report", *(str(run.folder) for run in runs), "-o", str(output)]]
    lines = [["fedrec", "run", str(run.folder / "recipe.yaml")] for run in runs] + lines
    text = "\n".join(shlex.join(line) for line in lines)
    return f'<pre tabindex="0">{escape(text)}</pre>'
