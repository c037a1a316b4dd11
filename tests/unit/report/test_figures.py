"""Figures: what is drawn is what is in the table, wherever it belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedrec.exceptions import ConfigurationError
from fedrec.report import draw_box, draw_cost, draw_cp, draw_values, save_figure


def rows(values: list[str], **more: Any) -> list[dict[str, Any]]:
    """Two methods and two repeats at every value: TER is i/100 and i/100 + 0.02."""
    return [
        {"tol": v, "method": m, "ter": (i + 2 * r) / 100, "acp": 50.0, "asr": None, **more}
        for i, v in enumerate(values, 1)
        for m in ("FedRecover", "TrainFromScratch")
        for r in range(2)
    ]


def lines(ax: Any) -> dict[str, tuple[list[float], list[float]]]:
    """Return x and y of every series."""
    return {
        c.get_label(): (list(c.lines[0].get_xdata()), list(c.lines[0].get_ydata()))
        for c in ax.containers
    }


def test_lines_are_means_over_repeats_in_percent() -> None:
    figure = draw_values(rows(["3", "1", "2"]), ["tol"], x="tol", y=["ter", "asr", "acp"])
    assert [ax.get_ylabel() for ax in figure.axes] == ["TER, %", "ACP, %"]  # no ASR to draw
    x, y = lines(figure.axes[0])["FedRecover"]
    assert x == [1, 2, 3]
    assert y == pytest.approx([3, 4, 2])  # 100 * (i + (i + 2)) / 2 / 100, in the order of x
    (bars,) = figure.axes[0].containers[0].lines[2]
    (segment, *_) = bars.get_segments()
    # The sample's deviation of two values that are 2 % apart is sqrt(2) %.
    assert segment[:, 1] == pytest.approx([3 - 2**0.5, 3 + 2**0.5])
    assert figure.axes[0].get_xscale() == "linear"


def test_marks_of_a_flat_line_are_whole() -> None:
    table = [{"tol": tol, "method": "A", "ter": 0.2} for tol in ("1", "2")]
    bottom, top = draw_values(table, ["tol"], x="tol", y=["ter"]).axes[0].get_ylim()
    assert (bottom, top > 20.9) == (0, True)


def test_values_that_span_decades_get_a_logarithmic_axis() -> None:
    figure = draw_values(rows(["1e-7", "1e-5", "1e-3"]), ["tol"], x="tol", y=["ter"])
    assert figure.axes[0].get_xscale() == "log"


def test_names_get_bars_and_other_keys_panels() -> None:
    table = [
        {"rule": rule, "attack": attack, "method": method, "ter": 0.1 * i}
        for i, (rule, attack, method) in enumerate(
            (r, a, m) for r in ("Median", "Krum") for a in ("Trim", "null") for m in ("A", "B")
        )
    ]
    figure = draw_values(table, ["rule", "attack"], x="rule", y=["ter"])
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["attack=Trim", "attack=null"]
    heights = [
        [bar.get_height() for c in ax.containers if hasattr(c, "patches") for bar in c.patches]
        for ax in figure.axes
    ]
    assert heights[0] == pytest.approx([0, 40, 10, 50])  # A of both rules, then B
    assert heights[1] == pytest.approx([20, 60, 30, 70])
    by_rule = draw_values(table, ["rule", "attack"], x="attack", y=["ter"], by="rule")
    assert [ax.get_title(loc="left") for ax in by_rule.axes] == ["A", "B"]
    legend = [text.get_text() for text in by_rule.legends[0].get_texts()]
    assert legend == ["Median", "Krum"]


def test_the_fewer_of_figures_and_combinations_stand_side_by_side() -> None:
    table = [
        {"rule": rule, "tol": tol, "method": "A", "ter": 0.1, "asr": 0.2, "acp": 50.0}
        for rule in ("Median", "Krum")
        for tol in ("1", "2")
    ]
    figure = draw_values(table, ["rule", "tol"], x="tol", y=["ter", "asr", "acp"])
    places = [
        (ax.get_subplotspec().rowspan.start, ax.get_subplotspec().colspan.start)
        for ax in figure.axes
    ]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [ax.get_ylabel() for ax in figure.axes[::2]] == ["TER, %", "ASR, %", "ACP, %"]
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles == ["rule=Median", "rule=Krum", "", "", "", ""]
    one = draw_values(table[:2], ["tol"], x="tol", y=["ter", "acp"])
    width, height = one.get_size_inches()
    assert width < height  # so that it can be read on a telephone, too


def test_cost_against_error() -> None:
    table = [{**row, "exact_rounds": 10.0 * float(row["tol"])} for row in rows(["1", "2"])]
    figure = draw_cost(table, ["tol"])
    assert lines(figure.axes[0])["FedRecover"] == ([10, 20], pytest.approx([2, 3]))


def test_distributions_of_cp() -> None:
    cp = {"A": {"a": 80.0, "b": 80.0, "c": 90.0}, "Scratch": {"a": 0.0, "b": 0.0}}
    figure = draw_cp(cp)
    (ax,) = figure.axes  # all clients of the other are alike
    heights = [bar.get_height() for bar in ax.patches]
    assert (sum(heights), max(heights)) == (3, 2)
    assert "ACP 83.3" in ax.get_title(loc="right")
    table = [{"T": t, "method": "A", "cp": [80.0, 90.0, float(t)]} for t in ("70", "100")]
    table += [{"T": "70", "method": "Scratch", "cp": [0.0, 0.0]}]
    (boxes,) = draw_box(table, ["T"], x="T").axes
    assert [label.get_text() for label in boxes.get_xticklabels()] == ["70", "100"]


def test_the_same_figure_gives_the_same_bytes(tmp_path: Path) -> None:
    for kind in ("svg", "png", "pdf"):
        one, two = (
            save_figure(
                draw_values(rows(["1", "2"]), ["tol"], x="tol", y=["ter"]), tmp_path / f"{i}.{kind}"
            )
            for i in range(2)
        )
        assert one.read_bytes() == two.read_bytes()
    assert b"<dc:date>" not in (tmp_path / "0.svg").read_bytes()


def test_nothing_to_draw_and_too_much() -> None:
    with pytest.raises(ConfigurationError, match="figures to draw"):
        draw_values(rows(["1", "2"]), ["tol"], x="tol", y=["asr"])
    table = [{"k": str(i), "x": "1", "method": "A", "ter": 0.1} for i in range(13)]
    with pytest.raises(ConfigurationError, match="--where k=0"):
        draw_values(table, ["k", "x"], x="x", y=["ter"])
