"""Figures: what is drawn is what is in the table, wherever it belongs."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D

from fedrec.exceptions import ConfigurationError
from fedrec.recipe.tables import figures_of
from fedrec.report import draw_box, draw_cost, draw_cp, draw_values, save_figure
from fedrec.report.looks import axis_name, looks_of


def rows(values: list[str], **more: Any) -> list[dict[str, Any]]:
    """Two methods and two repeats at every value: TER is i/100 and i/100 + 0.02."""
    return [
        {"tol": v, "method": m, "ter": (i + 2 * r) / 100, "acp": 0.5, "asr": None, **more}
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


def at_the_ends(seeds: int = 1) -> list[dict[str, Any]]:
    """Return TER of 0, 0.2 and 1, and ACP of 0 and 1: marks at all ends of the axes."""
    return [
        {"tol": t, "method": m, "ter": ter, "acp": acp, "exact_rounds": 100 - 100 * acp}
        for t in ("5", "10", "100")
        for m, ter, acp in (("A", 0.2, 0.5), ("B", 0.0, 1.0), ("TrainFromScratch", 1.0, 0.0))
        for _ in range(seeds)
    ]


def test_every_mark_is_whole() -> None:
    table, flat = at_the_ends(), [{"tol": t, "method": "A", "ter": 0.2} for t in "12"]
    for figure in (
        draw_values(table, ["tol"], x="tol", y=["ter", "acp"]),
        draw_values(flat, ["tol"], x="tol", y=["ter"]),
        draw_cost(table, ["tol"]),
    ):
        figure.draw_without_rendering()
        for ax in figure.axes:
            bottom, _ = ax.get_ylim()
            assert bottom < 0
            for series in ax.containers:
                (mark,) = series.lines[:1]
                radius = mark.get_markersize() / 2 / 72 * figure.dpi
                points = ax.transData.transform(mark.get_xydata())
                assert len(points) in (2, 3)
                assert (points - radius >= ax.bbox.min).all()
                assert (points + radius <= ax.bbox.max).all()


def test_values_below_zero_are_on_the_axis() -> None:
    table = [{"tol": t, "method": "A", "metrics.gain": -float(t)} for t in ("1", "3")]
    for x in ("tol", "method"):
        (ax,) = draw_values(table[1:], ["tol"], x=x, y=["metrics.gain"]).axes
        bottom, top = ax.get_ylim()
        assert bottom < -3 < 0 <= top
        assert ax.get_ylabel() == "gain"


def test_acp_is_whole_where_clients_compute_more_than_in_the_recording() -> None:
    for lowest, bottom in ((-0.4, -47.0), (0.2, -5.0)):  # a twentieth of the range is the margin
        table = [{"tol": t, "method": "A", "acp": acp} for t, acp in (("1", 0.5), ("2", lowest))]
        (ax,) = draw_values(table, ["tol"], x="tol", y=["acp"]).axes
        assert ax.get_ylim() == pytest.approx((bottom, 100 - bottom + 100 * min(lowest, 0.0)))


def test_bars_stand_on_the_axis() -> None:
    table = [{"rule": r, "method": "A", "ter": 0.5, "acp": 0.0} for r in ("Median", "Krum")]
    figure = draw_values(table, ["rule"], x="rule", y=["ter", "acp"])
    assert [ax.get_ylim()[0] for ax in figure.axes] == [0, 0]


def test_error_bars_are_drawn_for_repeats_alone() -> None:
    for seeds in (1, 3):
        for figure in (
            draw_values(at_the_ends(seeds), ["tol"], x="tol", y=["ter"]),
            draw_values(at_the_ends(seeds), ["tol"], x="method", y=["ter"], by="tol"),
        ):
            errors = [c.lines[2][0] for c in figure.axes[0].containers if hasattr(c, "lines")]
            errors = [error for error in errors if to_hex(error.get_color()[0]) != "#ffffff"]
            drawn = sum(len(ends) > 0 for error in errors for ends in error.get_segments())
            assert drawn == (0 if seeds == 1 else 9)


def test_error_bars_have_a_light_edge_to_be_seen_on_dark_bars() -> None:
    ax, *_ = draw_values(at_the_ends(3), ["tol"], x="method", y=["ter"]).axes
    errors = [c.lines[2][0] for c in ax.containers if hasattr(c, "lines")]
    assert len(errors) == 6  # of three methods
    for light, dark in zip(errors[::2], errors[1::2], strict=True):
        assert [to_hex(error.get_color()[0]) for error in (light, dark)] == ["#ffffff", "#333333"]
        assert light.get_linewidth()[0] > 2 * dark.get_linewidth()[0]
        ends = [[segment.tolist() for segment in e.get_segments()] for e in (light, dark)]
        assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (("true", "true"), "synthetic data"),
        (("true", "false"), "in part synthetic data"),
        (("false", "false"), ""),
        (("", "true"), "synthetic data"),  # a row of a failure does not know
    ],
)
def test_synthetic_data_are_named(told: tuple[str, str], said: str) -> None:
    table = [
        {**row, "exact_rounds": 5.0, "cp": [0.01, 0.02], "synthetic_data": told[i % 2]}
        for i, row in enumerate(rows(["1", "2"]))
    ]
    figures = [
        draw_values(table, ["tol"], x="tol", y=["ter", "acp"]),
        draw_cost(table, ["tol"]),
        draw_box(table, ["tol"], x="tol"),
        draw_cp({"A": {"a": 1.0, "b": 2.0}}, synthetic=said == "synthetic data"),
    ]
    for figure in figures[: 4 if said in ("synthetic data", "") else 3]:
        assert figure.get_supxlabel() == said
    if said:
        figure = figures[0]
        figure.draw_without_rendering()
        (note,) = (text for text in figure.texts if text.get_text() == said)
        box = note.get_window_extent()
        assert box.x1 <= figure.bbox.x1
        assert 0 <= box.y0 < box.y1 <= figure.axes[-1].xaxis.label.get_window_extent().y0


def test_names_of_axes_are_no_longer_than_panels_are_high() -> None:
    names = figures_of([])
    table = [
        {"tol": tol, "rule": rule, "method": "A", "synthetic_data": "true"}
        | dict.fromkeys(names, 0.5)
        for tol in ("1", "2")
        for rule in ("Median", "Krum")
    ]
    every = draw_values(table[::2], ["tol", "rule"], x="tol", y=names)
    labels = [ax.yaxis.label for ax in every.axes]
    assert [label.get_text().replace("\n", " ") for label in labels] == [*map(axis_name, names)]
    assert {label.get_text().count("\n") for label in labels} == {0, 1}
    two = draw_values(table, ["tol", "rule"], x="tol", y=["ter", "asr"])  # a title on every panel
    two.draw_without_rendering()
    lowest = min(ax.get_window_extent().height for ax in two.axes)
    assert max(label.get_window_extent().height for label in labels) <= lowest


def test_a_method_looks_the_same_in_every_figure() -> None:
    names = ["Poisoned", "A", "B", "TrainFromScratch", "C"]
    rows = [
        {"tol": t, "rule": r, "method": m, "ter": 0.1, "exact_rounds": 5.0, "cp": [0.01, 0.02]}
        for t in ("1", "2")
        for r in ("Median", "Krum")
        for m in names
    ]
    some = [row for row in rows if row["method"] in ("B", "C") and row["rule"] == "Krum"]
    every = draw_values([r for r in rows if r["rule"] == "Krum"], ["tol"], x="tol", y=["ter"])
    wanted = {c.get_label(): c.lines[0].get_color() for c in every.axes[0].containers}
    assert len(set(wanted.values())) == len(names)
    for figure in (
        draw_values(some, ["tol"], x="tol", y=["ter"], names=names),
        draw_cost(some, ["tol"], names=names),
    ):
        found = {c.get_label(): c.lines[0].get_color() for c in figure.axes[0].containers}
        assert found == {"B": wanted["B"], "C": wanted["C"]}
    boxes = draw_box(some, ["tol"], x="tol", names=names)
    for ax in boxes.axes:
        colour = ax.patches[0].get_facecolor()[:3]
        assert to_hex(colour) == wanted[ax.get_title(loc="left")]


def test_nine_methods_are_told_apart_without_colour() -> None:
    methods = [f"M{i}" for i in range(9)]
    looks = looks_of([*methods, "Poisoned", "TrainFromScratch"])
    lines = {(look.line["marker"], look.line["linestyle"]) for look in list(looks.values())[:8]}
    assert len(lines) == 8
    assert len({look.bar.get("hatch") for look in list(looks.values())[:8]}) == 8
    assert len({(look.line["color"], look.line["marker"]) for look in looks.values()}) == 11


@pytest.mark.parametrize("methods", [1, 6])
def test_a_figure_is_as_wide_as_a_column_and_its_legend_fits(methods: int) -> None:
    table = [
        {"tol": t, "method": f"Recovery of kind {m}" * (1 + m % 2), "ter": 0.1, "acp": 0.5}
        for t in ("5", "10")
        for m in range(methods)
    ]
    figure = draw_values(table, ["tol"], x="tol", y=["ter", "acp"])
    figure.draw_without_rendering()
    assert figure.get_figwidth() <= 3.5  # inches: what two-column papers have
    legend = figure.legends[0].get_window_extent()
    assert (legend.min >= 0).all()
    assert (legend.max <= figure.bbox.max).all()
    assert all(ax.get_window_extent().y1 <= legend.y0 for ax in figure.axes)
    assert all(ax.get_window_extent().height > figure.dpi for ax in figure.axes)  # over an inch
    assert {type(handle) for handle in figure.legends[0].legend_handles} == {Line2D}


def test_axes_have_the_names_and_units_of_papers() -> None:
    key = "recoverers.0.init_args.correction_period"
    table = [{key: t, "method": "A", "seconds": 1.0, "client_bytes": 5e6} for t in ("5", "20")]
    top, bottom = draw_values(table, [key], x=key, y=["seconds", "client_bytes"]).axes
    assert bottom.get_xlabel() == "correction period $T_c$, rounds"
    assert (top.get_ylabel(), bottom.get_ylabel()) == ("time, s", "traffic of clients, MB")
    assert lines(bottom)["A"] == ([5, 20], [5, 5])
    assert [label.get_text() for label in bottom.get_xticklabels()] == ["5", "20"]


def test_values_that_span_a_decade_get_a_logarithmic_axis() -> None:
    figure = draw_values(rows(["1e-7", "1e-5", "1e-3"]), ["tol"], x="tol", y=["ter"])
    assert figure.axes[0].get_xscale() == "log"
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == [f"$\\mathdefault{{10^{{{power}}}}}$" for power in (-7, -5, -3)]


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
        {"rule": rule, "tol": tol, "method": "A", "ter": 0.1, "asr": 0.2, "acp": 0.5}
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


def test_distributions_of_cp(caplog: pytest.LogCaptureFixture) -> None:
    cp = {"A": {"a": 0.8, "b": 0.8, "c": 0.9}, "Scratch": {"a": 0.0, "b": 0.0}}
    caplog.set_level(logging.INFO, "fedrec.report.figures")
    figure = draw_cp(cp)
    (ax,) = figure.axes  # all clients of the other are alike
    said = "Not drawn, as all of their clients have the same CP: Scratch."
    assert caplog.messages == [said]
    heights = [bar.get_height() for bar in ax.patches]
    assert (sum(heights), max(heights)) == (3, 2)
    assert "ACP 83.3" in ax.get_title(loc="right")
    low, high = ax.get_xlim()
    assert (low, high) == (pytest.approx(80 - 1.5 * 10 / 16), pytest.approx(90 + 1.5 * 10 / 16))
    near = draw_cp({"A": {"a": 0.86167, "b": 0.86333}})
    near.draw_without_rendering()
    places = [label.get_window_extent() for label in near.axes[0].get_xticklabels()]
    assert all(one.x1 < other.x0 for one, other in itertools.pairwise(places))
    both = draw_cp({"A": {"a": 0.8, "b": 0.9}, "B": {"a": 0.4, "b": 0.2}})
    edges = [[bar.get_x() for bar in ax.patches] for ax in both.axes]
    assert edges[0] == edges[1]  # so that methods can be compared
    assert both.axes[0].get_xlim() == both.axes[1].get_xlim()
    table = [{"T": t, "method": "A", "cp": [0.8, 0.9, float(t) / 100]} for t in ("70", "100")]
    table += [{"T": "70", "method": "Scratch", "cp": [0.0, 0.0]}]
    (boxes,) = draw_box(table, ["T"], x="T").axes
    assert caplog.messages == [said, said]  # nothing is left out of those between
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
    assert b"/Type3" not in (tmp_path / "0.pdf").read_bytes()  # publishers refuse such fonts


def test_nothing_to_draw_and_too_much() -> None:
    with pytest.raises(ConfigurationError, match="figures to draw"):
        draw_values(rows(["1", "2"]), ["tol"], x="tol", y=["asr"])
    table = [{"k": str(i), "x": "1", "method": "A", "ter": 0.1} for i in range(13)]
    with pytest.raises(ConfigurationError, match="--where k=0"):
        draw_values(table, ["k", "x"], x="x", y=["ter"])
