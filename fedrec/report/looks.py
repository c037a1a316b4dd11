"""The look of figures: size for a paper's column, colours, names of axes, legend, files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrec._files import writing
from fedrec.exceptions import ConfigurationError, MissingDependencyError, expected
from fedrec.metrics import REASONS
from fedrec.recipe.grid import short_keys
from fedrec.recipe.tables import METRIC, POISONED, UNPOISONED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "LINE",
    "SCALES",
    "Look",
    "axis_name",
    "blank",
    "key_name",
    "legend",
    "looks_of",
    "save_figure",
]

# Colours that colour-blind readers can tell apart (after Okabe and Ito), in the order of the
# report's. On grey paper, marks and hatches differ. The references have looks of their own.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#4a3aa7", "#56b4e9", "#8a5a2b")
_MARKERS = "osD^vPX*"
_HATCHES = ("", "////", "....", "xxxx", "----", "\\\\\\\\", "++++", "oooo")

#: Style of lines with error bars.
LINE: dict[str, Any] = {"capsize": 2, "elinewidth": 0.8, "linewidth": 1.2, "markersize": 4.5}

#: Factors from the unit of a column to the unit of its axis.
SCALES = dict.fromkeys(("ter", "asr", "fnr", "fpr", "acp", "cp_min", "cp_max"), 100.0)
SCALES |= {"client_bytes": 1e-6, "history_bytes": 1e-6}
_AXES = {name: f"{name.upper()}, %" for name in ("ter", "asr", "fnr", "fpr", "acp")}
_AXES |= {f"exact_{reason}": f"exact rounds per client, {reason}" for reason in REASONS}
_AXES |= {
    "exact_rounds": "exact rounds per client",
    "rounds_to_converge": "rounds to converge",
    "exact_rounds_to_converge": "exact rounds to converge",
    "local_steps_to_converge": "mini-batches per client to converge",
    "client_bytes": "traffic of clients, MB",
    "history_bytes": "history, MB",
    "seconds": "time, s",
    "num_excluded": "excluded clients",
    "distance": "distance to scratch",
    "relative_distance": "relative distance to scratch",
    "cp_min": "lowest CP, %",
    "cp_max": "highest CP, %",
}
_KEYS = {
    "warmup_rounds": "warm-up rounds $T_w$",
    "correction_period": "correction period $T_c$, rounds",
    "final_rounds": "final rounds $T_f$",
    "abnormality_threshold": r"abnormality threshold $\tau$",
    "tolerance_rate": r"tolerance rate $\alpha$",
    "buffer_size": "buffer size $s$, pairs",
    "q": "degree of non-iid $q$",
    "fnr": "FNR",
    "fpr": "FPR",
    "malicious": "malicious clients",
    "local_steps": "mini-batches per round",
}
# Type 42: publishers refuse matplotlib's default fonts in a PDF.
_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 7.5,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "fedrec",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
}
# Widths in inches of one column of a paper, and of both columns with the gap between them.
_ONE, _BOTH = 3.4, 7.0


@dataclass(frozen=True)
class Look:
    """How a method is drawn.

    Args:
        line: Arguments of `errorbar`.
        bar: Arguments of `bar`.
    """

    line: dict[str, Any]
    bar: dict[str, Any]


_RECORDED = Look(
    {"color": "0.6", "linestyle": ":", "marker": "x"}, {"color": "0.75", "edgecolor": "white"}
)
_REFERENCES = {
    POISONED: _RECORDED,
    UNPOISONED: _RECORDED,
    # Hollow, so that its marks do not cover those of a method that is as good.
    "TrainFromScratch": Look(
        {"color": "0.1", "linestyle": "--", "marker": "p", "markerfacecolor": "none"},
        {"color": "0.1", "edgecolor": "white"},
    ),
}


def looks_of(shown: Sequence[str], names: Sequence[str] = ()) -> dict[str, Look]:
    """Return the look of each name in a figure.

    Args:
        shown: Names in the figure; they may repeat.
        names: Names in all figures of a sweep, in order: a name has the same look in all of them.

    Examples:
        >>> part, whole = looks_of(["B"], ["A", "B"]), looks_of(["A", "B"])
        >>> part["B"] == whole["B"], part["B"] == looks_of(["B"])["B"]
        (True, False)
    """
    looks: dict[str, Look] = {}
    for name in dict.fromkeys([*names, *shown]):
        i = sum(other not in _REFERENCES for other in looks)
        colour, shape = _COLOURS[i % 8], (i + i // 8) % 8  # the ninth has another shape
        looks[name] = _REFERENCES.get(name) or Look(
            {"color": colour, "linestyle": "-", "marker": _MARKERS[shape]},
            {"color": colour, "edgecolor": "white", "hatch": _HATCHES[shape]},
        )
    return {name: look for name, look in looks.items() if name in shown}


def axis_name(figure: str) -> str:
    """Return the name of a column on an axis, with its unit.

    Examples:
        >>> axis_name("ter"), axis_name("exact_final"), axis_name("metrics.auc")
        ('TER, %', 'exact rounds per client, final', 'auc')
    """
    return _AXES.get(figure, figure.removeprefix(METRIC))


def key_name(key: str, keys: Sequence[str]) -> str:
    """Return the name of a swept key on an axis.

    Args:
        key: One of `keys`, or `"method"`.
        keys: The swept keys.

    Examples:
        >>> key_name("federation.malicious", ["federation.malicious"]), key_name("method", [])
        ('malicious clients', 'method')
    """
    short = short_keys(keys).get(key, key)
    return _KEYS.get(short, short.replace("_", " "))


def require_matplotlib() -> None:
    """Raise `MissingDependencyError` if matplotlib is not installed."""
    try:
        import matplotlib as mpl  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "Figures need matplotlib, which is not installed. HINT: `pip install 'fedrec[plot]'`."
        ) from error


@contextmanager
def blank(columns: int, lines: int, height: float = 1.5, note: str = "") -> Iterator[Figure]:
    """Yield an empty figure to draw in, as wide as one or both columns of a paper.

    Args:
        columns: Number of panels side by side.
        lines: Number of panels above each other.
        height: Height of a panel in inches.
        note: Small print below all panels; it does not make them smaller.

    Raises:
        MissingDependencyError: If matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        width = _ONE if columns == 1 else max(_BOTH, 2.3 * columns)
        inches = height * lines + 0.5 + (0.15 if note else 0.0)
        figure = Figure(figsize=(width, inches), layout="constrained")
        if note:
            figure.supxlabel(note, x=0.99, ha="right", fontsize=7, style="italic", color="0.3")
        yield figure
        figure.align_ylabels()
        for ax in figure.axes:
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(axis="y", color="0.9", linewidth=0.8)
            ax.set_axisbelow(True)


