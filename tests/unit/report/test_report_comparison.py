"""Several runs on one page: every figure in its place, differing settings named."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from fedrec.report import write_comparison

EVIL = "\"><script>alert('x')</script>"


def made(path: Path, name: str, methods: dict[str, float], **recipe: Any) -> Path:
    """Write a run folder with these methods and their test error rates."""
    (path / "record").mkdir(parents=True)
    (path / "record" / "metrics.csv").write_text("round,ter,asr\n0,0.9,\n9,0.7,\n")
    reasons = {"warmup": 20.0}
    costs = {"asr": None, "acp": 0.8, "cp_min": 0.8, "cp_max": 0.8, "seconds": 2.0}
    content = {
        "recipe": {"name": name, "recoverers": [{"class_path": m} for m in methods], **recipe},
        "synthetic_data": recipe.get("data") == "Purchase",
        "poisoned": {"ter": 0.7, "asr": None},
        "detection": None,
        "methods": [
            {"name": m, "ter": ter, "exact_rounds_by_reason": reasons, **costs}
            for m, ter in methods.items()
        ],
        "history": {"bytes": 1, "rounds": 10, "clients": 5},
        "execution": {"threads": 1},
        "versions": {"fedrec": "0.1.0"},
    }
    (path / "results.json").write_text(json.dumps(content))
    return path


class Tables(HTMLParser):
    """Reads tables: the exact value of a figure where there is one, else the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: set[str] = set()
        self._rows: list[list[str]] = []
        self._exact = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        values = dict(attrs)
        if values.get("role") == "region":
            self._rows = self.tables[str(values["aria-label"])] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        elif tag == "data" and self._rows:
            self._rows[-1][-1], self._exact = str(values["value"]), True

    def handle_endtag(self, tag: str) -> None:
        self._exact = self._exact and tag != "data"
        if tag == "table":
            self._rows = []

    def handle_data(self, data: str) -> None:
        if self._rows and self._rows[-1] and not self._exact:
            self._rows[-1][-1] += data


def test_methods_and_runs(tmp_path: Path) -> None:
    one = made(tmp_path / "a", "one", {"FedRecover": 0.1234, "TrainFromScratch": 0.11}, seed=1)
    two = made(tmp_path / "b", "two", {"FedRecover": 0.2, "HistoricalOnly": 0.9}, seed=2)
    page = write_comparison([one, two], tmp_path / "out" / "page.html")
    assert page == tmp_path / "out" / "page.html"
    tables = Tables(page.read_text()).tables
    assert tables["Test error rate (TER, %)"] == [
        ["Model", "one", "two"],
        ["Poisoned model", "0.7", "0.7"],
        ["FedRecover", "0.1234", "0.2"],
        ["TrainFromScratch (reference)", "0.11", "-"],
        ["HistoricalOnly", "-", "0.9"],
    ]
    assert "Attack success rate (ASR, %)" not in tables  # nobody has one
    assert tables["Exact rounds per client"][1] == ["FedRecover", "20.0", "20.0"]
    assert tables["What differs"] == [
        ["Setting", "one", "two"],
        ["recoverers.1", "TrainFromScratch", "HistoricalOnly"],
        ["seed", "1", "2"],
    ]


def test_a_method_has_one_colour_in_all_runs(tmp_path: Path) -> None:
    one = made(tmp_path / "a", "one", {"A": 0.1, "B": 0.2})
    two = made(tmp_path / "b", "two", {"B": 0.1, "C": 0.2})
    text = write_comparison([one, two], tmp_path / "page.html").read_text()
    rows = re.findall(
        r'<th scope="row"><svg[^>]*><path class="line (\S+)"[^>]*></svg>([ABC])<', text
    )
    assert set(rows) == {("method-0", "A"), ("method-1", "B"), ("method-2", "C")}


def test_runs_of_the_same_name_go_by_their_folders(tmp_path: Path) -> None:
    folders = [made(tmp_path / name, "same", {"A": 0.1}) for name in "ab"]
    text = write_comparison(folders, tmp_path / "page.html").read_text()
    assert Tables(text).tables["Test error rate (TER, %)"][0] == ["Model", *map(str, folders)]
    assert text.count("<p>None.</p>") == 2  # neither settings nor versions differ


def test_synthetic_data_is_named(tmp_path: Path) -> None:
    one = made(tmp_path / "a", "one", {"A": 0.1}, data="Digits")
    two = made(tmp_path / "b", "two", {"A": 0.1}, data="Purchase")
    text = write_comparison([one, two], tmp_path / "page.html").read_text()
    assert re.findall(r'<p class="warning">([^<]*made up)', text) == [
        "two: synthetic data: Purchase is made up"
    ]


def test_what_recipes_say_stays_text(tmp_path: Path) -> None:
    one = made(tmp_path / "a", EVIL, {EVIL: 0.1}, data=EVIL)
    two = made(tmp_path / "b", "two", {EVIL: 0.1}, data={EVIL: 1})
    page = write_comparison([one, two], tmp_path / "page.html")
    assert page.read_text().count("<script>") == 1
    assert Tables(page.read_text()).tables["Test error rate (TER, %)"][2] == [EVIL, "0.1", "0.1"]
