"""Figures of a sweep and of a run, for papers. They need matplotlib (`fedrec[plot]`)."""

from __future__ import annotations

import logging
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedrec.exceptions import ConfigurationError
from fedrec.recipe.grid import short_keys
from fedrec.recipe.tables import Row, synthetic_text
from fedrec.report.looks import LINE, SCALES, Look, axis_name, blank, key_name, legend, looks_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_box", "draw_cost", "draw_cp", "draw_values"]

_log = logging.getLogger(__name__)

_MOST_PANELS = 12
_BINS = 16
# Letters that fit along the height of a panel.
_ALONG = 22


def draw_values(
    rows: Sequence[Row],
    keys: Sequence[str],
    *,
    x: str,
    y: Sequence[str],
    by: str = "method",
    names: Sequence[str] = (),
) -> Figure:
    """Draw figures against a swept key: lines if its values are numbers, bars otherwise.

    Panels are in columns by figure and in rows by combinations of the other keys, or the other way
    round if that is narrower. Marks are means over repeats, error bars standard deviations. The
    axis is logarithmic if its values span a decade or more.

    Args:
        rows: Rows of `results.csv`.
        keys: The swept keys.
        x: The key along the axis.
        y: Columns of figures.
        by: The key, or `"method"`, whose values have different colours.
        names: All values of `by` in the sweep, in order, so that a value has the same look in all
            its figures; by default the values in `rows`.

    Returns:
        The figure.

    Raises:
        ConfigurationError: If there is nothing to draw, or there are too many panels.
        MissingDependencyError: If matplotlib is not installed.

    Examples:
        >>> rows = [{"trim": x, "method": "A", "ter": float(x)} for x in ("0.1", "0.2")]
        >>> figure = draw_values(rows, ["trim"], x="trim", y=["ter"])
        >>> figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()
        ('trim', 'TER, %')
    """
    y = [figure for figure in y if any(row.get(figure) is not None for row in rows)]
    panels = _panels(rows, [k for k in (*keys, "method") if k not in (x, by)])
    if not rows or not y:
        raise ConfigurationError("Expected rows with figures to draw, but there are none.")
    values = list(dict.fromkeys(row[x] for row in rows))
    looks = looks_of([row[by] for row in rows], names)
    numeric = all(_number(value) is not None for value in values) and len(values) > 1
    columns, lines = sorted((len(y), len(panels)))
    with blank(columns, lines, note=synthetic_text(rows)) as figure:
        axes = figure.subplots(lines, columns, squeeze=False, sharex=True)
        by_panel = axes.T if len(panels) < len(y) else axes
        draw = _lines if numeric else _bars
        for line, (title, panel) in zip(by_panel, panels.items(), strict=True):
            for ax, name in zip(line, y, strict=True):
                draw(ax, panel, x, values, name, by, looks)
                _label(ax, name)
            line[0].set_title(title, loc="left")
        for ax in axes[-1]:
            ax.set_xlabel(key_name(x, keys))
        if by != x:
            legend(figure, key_name(by, keys))
    return figure


def draw_cost(
    rows: Sequence[Row],
    keys: Sequence[str],
    *,
    y: str = "ter",
    by: str = "method",
    names: Sequence[str] = (),
) -> Figure:
    """Draw a figure against exact rounds per client: one mark for every point and method.

    Args:
        rows: Rows of `results.csv`.
        keys: The swept keys.
        y: Column of the figure.
        by: As in `draw_values`.
        names: As in `draw_values`.

    Returns:
        The figure. Marks are means over repeats, error bars standard deviations. In a sweep over
        one key, a line joins the marks of a method in the order of the key's values.

    Examples:
        >>> rows = [{"T": t, "method": "A", "ter": 0.1, "exact_rounds": float(t)} for t in "59"]
        >>> draw_cost(rows, ["T"]).axes[0].get_ylabel()
        'TER, %'
    """
    rows = [r for r in rows if r.get("exact_rounds") is not None and r.get(y) is not None]
    if not rows:
        raise ConfigurationError("Expected rows of recoveries to draw, but there are none.")
    looks = looks_of([row[by] for row in rows], names)
    with blank(1, 1, 2.0, synthetic_text(rows)) as figure:
        ax = figure.subplots()
        for value, look in looks.items():
            groups = _group([row for row in rows if row[by] == value], [*keys, "method"])
            marks = [(*_spread(g, "exact_rounds"), *_spread(g, y)) for g in groups.values()]
            cost, xerr, mean, yerr = (list(column) for column in zip(*marks, strict=True))
            style = look.line
            if len(keys) != 1 or by != "method":
                style = {**style, "linestyle": "none"}
            ax.errorbar(cost, mean, xerr=xerr, yerr=yerr, label=value, **style, **LINE)
        _label(ax, y)
        ax.set_xlabel(axis_name("exact_rounds"))
        ax.set_xlim(*_limits(*ax.dataLim.intervalx))
        legend(figure, key_name(by, keys))
    return figure


