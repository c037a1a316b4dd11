"""A table of numbers as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np


def draw(
    values: Sequence[Sequence[float | None]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    path: Path,
    good: str = "low",
) -> None:
    """Write a heatmap of percentages, each cell with its number, as a deterministic SVG.

    Args:
        values: One list a row, from 0 to 100; `None` leaves a cell grey.
        rows: Labels of the rows.
        columns: Labels of the columns.
        title: Says what the numbers are.
        path: Where the SVG goes.
        good: Which end is light: `"low"` or `"high"`.
    """
    mpl.rcParams.update({"svg.hashsalt": "fedrec", "font.size": 8})
    table = np.array([[np.nan if v is None else v for v in row] for row in values], dtype=float)
    size = (1.9 + 0.42 * len(columns), 1.1 + 0.24 * len(rows))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    colours = plt.get_cmap("YlOrRd" if good == "low" else "YlGn").with_extremes(bad="0.92")
    axes.imshow(table, cmap=colours, vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=45, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
    for (i, j), value in np.ndenumerate(table):
        if not np.isnan(value):
            colour = "white" if value > 65 else "black"
            axes.text(j, i, f"{value:.0f}", ha="center", va="center", color=colour, size=7)
    axes.set_xlabel(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
