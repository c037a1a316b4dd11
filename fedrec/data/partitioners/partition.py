"""The samples of every client, and a picture of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrec.report.curves import ticks

__all__ = ["Partition"]

_LEFT, _RIGHT, _TOP, _GAP, _BOTTOM, _BARS = 56, 12, 26, 14, 58, 90
_INK, _BLUE = "#333", "#1f5fa8"


@dataclass(frozen=True, eq=False)
class Partition:
    """The samples of every client.

    Args:
        client_ids: The $n$ clients.
        parts: Indices of every client's samples.
        labels: Shape $(N,)$, the label of every sample.

    Examples:
        >>> parts = [np.array([0, 1]), np.array([2])]
        >>> partition = Partition(["a", "b"], parts, labels=np.array([7, 8, 7]))
        >>> partition.classes.tolist(), partition.counts.tolist()
        ([7, 8], [[1, 1], [1, 0]])
        >>> partition.plot().startswith("<svg")
        True
    """

    client_ids: Sequence[str]
    parts: Sequence[NDArray[np.integer[Any]]]
    labels: NDArray[np.integer[Any]]

    @cached_property
    def classes(self) -> NDArray[np.integer[Any]]:
        """The $L$ labels that occur, sorted."""
        return np.unique(self.labels)

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Number of samples of each label that each client holds, shape $(n, L)$."""
        index = np.searchsorted(self.classes, self.labels)
        size = len(self.classes)
        return np.array([np.bincount(index[part], minlength=size) for part in self.parts])

    def plot(self, path: str | Path | None = None) -> str:
        """Draw the clients side by side, with their numbers of samples and their labels.

        Bars are numbers of samples. The darker a cell, the larger the label's share of the client's
        samples. Pointing at a cell shows its numbers.

        Args:
            path: File to write the picture to; its name should end in `.svg`.

        Returns:
            The picture as SVG. Notebooks show a partition as its picture.
        """
        picture = _draw(self)
        if path is not None:
            Path(path).write_text(picture, encoding="utf-8")
        return picture

    def _repr_svg_(self) -> str:
        return self.plot()


def _draw(partition: Partition) -> str:
    counts, sizes = partition.counts, partition.counts.sum(axis=1)
    n, num_labels = counts.shape
    # Cells are limited in size: few clients must not fill the page, many must remain visible.
    width = min(max(n * 28.0, 300.0), 900.0) if n < 300 else 3.0 * n
    height = num_labels * min(max(240.0 / num_labels, 6.0), 28.0)
    cell, row = width / n, height / num_labels
    top = _TOP + _BARS + _GAP
    scale = ticks(int(sizes.max()), 3)

    def text(x: float, y: float, content: str, anchor: str = "middle") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'

    shapes = [text(_LEFT - 6, 16, "samples", "start")]
    for value in scale:
        y = _TOP + _BARS * (1 - value / scale[-1])
        shapes.append(f'<path d="M{_LEFT} {y:.1f}h{width:.1f}" stroke="#ddd"/>')
        shapes.append(text(_LEFT - 6, y + 4, f"{value:g}", "end"))
    step = math.ceil(num_labels * 13 / height)
    for i, label in enumerate(partition.classes.tolist()):
        if i % step == 0:
            shapes.append(text(_LEFT - 6, top + row * (i + 0.5) + 4, str(label), "end"))
    middle = top + height / 2
    shapes.append(f'<g transform="rotate(-90 12 {middle:.1f})">{text(12, middle, "label")}</g>')
    shapes.append(
        f'<rect x="{_LEFT}" y="{top}" width="{width:.1f}" height="{height:.1f}" fill="#f4f4f4"/>'
    )
    step = next(k for k in (1, 2, 5, 10, 20, 50, 100, n) if k * cell >= 26 or k == n)
    for i, client_id in enumerate(partition.client_ids):
        x, size = _LEFT + cell * i, int(sizes[i])
        bar = _BARS * size / scale[-1]
        thick = cell * 0.86 if cell > 4 else cell
        shapes.append(
            f'<rect x="{x:.2f}" y="{_TOP + _BARS - bar:.1f}" width="{thick:.2f}" '
            f'height="{bar:.1f}" fill="#8a8a8a"><title>{escape(client_id)}: {size}</title></rect>'
        )
        for j in np.flatnonzero(counts[i]).tolist():
            tip = f"{client_id}, label {partition.classes[j]}: {counts[i, j]} of {size}"
            shapes.append(
                f'<rect x="{x:.2f}" y="{top + row * j:.1f}" width="{thick:.2f}" '
                f'height="{row * 0.9:.1f}" fill-opacity="{_shade(counts[i, j] / size):.3f}">'
                f"<title>{escape(tip)}</title></rect>"
            )
        if i % step == 0:
            shapes.append(text(x + thick / 2, top + height + 16, str(i)))
    shapes.append(text(_LEFT - 6, top + height + 16, "client", "end"))
    shapes.append(_key(_LEFT + width, top + height + 28))
    total_width, total_height = _LEFT + width + _RIGHT, top + height + _BOTTOM
    about = f"{int(sizes.sum())} samples of {num_labels} labels on {n} clients"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_width:.0f} '
        f'{total_height:.0f}" width="{total_width:.0f}" height="{total_height:.0f}" role="img" '
        f'aria-label="{about}" font-family="system-ui, sans-serif" font-size="12" fill="{_BLUE}">'
        f"<style>text{{fill:{_INK}}}</style>"
        f'<rect width="100%" height="100%" fill="white"/>{"".join(shapes)}</svg>\n'
    )


def _shade(share: float) -> float:
    """Return the opacity of a share; small shares are visible, too."""
    return 0.06 + 0.94 * math.pow(share, 0.6)


def _key(right: float, y: float) -> str:
    """Draw the legend of the shades, right-aligned."""
    shares = (0.05, 0.25, 0.5, 1.0)
    left = right - 44 * len(shares)
    pieces = [f'<text x="{left - 8:.1f}" y="{y + 10:.1f}" text-anchor="end">label\'s share</text>']
    for i, share in enumerate(shares):
        x = left + 44 * i
        pieces.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="12" height="12" '
            f'fill-opacity="{_shade(share):.3f}"/>'
            f'<text x="{x + 15:.1f}" y="{y + 10:.1f}" font-size="11">{share:.0%}</text>'
        )
    return "".join(pieces)
