"""Results of runs as they show themselves: in a notebook, in a terminal, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from fedrec._frames import data_frame
from fedrec.exceptions import ConfigurationError, expected
from fedrec.loop.plan import plan_text
from fedrec.recipe.step_results import method_result
from fedrec.recipe.tables import POISONED
from fedrec.report.costs import costs_table
from fedrec.report.curves import Series, line_chart, line_key, linear_axis
from fedrec.report.html import breakable, note, number, table
from fedrec.report.looks import SCALES, axis_name, looks_of, require_matplotlib
from fedrec.report.run import REFERENCE
from fedrec.report.table import decimal, exact_rounds, fraction, percent

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from fedrec.metrics.cost import CostLedger
    from fedrec.types import Detection, RunResult

__all__ = ["Comparison", "compare", "detection_html", "ledger_html", "result_html", "summary"]

# Clients whose scores and costs are listed.
_SHOWN = 20


def compare(*results: RunResult) -> Comparison:
    """Show results of `FederatedLoop.record` and `recover` side by side.

    For run folders of recipes, see `write_comparison`.

    Args:
        *results: One or more results.

    Examples:
        >>> import torch
        >>> from fedrec.types import RunResult
        >>> recorded, recovered = (
        ...     RunResult(
        ...         name=name, global_weights=torch.zeros(1), rounds=20, seconds=seconds,
        ...         curve=[{"round": 19, "ter": ter}],
        ...     )
        ...     for name, seconds, ter in (("record", 3.0, 0.5), ("FedRecover", 1.0, 0.25))
        ... )
        >>> compare(recorded, recovered)
        Model       TER %  Rounds  Seconds
        record       50.0      20      3.0
        FedRecover   25.0      20      1.0
        >>> compare(recorded, recovered).to_pandas()["ter"].tolist()
        [0.5, 0.25]
    """
    return Comparison(results)


class Comparison:
    """Several results side by side: a table in the terminal, table and curves in a notebook.

    Test figures are those of the last evaluated round, on the samples that the loop's curves are
    computed on (`eval_samples`).

    Args:
        results: One or more results. Names that repeat get a number.

    Raises:
        ConfigurationError: If there is no result, or something else is among them.
    """

    def __init__(self, results: Sequence[RunResult]) -> None:
        from fedrec.types import RunResult

        if not results or not all(isinstance(result, RunResult) for result in results):
            raise ConfigurationError(
                expected("results", "one or more `RunResult`s", [type(r).__name__ for r in results])
            )
        self.results: dict[str, RunResult] = {}
        for result in results:
            name, count = result.name, 2
            while name in self.results:
                name, count = f"{result.name} ({count})", count + 1
            self.results[name] = result

    @property
    def figures(self) -> list[str]:
        """Names of the figures that have a curve, `ter` and `asr` first."""
        named = dict.fromkeys(k for r in self.results.values() for row in r.curve for k in row)
        named.pop("round", None)
        return sorted(named, key=lambda k: (k != "ter", k != "asr"))

    def to_pandas(self) -> pd.DataFrame:
        """Return a `DataFrame` with one row per result.

        Returns:
            Columns `name`; `ter`, `asr` (fractions in [0, 1]) and the loop's metrics, after the
            last evaluated round; `acp`, `cp_min`, `cp_max` (fractions, at most 1); `exact_rounds`
            per client, on average; `client_bytes` (sent to and received from clients); `rounds`;
            `seconds` (wall clock, evaluation left out). What a result does not have is NaN.

        Raises:
            MissingDependencyError: If pandas is not installed.
        """
        rows = list(self._rows.values())
        nan = float("nan")
        return data_frame(
            {k: [nan if row.get(k) is None else row[k] for row in rows] for k in self._columns()}
        )

    def plot(self, figure: str | None = None, *, ax: Axes | None = None) -> Axes:
        """Draw the curves of one figure by matplotlib.

        Args:
            figure: One of `figures`; `None` for the first.
            ax: Where to draw; `None` for a new figure.

        Returns:
            Where they were drawn, to go on with.

        Raises:
            ConfigurationError: If no result has such a curve.
            MissingDependencyError: If matplotlib is not installed.
        """
        if figure is None and self.figures:
            figure = self.figures[0]
        if figure not in self.figures:
            hint = None if self.figures else "a curve needs test data in the federation."
            raise ConfigurationError(
                expected("figure", "one that has a curve", figure, known=self.figures, hint=hint)
            )
        if ax is None:
            ax = _new_axes()
        several, scale = len(self.results) > 1, SCALES.get(figure, 1.0)
        # A recording is in the background of what it is compared with.
        styled = {
            name: POISONED if several and result.ledger is None else name
            for name, result in self.results.items()
        }
        looks = looks_of(list(styled.values()))
        for name, result in self.results.items():
            points = _points(result, figure, scale)
            if points:
                style = {**looks[styled[name]].line, "markersize": 4, "label": name}
                ax.plot(*zip(*points, strict=True), **style)
        ax.set_xlabel("round")
        ax.set_ylabel(axis_name(figure))
        ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
        ax.spines[["top", "right"]].set_visible(False)
        if several:
            ax.legend(frameon=False)
        return ax

    @cached_property
    def _rows(self) -> dict[str, dict[str, Any]]:
        """The figures of each result by column: a ledger's take a while to compute."""
        return {name: self._row(name) for name in self.results}

    def _row(self, name: str) -> dict[str, Any]:
        """Return the figures of a result by column, those that it has."""
        result = self.results[name]
        last = {k: v for row in result.curve for k, v in row.items() if k != "round"}
        row: dict[str, Any] = {"name": name, **{k: last[k] for k in self.figures if k in last}}
        if result.ledger is not None:
            costs = method_result(result)
            row |= {k: costs[k] for k in ("acp", "cp_min", "cp_max")}
            row |= {"exact_rounds": exact_rounds(costs), "client_bytes": costs["client_bytes"]}
        return row | {"rounds": result.rounds, "seconds": result.seconds}

    def _columns(self) -> list[str]:
        """Return the names of the columns, in order, that any result has."""
        costs = ("acp", "cp_min", "cp_max", "exact_rounds", "client_bytes")
        order = ["name", *self.figures, *costs, "rounds", "seconds"]
        known = {key for row in self._rows.values() for key in row}
        return [key for key in order if key in known]

    def _cells(self) -> tuple[list[str], list[list[tuple[Any, str]]]]:
        """Return the headings and, for each result, its values with their texts."""
        keys = [k for k in self._columns() if k not in ("name", "cp_min", "cp_max")]
        heads = [_HEADS.get(k, (k, fraction))[0] for k in keys]
        rows = [
            [(row.get(k), _HEADS.get(k, (k, fraction))[1](row.get(k))) for k in keys]
            for row in self._rows.values()
        ]
        return heads, rows

    def __repr__(self) -> str:
        heads, rows = self._cells()
        lines = [["Model", *heads]]
        for name, cells in zip(self.results, rows, strict=True):
            lines.append([name, *(text for _, text in cells)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                [cells[0].ljust(widths[0])]
                + [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
            )
            for cells in lines
        )

    def _repr_html_(self) -> str:
        return _framed(self._body())

    def _body(self) -> str:
        styles = _styles(self.results)
        heads, rows = self._cells()
        body = [
            [
                f"{line_key(styles[name])}{breakable(name)}",
                *(number(value, text) for value, text in cells),
            ]
            for name, cells in zip(self.results, rows, strict=True)
        ]
        charts = "".join(self._chart(figure, styles) for figure in self.figures[:2])
        return _table("Results", ("Model", *heads), body) + charts

    def _chart(self, figure: str, styles: Mapping[str, str]) -> str:
        scale = SCALES.get(figure, 1.0)
        series = [
            Series(name, styles[name], _points(result, figure, scale))
            for name, result in reversed(self.results.items())
        ]
        series = [s for s in series if s.points]
        values = [v for s in series for _, v in s.points]
        name = axis_name(figure)
        return f"<p>{escape(name)} by round</p>{line_chart(series, name, linear_axis(values))}"


def _megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:.1f}"


