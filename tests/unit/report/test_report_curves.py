"""Curves: positions follow from the numbers, whatever a recipe calls things."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from fedrec.report.curves import Series, line_chart, linear_axis, log_axis, ticks


@pytest.mark.parametrize(
    ("maximum", "most", "expected"),
    [
        (1.0, 5, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.07, 5, [0, 0.02, 0.04, 0.06, 0.08]),
        (1999, 4, [0, 500, 1000, 1500, 2000]),
        (0.3, 3, [0, 0.1, 0.2, 0.3]),
        (0, 5, [0, 1]),
    ],
)
def test_ticks_are_round_numbers(maximum: float, most: int, expected: list[float]) -> None:
    assert ticks(maximum, most) == pytest.approx(expected)


def test_points_lie_where_the_axes_say() -> None:
    html = line_chart([Series("a", "method-0", [(0, 0.0), (50, 0.5), (100, 1.0)])], "TER")
    wide = html[html.index('class="wide"') : html.index('class="narrow"')]
    # 960 by 340 with margins of 44, 14, 12 and 40: x from 44 to 946, y from 300 up to 12.
    assert 'd="M44.0 300.0L495.0 156.0L946.0 12.0"' in wide
    ticks_x = re.findall(r'<text class="tick" x="([\d.]+)" y="318"[^>]*>(\d+)<', wide)
    assert ("44.0", "0") in ticks_x
    assert ("946.0", "100") in ticks_x


def test_the_axis_ends_at_the_tick_next_to_the_last_round() -> None:
    html = line_chart([Series("a", "method-0", [(299, 0.5)])], "TER")
    assert 'data-max="300"' in html
    assert 'data-max="330"' in line_chart([Series("a", "x", [(330, 0.5)])], "TER")


def test_a_run_of_one_round_can_be_drawn() -> None:
    assert "<path" in line_chart([Series("a", "method-0", [(0, 0.0)])], "TER")


def test_labels_are_escaped_everywhere() -> None:
    evil = "\"><script>alert(1)</script>&'"
    html = line_chart([Series(evil, "method-0", [(0, 0.1), (1, 0.2)])], evil)
    tags: set[str] = set()

    class Collector(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.add(tag)

    Collector().feed(html)
    assert tags <= {"ul", "li", "svg", "path", "text", "div"}


def test_values_below_zero_lie_below_the_zero_of_the_axis() -> None:
    axis = linear_axis([-0.5, 1.0])
    assert (axis.ticks[0], axis.ticks[-1]) == (-0.5, 1.0)
    assert axis.place(0.0) == pytest.approx(1 / 3)


def test_a_logarithmic_axis() -> None:
    axis = log_axis([0.0, 1e-3, 10.0])
    assert axis.ticks == [0.001, 0.01, 0.1, 1.0, 10.0]
    assert [axis.place(v) for v in (0.0, 0.001, 0.1, 10.0)] == pytest.approx([0, 0, 0.5, 1])
    # 20 decades are cut down to the upper 8; what is below lies on the axis.
    assert log_axis([1e-20, 1.0]).ticks[0] == 1e-8
    assert log_axis([0.0]).place(0.0) == 0