def draw_cp(cp: Mapping[str, Mapping[str, float]], *, synthetic: bool = False) -> Figure:
    """Draw the distribution of CP over the clients of a run: a histogram for every method.

    Args:
        cp: By method and then by client, the CP as a fraction.
        synthetic: Whether the data of the run are made up: the figure says so.

    Returns:
        The figure. A method whose clients all have the same CP is left out if other methods vary;
        the log names it.

    Examples:
        >>> figure = draw_cp({"A": {"a": 0.8, "b": 0.9}, "TrainFromScratch": {"a": 0, "b": 0}})
        >>> [ax.get_title(loc="left") for ax in figure.axes]
        ['A']
    """
    cp = {
        name: {client: 100 * value for client, value in values.items()}
        for name, values in cp.items()
        if values
    }
    vary = {name: values for name, values in cp.items() if len(set(values.values())) > 1}
    shown = vary or cp
    if not shown:
        raise ConfigurationError("Expected recoveries with a CP to draw, but there are none.")
    _left_out([name for name in cp if name not in shown])
    looks = looks_of(list(cp))
    flat = [value for values in shown.values() for value in values.values()]
    # Bins around the lowest and the highest value, the same in all panels.
    width = (max(flat) - min(flat) or 1.0) / _BINS
    edges = [min(flat) + (i - 0.5) * width for i in range(_BINS + 2)]
    with blank(1, len(shown), 1.0, "synthetic data" if synthetic else "") as figure:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots(len(shown), 1, squeeze=False, sharex=True)[:, 0]
        for ax, (name, by_client) in zip(axes, shown.items(), strict=True):
            values = list(by_client.values())
            mean = statistics.fmean(values)
            ax.hist(
                values, edges, color=looks[name].line["color"], edgecolor="white", linewidth=0.5
            )
            ax.axvline(mean, color="0.1", linewidth=1.2, linestyle="--")
            ax.set_title(name, loc="left")
            ax.set_title(f"ACP {mean:.1f} %", loc="right")
            ax.set_ylabel("clients")
            ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes[-1].set_xlabel("CP, % (dashed: ACP)")
        axes[-1].xaxis.set_major_locator(MaxNLocator(4))
        axes[-1].set_xlim(edges[0] - width, max(flat) + 1.5 * width)
    return figure


def draw_box(
    rows: Sequence[Row], keys: Sequence[str], *, x: str, names: Sequence[str] = ()
) -> Figure:
    """Draw the distribution of CP over clients against a swept key: boxes, one panel a method.

    Args:
        rows: Rows of `results.csv`, each with the CP of its clients, fractions, under `"cp"`.
        keys: The swept keys.
        x: The key along the axis.
        names: All methods of the sweep, in order, see `draw_values`.

    Returns:
        The figure. Boxes are quartiles; whiskers reach to the last client within 1.5 times the box;
        clients beyond are dots. Clients of all repeats are in one box. A method whose clients all
        have the same CP is left out if other methods vary; the log names it.

    Examples:
        >>> rows = [{"T": t, "method": "A", "cp": [0.8, 0.85, 0.9]} for t in ("5", "10")]
        >>> draw_box(rows, ["T"], x="T").axes[0].get_ylabel()
        'CP, %'
    """
    rows = [row for row in rows if row["cp"]]
    looks = looks_of([row["method"] for row in rows], names)
    vary = {row["method"] for row in rows if len(set(row["cp"])) > 1}
    methods = dict.fromkeys(row["method"] for row in rows)
    if vary:
        rows = [row for row in rows if row["method"] in vary]
        _left_out([method for method in methods if method not in vary])
    panels = _panels(rows, [key for key in (*keys, "method") if key != x])
    if not rows:
        raise ConfigurationError("Expected recoveries with a CP to draw, but there are none.")
    values = list(dict.fromkeys(row[x] for row in rows))
    with blank(1, len(panels), 1.3, synthetic_text(rows)) as figure:
        axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
        for ax, (title, panel) in zip(axes, panels.items(), strict=True):
            boxes = [[100 * c for row in panel if row[x] == v for c in row["cp"]] for v in values]
            colour = looks[panel[0]["method"]].line["color"]
            drawn = ax.boxplot(boxes, widths=0.5, patch_artist=True, flierprops={"markersize": 3})
            for box, median in zip(drawn["boxes"], drawn["medians"], strict=True):
                box.set(facecolor=colour, alpha=0.5)
                median.set(color="0.1")
            _ticks(ax, range(1, len(values) + 1), values)
            ax.set_title(title, loc="left")
            ax.set_ylabel("CP, %")
        axes[-1].set_xlabel(key_name(x, keys))
    return figure


def _left_out(methods: Sequence[str]) -> None:
    if methods:
        _log.info("Not drawn, as all of their clients have the same CP: %s.", ", ".join(methods))