# Heading and text of a column; the loop's metrics are shown as fractions.
_HEADS: dict[str, tuple[str, Any]] = {
    "ter": ("TER %", percent),
    "asr": ("ASR %", percent),
    "acp": ("ACP %", percent),
    "exact_rounds": ("Exact rounds", decimal),
    "client_bytes": ("Client MB", _megabytes),
    "rounds": ("Rounds", str),
    "seconds": ("Seconds", decimal),
}


def summary(result: RunResult) -> str:
    """Return a result in a line of text."""
    last = {k: v for row in result.curve for k, v in row.items()}
    parts = [f"{result.rounds} rounds in {result.seconds:.1f} s"]
    parts += [f"{k.upper()} {percent(last[k])} %" for k in ("ter", "asr") if k in last]
    parts += [f"{k} {fraction(v)}" for k, v in last.items() if k not in ("round", "ter", "asr")]
    if result.ledger is not None and result.ledger.cp():
        parts.append(f"ACP {percent(result.ledger.acp())} %")
    if result.detection is not None:
        parts.append(_verdict(result.detection, named=0))
    return f"{result.name}: {', '.join(parts)}"


def result_html(result: RunResult) -> str:
    """Return a result as HTML: its figures, its curves, the detection, and where its model is."""
    lines = []
    if result.detection is not None:
        lines.append(f"<p>Detection: {escape(_verdict(result.detection))}.</p>")
    if result.execution:
        # The reason why clients are computed one after another is what explains a slow run.
        why = f": {result.execution['refused']}" if "refused" in result.execution else ""
        how = plan_text(result.execution).replace("Computing", "Computed", 1)
        lines.append(note(escape(f"{how}{why}.")))
    if "departure" in result.execution:
        left = result.execution["departure"]
        text = f"The executor left its plan in round {left['round']}: {left['reason']}"
        lines.append(note(escape(text)))
    if result.checkpoint is not None:
        lines.append(note(f"Model: <code>{escape(str(result.checkpoint))}</code>"))
    return _framed(compare(result)._body() + "".join(lines))


