"""Figures of a sweep and of a run, for papers. They need matplotlib (`fedrec[plot]`)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrec.exceptions import ConfigurationError, MissingDependencyError, expected
from fedrec.recipe.grid import short_keys
from fedrec.recipe.tables import METRIC, POISONED, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_box", "draw_cost", "draw_cp", "draw_values", "save_figure"]

# Told apart by everybody, on paper too (Okabe and Ito); the references have looks of their own.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a5a2b", "#4a3aa7")
_MARKERS = "osD^vPX*"
_REFERENCES = {
    POISONED: {"color": "0.6", "linestyle": ":", "marker": "x"},
    "TrainFromScratch": {"color": "0.1", "linestyle": "--", "marker": "."},
}
_PERCENT = {"ter": 100.0, "asr": 100.0, "fnr": 100.0, "fpr": 100.0, "acp": 1.0}
_PERCENT |= {"cp_min": 1.0, "cp_max": 1.0}
_NAMES = {
    "exact_rounds": "rounds a client computes in",
    "client_bytes": "bytes of all clients",
    "history_bytes": "bytes of history",
    "num_excluded": "excluded clients",
    "distance": "distance to scratch",
    "relative_distance": "relative distance to scratch",
    "cp_min": "lowest CP",
    "cp_max": "highest CP",
}
_STYLE: dict[Any, Any] = {"font.size": 9, "svg.hashsalt": "fedrec", "svg.fonttype": "path"}
_MOST_PANELS = 12


def draw_values(
    rows: Sequence[Row], keys: Sequence[str], *, x: str, y: Sequence[str], by: str = "method"
) -> Figure:
    """Draw figures against a swept key: lines over numbers, bars over anything else.

    Columns of panels are figures and rows combinations of the other keys, or the other way round if
    that is narrower. Marks are means over repeats, error bars standard deviations. The axis is
    logarithmic where its values span decades.

    Args:
        rows: Of `results.csv`.
        keys: The swept keys.
        x: The key along the axis.
        y: Columns of figures.
        by: The key, or `"method"`, that colours tell apart.

    Returns:
        The figure.

    Raises:
        ConfigurationError: If nothing is left to draw, or too many panels.
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
    looks = _looks([row[by] for row in rows])
    numeric = all(_number(value) is not None for value in values) and len(values) > 1
    columns, lines = sorted((len(y), len(panels)))
    with _figure(columns, lines) as figure:
        axes = figure.subplots(lines, columns, squeeze=False, sharex=True)
        by_panel = axes.T if len(panels) < len(y) else axes
        draw = _lines if numeric else _bars
        for line, (title, panel) in zip(by_panel, panels.items(), strict=True):
            for ax, name in zip(line, y, strict=True):
                draw(ax, panel, x, values, name, by, looks)
                _label(ax, name)
            line[0].set_title(title, loc="left", fontsize=9)
        for ax in axes[-1]:
            ax.set_xlabel(short_keys(keys).get(x, x))
        _legend(figure, axes[0, 0], axes.ravel().tolist())
    return figure


def draw_cost(
    rows: Sequence[Row], keys: Sequence[str], *, y: str = "ter", by: str = "method"
) -> Figure:
    """Draw a figure against what clients compute: one mark for every point and method.

    Args:
        rows: Of `results.csv`.
        keys: The swept keys.
        y: Column of the figure.
        by: The key, or `"method"`, that colours tell apart.

    Returns:
        The figure. Marks are means over repeats, error bars standard deviations; those of a sweep
        over one key are joined in the order of its values.

    Examples:
        >>> rows = [{"T": t, "method": "A", "ter": 0.1, "exact_rounds": float(t)} for t in "59"]
        >>> draw_cost(rows, ["T"]).axes[0].get_ylabel()
        'TER, %'
    """
    rows = [r for r in rows if r.get("exact_rounds") is not None and r.get(y) is not None]
    if not rows:
        raise ConfigurationError("Expected rows of recoveries to draw, but there are none.")
    looks = _looks([row[by] for row in rows])
    with _figure(1.4, 1.3) as figure:
        ax = figure.subplots()
        for value, look in looks.items():
            groups = _group([row for row in rows if row[by] == value], [*keys, "method"])
            marks = [(*_spread(g, "exact_rounds"), *_spread(g, y)) for g in groups.values()]
            cost, xerr, mean, yerr = (list(column) for column in zip(*marks, strict=True))
            style = look if len(keys) == 1 and by == "method" else {**look, "linestyle": "none"}
            ax.errorbar(cost, mean, xerr=xerr, yerr=yerr, label=value, **style, **_BARS_OF_ERROR)
        _label(ax, y)
        ax.set_xlabel(_NAMES["exact_rounds"] + ", on average")
        ax.set_xlim(left=0)
        _legend(figure, ax, [ax])
    return figure


