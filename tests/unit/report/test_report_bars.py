"""Bars: widths follow from the numbers."""

from __future__ import annotations

import re

from fedrec.report.bars import cost_bars, histogram, score_bars, seconds_bars, value_bars


def test_cost_bars_are_in_proportion() -> None:
    methods = [
        {"name": "A <b>", "acp": 0.75, "exact_rounds_by_reason": {"warmup": 20.0, "final": 5.0}},
        {"name": "Scratch", "acp": 0.0, "exact_rounds_by_reason": {"scratch": 100.0}},
        {"name": "Nothing", "acp": None, "exact_rounds_by_reason": {}},
    ]
    html = cost_bars(methods)
    assert re.findall(r'<i class="(\w+)" style="width:([\d.]+)%"', html) == [
        ("warmup", "20.000"),
        ("final", "5.000"),
        ("scratch", "100.000"),
    ]
    assert '25.0 rounds, <data value="0.75">75.0</data> % saved' in html
    assert 'aria-label="warm-up 20.0 rounds, final tuning 5.0 rounds"' in html
    assert "0.0 rounds</span>" in html
    assert "A &lt;b&gt;" in html
    assert "abnormality" not in html  # a reason that nobody was asked for needs no key


def test_score_bars_are_sorted_and_marked() -> None:
    detection = {
        "scores": {"client-0": 1.0, "client-1": 4.0, "client-2": 2.0},
        "malicious": ["client-1"],
        "truth": ["client-1", "client-2"],
    }
    html = score_bars(detection)
    names = re.findall(r'<span class="name"[^>]*>([^<]+)<', html)
    assert names == ["client-1", "client-2", "client-0"]
    assert re.findall(r'<i class="(\w+)" style="width:([\d.]+)%"', html) == [
        ("malicious", "100.00"),
        ("malicious", "50.00"),
        ("benign", "25.00"),
    ]
    assert re.findall(r'<span class="flag[^>]*>([^<]*)<', html) == ["found", "missed", ""]


def test_score_bars_of_many_clients_fold_the_rest() -> None:
    scores = {f"client-{i:02d}": float(-i) for i in range(30)}
    html = score_bars({"scores": scores, "malicious": [], "truth": []})
    assert "The other 6 clients" in html
    assert html.count('<div class="score">') == 30


def test_score_bars_of_equal_scores() -> None:
    html = score_bars({"scores": {"a": 0.0, "b": 0.0}, "malicious": [], "truth": []})
    assert html.count("width:0.00%") == 2


def test_seconds_are_split_into_server_and_clients() -> None:
    html = seconds_bars([("Recording", 8.0, {"record": 6.0}), ("A", 4.0, {"warmup": 1.0})])
    assert re.findall(r'<i class="(\w+)" style="width:([\d.]+)%"', html) == [
        ("server", "25.000"),
        ("record", "75.000"),
        ("server", "37.500"),
        ("warmup", "12.500"),
    ]
    assert "4.0 s, 1.0 by clients" in html


def test_a_line_is_where_the_reference_is() -> None:
    rows = [("A", "method-0", 0.2, "0.200"), ("Scratch", "scratch-line", 0.1, "0.100")]
    html = value_bars(rows, 0.0, 0.1)
    assert re.findall(r'style="width:([\d.]+)%', html) == ["100.000", "50.000"]
    assert html.count('<b style="left:50.000%">') == 2
    assert "<b " not in value_bars(rows, 0.0, None)


def test_a_histogram_counts_every_client_once() -> None:
    values = [80.0, 80.4, 81.0, 82.9, 83.0, 83.5]
    html = histogram(values, "%", "method-0")
    bins = re.findall(r'class="name">([^<]+)<.*?width:([\d.]+)%.*?class="value">(\d+)', html)
    assert bins == [
        ("80.0 to 80.5 %", "100.00", "2"),
        ("80.5 to 81.0 %", "0.00", "0"),
        ("81.0 to 81.5 %", "50.00", "1"),
        ("81.5 to 82.0 %", "0.00", "0"),
        ("82.0 to 82.5 %", "0.00", "0"),
        ("82.5 to 83.0 %", "50.00", "1"),
        ("83.0 to 83.5 %", "50.00", "1"),
        ("83.5 to 84.0 %", "50.00", "1"),
    ]
