"""Curves as inline SVG, drawn once for wide and once for narrow screens."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Series", "line_chart", "line_key", "ticks"]

_WIDE, _NARROW = (960, 340), (360, 300)
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 14, 12, 40


@dataclass(frozen=True)
class Series:
    """One curve.

    Args:
        label: What it is called.
        style: CSS class that gives it colour and dashes.
        points: (round, value) pairs, in order.
    """

    label: str
    style: str
    points: Sequence[tuple[float, float]]


def ticks(maximum: float, most: int) -> list[float]:
    """Return round numbers from 0 to at least `maximum`, at most `most` steps apart.

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


def line_key(style: str) -> str:
    """Return a short piece of a curve of this style, for legends."""
    path = f'<path class="line {style}" d="M1 5H25"/>'
    return f'<svg viewBox="0 0 26 10" aria-hidden="true">{path}</svg>'


def line_chart(series: Sequence[Series], what: str) -> str:
    """Draw curves over rounds.

    Args:
        series: The curves, the most important last (it lies on top).
        what: Name of the value axis.

    Returns:
        HTML: a legend and two SVG images of which a style sheet shows one.
    """
    keys = "".join(f"<li>{line_key(s.style)}{escape(s.label)}</li>" for s in reversed(series))
    images = _svg(series, what, *_WIDE, "wide") + _svg(series, what, *_NARROW, "narrow")
    return f'<ul class="legend">{keys}</ul><div class="chart">{images}</div>'


def _svg(series: Sequence[Series], what: str, width: int, height: int, size: str) -> str:
    rounds = [r for s in series for r, _ in s.points]
    values = [v for s in series for _, v in s.points]
    xs = ticks(max(rounds), 10 if size == "wide" else 4)
    ys = ticks(max(values), 5)
    # The axis ends with the data, or with the last tick if that is next to it (299 and 300).
    x_max, y_max = max(*rounds, 1), ys[-1]
    x_max = xs[-1] if xs[-1] < 1.02 * x_max else x_max
    right, bottom = width - _RIGHT, height - _BOTTOM

    def x(value: float) -> float:
        return round(_LEFT + value / x_max * (right - _LEFT), 1)

    def y(value: float) -> float:
        return round(bottom - value / y_max * (bottom - _TOP), 1)

    grid = "".join(
        f'<path class="grid" d="M{_LEFT} {y(v)}H{right}"/>'
        f'<text class="tick" x="{_LEFT - 7}" y="{y(v) + 4}" text-anchor="end">{v:g}</text>'
        for v in ys
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
    return (
        f'<svg class="{size}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(what)} by round" data-series="{data}" data-left="{_LEFT}" '
        f'data-right="{right}" data-top="{_TOP}" data-bottom="{bottom}" data-max="{x_max:g}">'
        f'{grid}<path class="axis" d="M{_LEFT} {bottom}H{right}"/>{lines}'
        f'<text class="tick" x="{(_LEFT + right) / 2}" y="{height - 5}" text-anchor="middle">'
        f"round</text></svg>"
    )