def draw_cp(cp: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw how CP is distributed over the clients of a run: a histogram for every method.

    Args:
        cp: CP in percent by client, by method.

    Returns:
        The figure. Methods whose clients all have the same CP are left out if others do not.

    Examples:
        >>> figure = draw_cp({"A": {"a": 80.0, "b": 90.0}, "TrainFromScratch": {"a": 0, "b": 0}})
        >>> [ax.get_title(loc="left") for ax in figure.axes]
        ['A']
    """
    cp = {name: values for name, values in cp.items() if values}
    vary = {name: values for name, values in cp.items() if len(set(values.values())) > 1}
    shown = vary or cp
    if not shown:
        raise ConfigurationError("Expected recoveries with a CP to draw, but there are none.")
    looks = _looks(list(cp))
    with _figure(1.6, 0.8 * len(shown)) as figure:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
        for ax, (name, by_client) in zip(axes, shown.items(), strict=True):
            values = list(by_client.values())
            mean = statistics.fmean(values)
            width = max(max(values) - min(values), 1.0) / 16
            left = min(values) - width / 2
            edges = [left + i * width for i in range(18)]
            ax.hist(
                values, bins=edges, color=looks[name]["color"], edgecolor="white", linewidth=0.5
            )
            ax.axvline(mean, color="0.1", linewidth=1.2, linestyle="--")
            ax.set_title(name, loc="left", fontsize=9)
            acp = f"ACP {mean:.1f} % (dashed), {len(values)} clients"
            ax.set_title(acp, loc="right", fontsize=8)
            ax.set_ylabel("clients")
            ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes[-1].set_xlabel("CP, %")
    return figure


def draw_box(rows: Sequence[Row], keys: Sequence[str], *, x: str) -> Figure:
    """Draw how CP is distributed over clients against a swept key: boxes, one panel a method.

    Args:
        rows: Of `results.csv`, each with the CP in percent of its clients under `"cp"`.
        keys: The swept keys.
        x: The key along the axis.

    Returns:
        The figure. Boxes are quartiles, whiskers reach to the last client within 1.5 times the box,
        and clients beyond are dots; repeats are taken together. Methods whose clients all have the
        same CP are left out if others do not.

    Examples:
        >>> rows = [{"T": t, "method": "A", "cp": [80.0, 85.0, 90.0]} for t in ("5", "10")]
        >>> draw_box(rows, ["T"], x="T").axes[0].get_ylabel()
        'CP, %'
    """
    rows = [row for row in rows if row["cp"]]
    vary = {row["method"] for row in rows if len(set(row["cp"])) > 1}
    rows = [row for row in rows if row["method"] in vary] or rows
    panels = _panels(rows, [key for key in (*keys, "method") if key != x])
    if not rows:
        raise ConfigurationError("Expected recoveries with a CP to draw, but there are none.")
    values = list(dict.fromkeys(row[x] for row in rows))
    looks = _looks([row["method"] for row in rows])
    with _figure(1.6, 0.9 * len(panels)) as figure:
        axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
        for ax, (title, panel) in zip(axes, panels.items(), strict=True):
            boxes = [[c for row in panel if row[x] == v for c in row["cp"]] for v in values]
            colour = looks[panel[0]["method"]]["color"]
            drawn = ax.boxplot(boxes, widths=0.5, patch_artist=True, flierprops={"markersize": 3})
            for box, median in zip(drawn["boxes"], drawn["medians"], strict=True):
                box.set(facecolor=colour, alpha=0.5)
                median.set(color="0.1")
            ax.set_xticks(range(1, len(values) + 1), values)
            ax.set_title(title, loc="left", fontsize=9)
            ax.set_ylabel("CP, %")
        axes[-1].set_xlabel(short_keys(keys).get(x, x))
    return figure


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure; the same figure gives the same bytes.

    Args:
        figure: The figure.
        path: The picture: `.png`, `.svg` or `.pdf`.

    Raises:
        ConfigurationError: If it is to be another kind of file.

    Examples:
        >>> save_figure(None, "figure.bmp")
        Traceback (most recent call last):
        ...
        fedrec.exceptions.ConfigurationError: Expected `output` to be a .png, .svg or .pdf file, ...
    """
    path = Path(path)
    kinds: dict[str, dict[str, Any]] = {
        ".png": {"Software": None},
        ".svg": {"Date": None, "Creator": None},
        ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }
    if path.suffix not in kinds:
        raise ConfigurationError(expected("output", "a .png, .svg or .pdf file", str(path)))
    import matplotlib as mpl

    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(_STYLE):
        figure.savefig(path, dpi=160, metadata=kinds[path.suffix])
    return path


_BARS_OF_ERROR: dict[str, Any] = {
    "capsize": 2.5,
    "elinewidth": 1,
    "linewidth": 1.5,
    "markersize": 5,
}


@contextmanager
def _figure(columns: float, lines: float) -> Iterator[Figure]:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "Figures need matplotlib, which is not installed. HINT: `pip install 'fedrec[plot]'`."
        ) from error
    with mpl.rc_context(_STYLE):
        size = (max(2.9 * columns, 3.6) + 0.3, 2.2 * max(lines, 1) + 0.6)
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        for ax in figure.axes:
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(axis="y", color="0.9", linewidth=0.8)
            ax.set_axisbelow(True)


