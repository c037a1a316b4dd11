"""Curves as inline SVG, drawn once for wide and once for narrow screens."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Axis", "Series", "line_chart", "line_key", "linear_axis", "log_axis", "ticks"]

_WIDE, _NARROW = (960, 340), (360, 300)
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 14, 12, 40
_DECADES = 8
_FINE = 6


@dataclass(frozen=True)
class Series:
    """One curve.

    Args:
        label: Name in the legend.
        style: CSS classes of its colour and dashes.
        points: (round, value) pairs, in order.
    """

    label: str
    style: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """An axis of values.

    Args:
        ticks: Values of its marks; the first and the last are the ends of the axis.
        log: Whether the axis is logarithmic.
    """

    ticks: Sequence[float]
    log: bool = False

    def place(self, value: float) -> float:
        """Return the place of a value on the axis, from 0 at the lower to 1 at the upper end.

        Examples:
            >>> Axis([-1, 0, 1]).place(0.5), Axis([0.01, 0.1, 1], log=True).place(0.1)
            (0.75, 0.5)
        """
        low, high = self.ticks[0], self.ticks[-1]
        value = min(max(value, low), high)
        if self.log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)


def ticks(maximum: float, most: int) -> list[float]:
    """Return round numbers from 0 to at least `maximum`, in about `most` equal steps or fewer.

    Examples:
        >>> ticks(0.83, 5), ticks(599, 6)
        ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0])
    """
    if maximum <= 0:
        return [0.0, 1.0]
    rough = maximum / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    count = math.ceil(maximum / step - 1e-9)
    return [round(i * step, 10) for i in range(count + 1)]


def linear_axis(values: Sequence[float]) -> Axis:
    """Return an axis for values that includes 0.

    Examples:
        >>> linear_axis([-0.3, 1.0])
        Axis(ticks=[-0.5, 0.0, 0.5, 1.0], log=False)
    """
    low, high = min(0.0, *values), max(0.0, *values)
    if low == 0:
        return Axis(ticks(high, 5))
    step = ticks(high - low, 4)[1]
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis([round(i * step, 10) for i in range(first, last + 1)])


def log_axis(values: Sequence[float]) -> Axis:
    """Return a logarithmic axis of at most 8 decades; with few decades, it has finer marks.

    Examples:
        >>> log_axis([0.3, 2.0])
        Axis(ticks=[0.2, 0.5, 1.0, 2.0], log=True)
        >>> log_axis([0.03, 200.0])
        Axis(ticks=[0.01, 0.1, 1.0, 10.0, 100.0, 1000.0], log=True)
    """
    positive = [v for v in values if v > 0] or [1.0]
    last = math.ceil(math.log10(max(positive)) - 1e-9)
    first = math.floor(math.log10(min(positive)) + 1e-9)
    first = max(min(first, last - 1), last - _DECADES)
    marks = [float(f"{m}e{k}") for k in range(first, last + 1) for m in (1, 2, 5)][:-2]
    while len(marks) > 2 and marks[1] <= min(positive):
        del marks[0]
    while len(marks) > 2 and marks[-2] >= max(positive):
        del marks[-1]
    if len(marks) > _FINE:
        marks = [float(f"1e{k}") for k in range(first, last + 1)]
    return Axis(marks, log=True)


def line_key(style: str) -> str:
    """Return a short piece of a curve of this style, for legends."""
    path = f'<path class="line {style}" d="M1 5H25"/>'
    return f'<svg viewBox="0 0 26 10" aria-hidden="true">{path}</svg>'


def line_chart(series: Sequence[Series], title: str, axis: Axis | None = None) -> str:
    """Draw curves over rounds.

    Args:
        series: The curves, the most important last: it is drawn on top.
        title: Name of the values, for screen readers.
        axis: Axis of the values; by default an axis from 0 to the largest value.

    Returns:
        HTML: a legend and two SVG images, one of which the style sheet shows.
    """
    axis = axis or linear_axis([v for s in series for _, v in s.points])
    keys = "".join(f"<li>{line_key(s.style)}{escape(s.label)}</li>" for s in reversed(series))
    images = "".join(
        _svg(series, title, axis, *size, name)
        for name, size in (("wide", _WIDE), ("narrow", _NARROW))
    )
    return f'<ul class="legend">{keys}</ul><div class="chart">{images}</div>'


def _svg(
    series: Sequence[Series], title: str, axis: Axis, width: int, height: int, size: str
) -> str:
    rounds = [r for s in series for r, _ in s.points]
    xs = ticks(max(rounds), 10 if size == "wide" else 4)
    # The axis ends at the last round, or at the last tick if it is close behind (299 and 300).
    x_max = max(*rounds, 1)
    x_max = xs[-1] if xs[-1] < 1.02 * x_max else x_max
    right, bottom = width - _RIGHT, height - _BOTTOM

    def x(value: float) -> float:
        return round(_LEFT + value / x_max * (right - _LEFT), 1)

    def y(value: float) -> float:
        return round(bottom - axis.place(value) * (bottom - _TOP), 1)

    grid = "".join(
        f'<path class="grid" d="M{_LEFT} {y(v)}H{right}"/>'
        f'<text class="tick" x="{_LEFT - 7}" y="{y(v) + 4}" text-anchor="end">{_mark(v)}</text>'
        for v in axis.ticks
    )
    grid += "".join(
        f'<text class="tick" x="{x(v)}" y="{bottom + 18}" text-anchor="middle">{v:g}</text>'
        for v in xs
        if v <= x_max
    )
    lines = "".join(
        f'<path class="line {s.style}" d="M{"L".join(f"{x(r)} {y(v)}" for r, v in s.points)}"/>'
        for s in series
        if s.points
    )
    data = escape(
        json.dumps([{"label": s.label, "style": s.style, "points": list(s.points)} for s in series])
    )
    last = ", ".join(f"{s.label} {s.points[-1][1]:.3g}" for s in reversed(series) if s.points)
    return (
        f'<svg class="{size}" viewBox="0 0 {width} {height}" role="img" tabindex="0" '
        f'aria-label="{escape(title)} by round. Last values: {escape(last)}." '
        f'data-series="{data}" data-left="{_LEFT}" '
        f'data-right="{right}" data-top="{_TOP}" data-bottom="{bottom}" data-max="{x_max:g}">'
        f'{grid}<path class="axis" d="M{_LEFT} {bottom}H{right}"/>{lines}'
        f'<text class="tick" x="{(_LEFT + right) / 2}" y="{height - 5}" text-anchor="middle">'
        f"round</text></svg>"
    )


def _mark(value: float) -> str:
    """Return a short text for a tick."""
    return (
        f"{value:g}" if value == 0 or abs(value) >= 0.001 else f"{value:.0e}".replace("e-0", "e-")
    )