def legend(figure: Figure, title: str) -> None:
    """Put one legend above all panels. The figure becomes higher, so that panels keep their size.

    Args:
        figure: The figure.
        title: Title of the legend; `"method"` is left out.
    """
    handles: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            # Of a line with error bars, the line only.
            handles.setdefault(label, getattr(handle, "lines", (handle,))[0])
    if not handles:
        return
    width, height = figure.get_size_inches()
    columns = len(handles)
    while columns > 1 and _width(list(handles), columns) > width:
        columns -= 1
    rows = -(-len(handles) // columns) + (title != "method")
    figure.set_size_inches(width, height + 0.16 * rows)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside upper center",
        ncols=columns,
        title=None if title == "method" else title,
        title_fontsize=7.5,
        frameon=False,
        handlelength=1.8,
        columnspacing=1.0,
        borderaxespad=0.4,
        borderpad=0.0,
        labelspacing=0.3,
    )


def _width(labels: Sequence[str], columns: int) -> float:
    """Return the width of a legend in inches: of the longest label and the key of every column."""
    most, ends, width = len(labels), 0, 0.0
    for i in range(columns):
        begin, ends = ends, ends + most // columns + (i < most % columns)
        width += 0.056 * max(map(len, labels[begin:ends])) + 0.42
    return width


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure; the same figure gives the same bytes.

    Args:
        figure: The figure.
        path: The picture: `.png`, `.svg` or `.pdf`.

    Raises:
        ConfigurationError: If the file name has another ending.
        FileWriteError: If it cannot be written.

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

    with writing(path), mpl.rc_context(_STYLE):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=300, metadata=kinds[path.suffix])
    return path