def _looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return how each of the names is drawn."""
    looks: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(names):
        i = sum(other not in _REFERENCES for other in looks)
        own = {"color": _COLOURS[i % 8], "linestyle": "-", "marker": _MARKERS[i % 8]}
        looks[name] = _REFERENCES.get(name, own)
    return looks


def _panels(rows: Sequence[Row], keys: Sequence[str]) -> dict[str, list[Row]]:
    """Split rows by those of the keys that vary; a panel's title says which it is."""
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
    looks: Mapping[str, Mapping[str, Any]],
) -> None:
    numbers = sorted({float(value) for value in values})
    for series, look in looks.items():
        groups = _group([row for row in rows if row[by] == series], [x])
        marks = sorted((float(v), *_spread(g, name)) for (v,), g in groups.items())
        marks = [mark for mark in marks if mark[1] == mark[1]]  # NaN: there is no such figure
        if marks:
            at, means, deviations = (list(column) for column in zip(*marks, strict=True))
            ax.errorbar(at, means, yerr=deviations, label=series, **look, **_BARS_OF_ERROR)
    if numbers[0] > 0 and numbers[-1] / numbers[0] >= 50:
        ax.set_xscale("log")
    if len(numbers) <= 7:
        ax.set_xticks(numbers, [f"{number:g}" for number in numbers])
        ax.set_xticks([], minor=True)


def _bars(
    ax: Axes,
    rows: Sequence[Row],
    x: str,
    values: Sequence[str],
    name: str,
    by: str,
    looks: Mapping[str, Mapping[str, Any]],
) -> None:
    width = 0.8 / (1 if by == x else len(looks))
    for i, (series, look) in enumerate(looks.items()):
        groups = _group([row for row in rows if row[by] == series], [x])
        beside = 0.0 if by == x else (i - (len(looks) - 1) / 2) * width
        at = [values.index(v) + beside for (v,) in groups]
        marks = [_spread(group, name) for group in groups.values()]
        if marks:
            means, deviations = (list(column) for column in zip(*marks, strict=True))
            ax.bar(at, means, width * 0.92, color=look["color"], label=series)
            shown = [deviation or float("nan") for deviation in deviations]
            ax.errorbar(at, means, yerr=shown, fmt="none", ecolor="0.2", capsize=2, elinewidth=1)
    long = max(map(len, values)) > 10 and len(values) > 2
    turned: dict[str, Any] = {"rotation": 20, "ha": "right"} if long else {}
    ax.set_xticks(range(len(values)), values, **turned)


def _spread(rows: Sequence[Row], name: str) -> tuple[float, float]:
    """Return mean and standard deviation over repeats, scaled for the axis."""
    scale = _PERCENT.get(name, 1.0)
    found = [row[name] * scale for row in rows if row.get(name) is not None]
    if not found:
        return float("nan"), 0.0
    return statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else 0.0


def _label(ax: Axes, name: str) -> None:
    text = _NAMES.get(name, name.upper() if name in _PERCENT else name.removeprefix(METRIC))
    ax.set_ylabel(f"{text}, %" if name in _PERCENT else text)
    if name == "acp":
        ax.set_ylim(0, 105)
    else:
        ax.set_ylim(0, 1.05 * ax.get_ylim()[1])  # marks at the top are whole


def _legend(figure: Figure, first: Axes, axes: Sequence[Axes]) -> None:
    """Put one legend above all panels, so that it lies over no data."""
    found: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    width = figure.get_size_inches()[0]
    longest = max(map(len, found), default=1)
    columns = max(1, min(len(found), int(width / (0.075 * longest + 0.55))))
    figure.legend(
        found.values(), found.keys(), loc="outside upper center", ncols=columns, frameon=False
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