def ledger_html(ledger: CostLedger) -> str:
    """Return a ledger as HTML: what clients were asked for, by reason and by client."""
    entries = ledger.state_dict()["rows"]
    shown = []
    for i, (reason, rounds) in enumerate(ledger.exact_rounds_by_reason().items()):
        of_reason = entries[entries[:, 2] == i]
        steps, num_bytes = of_reason[:, 3:5].sum(dim=0).tolist()
        if len(of_reason):
            cells = [number(rounds, f"{rounds:.1f}"), f"{len(of_reason):,}", f"{steps:,}"]
            shown.append([escape(reason), *cells, number(num_bytes, _megabytes(num_bytes))])
    heads = ("Reason", "Exact rounds per client", "Requests", "Local steps", "MB")
    cp = ledger.cp()
    saved = "nobody has rounds to save"
    if cp:
        low, high = percent(min(cp.values())), percent(max(cp.values()))
        saved = f"ACP {percent(ledger.acp())} %, CP {low} to {high} %"
    text = f"<p>{len(ledger.num_rounds)} clients: {saved}.</p>"
    if not shown:
        return _framed(text)
    by_client = costs_table(ledger)
    listed = [[escape(client), *cells] for client, *cells in by_client.rows]
    more = len(listed) - 1 - _SHOWN
    rest = note(f"And {more} more clients.") if more > 0 else ""
    shorter = [*listed[:-1][:_SHOWN], listed[-1]]
    clients = _table("Costs by client", by_client.heads, shorter)
    return _framed(text + _table("Costs by reason", heads, shown) + clients + rest)


def detection_html(detection: Detection) -> str:
    """Return a detection as HTML: the verdict, and the most suspicious clients."""
    text = f"<p>Detection: {escape(_verdict(detection))}.</p>"
    scores = sorted(detection.scores.items(), key=lambda item: (-item[1], item[0]))
    flagged = frozenset(detection.malicious)
    rows = [
        [escape(client), number(score, f"{score:.3g}"), "flagged" if client in flagged else ""]
        for client, score in scores[:_SHOWN]
    ]
    more = len(scores) - len(rows)
    rest = note(f"And {more} less suspicious clients.") if more else ""
    body = _table("Scores", ("Client", "Score", "Verdict"), rows) if rows else ""
    return _framed(text + body + rest)


def _verdict(detection: Detection, named: int = 10) -> str:
    """Return a detection as text, with the names of as many clients."""
    when = "" if detection.round is None else f" in round {detection.round}"
    text = f"flagged {len(detection.malicious)} of {len(detection.seen)} clients{when}"
    listed = ", ".join(detection.malicious[:named])
    more = ", ..." if len(detection.malicious) > named else ""
    return f"{text}: {listed}{more}" if listed else text


def _styles(names: Mapping[str, RunResult]) -> dict[str, str]:
    """Return the CSS class of each result's curve: a recording's, the reference's, a method's."""
    styles, taken = {}, 0
    for name, result in names.items():
        if result.ledger is None:
            styles[name] = "poisoned" if len(names) > 1 else "method-0"
        elif result.name == "TrainFromScratch":
            styles[name] = REFERENCE
        else:
            styles[name] = f"method-{taken % 8}{' second' if taken // 8 % 2 else ''}"
            taken += 1
    return styles


def _points(result: RunResult, figure: str, scale: float) -> list[tuple[float, float]]:
    rows = [row for row in result.curve if figure in row]
    return [(row["round"], round(scale * row[figure], 10)) for row in rows]


def _table(label: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    # With a class, so that pages that dress up tables without one leave it alone.
    return table(label, heads, rows, "figures")


def _new_axes() -> Axes:
    require_matplotlib()
    from matplotlib import pyplot as plt

    # Of pyplot, so that a notebook shows it.
    axes: Axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")[1]
    return axes


def _framed(body: str) -> str:
    """Return HTML with the style sheet, which takes text and lines in the page's own colour.

    So it can be read on light and on dark pages, whatever they are told apart by.
    """
    style = (resources.files("fedrec.report") / "notebook.css").read_text(encoding="utf-8")
    return f'<div class="fedrec"><style>{style}</style>{body}</div>'
