"""Bars: widths follow from the numbers."""

from __future__ import annotations

import re

from fedrec.report.bars import cost_bars, score_bars


def test_cost_bars_are_in_proportion() -> None:
    methods = [
        {"name": "A <b>", "acp": 75.0, "exact_rounds_by_reason": {"warmup": 20.0, "final": 5.0}},
        {"name": "Scratch", "acp": 0.0, "exact_rounds_by_reason": {"scratch": 100.0}},
        {"name": "Nothing", "acp": None, "exact_rounds_by_reason": {}},
    ]
    html = cost_bars(methods)
    assert re.findall(r'<i class="(\w+)" style="width:([\d.]+)%"', html) == [
        ("warmup", "20.000"),
        ("final", "5.000"),
        ("scratch", "100.000"),
    ]
    assert "25.0 rounds, 75.0 % saved" in html
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
    names = re.findall(r'<span class="name">([^<]+)<', html)
    assert names == ["client-1", "client-2", "client-0"]
    assert re.findall(r'<i class="(\w+)" style="width:([\d.]+)%"', html) == [
        ("malicious", "100.00"),
        ("malicious", "50.00"),
        ("benign", "25.00"),
    ]
    assert html.count(">flagged<") == 1


def test_score_bars_of_many_clients_fold_the_rest() -> None:
    scores = {f"client-{i:02d}": float(-i) for i in range(30)}
    html = score_bars({"scores": scores, "malicious": [], "truth": []})
    assert "The other 6 clients" in html
    assert html.count('<div class="score">') == 30


def test_score_bars_of_equal_scores() -> None:
    html = score_bars({"scores": {"a": 0.0, "b": 0.0}, "malicious": [], "truth": []})
    assert html.count("width:0.00%") == 2