def _panels(rows: Sequence[Row], keys: Sequence[str]) -> dict[str, list[Row]]:
    """Split rows into panels by the keys that vary in them; titles have the keys' values."""
    keys = [key for key in keys if len({row[key] for row in rows}) > 1]
    short = short_keys(keys)
    groups = _group(rows, keys)
    if len(groups) > _MOST_PANELS:
        hint = f"`--where {keys[0]}={next(iter(groups))[0]}` draws fewer."
        raise ConfigurationError(
            f"Expected at most {_MOST_PANELS} rows of panels, but {', '.join(keys)} make "
            f"{len(groups)}. HINT: {hint}"
        )
    panels = {}
    for values, group in groups.items():
        pairs = zip(keys, values, strict=True)
        named = [v if key == "method" else f"{short[key]}={v}" for key, v in pairs]
        panels[", ".join(named)] = group
    return panels


def _group(rows: Sequence[Row], keys: Sequence[str]) -> dict[tuple[str, ...], list[Row]]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def _lines(
    ax: Axes,
    rows: Sequence[Row],
    x: str,
    values: Sequence[str],
    name: str,
    by: str,
    looks: Mapping[str, Look],
) -> None:
    numbers = sorted({float(value) for value in values})
    for series, look in looks.items():
        groups = _group([row for row in rows if row[by] == series], [x])
        marks = sorted((float(v), *_spread(g, name)) for (v,), g in groups.items())
        marks = [mark for mark in marks if mark[1] == mark[1]]  # NaN: the figure is missing
        if marks:
            at, means, deviations = (list(column) for column in zip(*marks, strict=True))
            ax.errorbar(at, means, yerr=deviations, label=series, **look.line, **LINE)
    decades = numbers[0] > 0 and numbers[-1] / numbers[0] >= 10
    if decades:
        ax.set_xscale("log")
    if len(numbers) <= 7:
        powers = decades and all(math.log10(number).is_integer() for number in numbers)
        ax.set_xticks(numbers, None if powers else [f"{number:g}" for number in numbers])
        ax.set_xticks([], minor=True)


def _bars(
    ax: Axes,
    rows: Sequence[Row],
    x: str,
    values: Sequence[str],
    name: str,
    by: str,
    looks: Mapping[str, Look],
) -> None:
    width = 0.8 / (1 if by == x else len(looks))
    for i, (series, look) in enumerate(looks.items()):
        groups = _group([row for row in rows if row[by] == series], [x])
        beside = 0.0 if by == x else (i - (len(looks) - 1) / 2) * width
        at = [values.index(v) + beside for (v,) in groups]
        marks = [_spread(group, name) for group in groups.values()]
        if marks:
            means, deviations = (list(column) for column in zip(*marks, strict=True))
            ax.bar(at, means, width * 0.92, label=series, **look.bar)
            for colour, thick in (("white", 2.4), ("0.2", 1.0)):  # visible on dark bars, too
                style: dict[str, Any] = {"ecolor": colour, "elinewidth": thick, "capthick": thick}
                ax.errorbar(at, means, deviations, fmt="none", capsize=1.6 + thick / 2, **style)
    _ticks(ax, range(len(values)), values)


def _ticks(ax: Axes, at: Sequence[int], names: Sequence[str]) -> None:
    room = ax.bbox.width / ax.figure.dpi / 0.07  # letters that fit side by side
    long = max(map(len, names)) * len(names) > room
    turned: dict[str, Any] = {"rotation": 20, "ha": "right"} if long else {}
    ax.set_xticks(at, names, **turned)


def _spread(rows: Sequence[Row], name: str) -> tuple[float, float]:
    """Return mean and standard deviation over repeats in the unit of the axis, or NaN."""
    scale = SCALES.get(name, 1.0)
    values = [row[name] * scale for row in rows if row.get(name) is not None]
    if not values:
        return math.nan, math.nan
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def _label(ax: Axes, name: str) -> None:
    ax.set_ylabel(_wrapped(axis_name(name)))
    low, high = ax.dataLim.intervaly
    # ACP up to 100 %, and negative values for clients that are asked more often than recorded.
    low, high = _limits(low, max(high, 100.0) if name == "acp" else high)
    ax.set_ylim(0.0 if ax.patches and ax.dataLim.y0 >= 0 else low, high)  # bars stand on the axis


def _wrapped(text: str) -> str:
    """Break a long name into lines of about the same length that fit the height of a panel."""
    lines = -(-len(text) // _ALONG)
    widths = range(-(-len(text) // lines), _ALONG + 1)
    broken = (textwrap.wrap(text, width, break_on_hyphens=False) for width in widths)
    return "\n".join(next((b for b in broken if len(b) <= lines), textwrap.wrap(text, _ALONG)))


def _limits(low: float, high: float) -> tuple[float, float]:
    """Return the ends of an axis that includes 0, with a margin for the marks at the ends."""
    low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.05 * (high - low or 1.0)
    return low - margin, high + margin


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
