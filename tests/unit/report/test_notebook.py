"""Results that show themselves, as tables, curves and data frames."""

from __future__ import annotations

import builtins
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedrec.exceptions import ConfigurationError, MissingDependencyError
from fedrec.metrics import CostLedger
from fedrec.report import Comparison, compare
from fedrec.report.costs import costs_table, write_costs
from fedrec.types import Detection, RunResult


def ledger() -> CostLedger:
    costs = CostLedger({"a": 4, "b": 4})
    for client, t, reason, steps in (
        ("a", 0, "warmup", 2),
        ("b", 0, "warmup", 2),
        ("b", 2, "final", 1),
    ):
        costs.add(client, t, reason, steps, num_bytes=1_500_000)
    return costs


def result(name: str = "FedRecover", **fields: Any) -> RunResult:
    values: dict[str, Any] = {
        "global_weights": torch.arange(1e6),
        "rounds": 4,
        "seconds": 1.26,
        "curve": [{"round": 1, "ter": 0.5, "f1": 0.25}, {"round": 3, "ter": 0.125, "f1": 0.75}],
        "ledger": ledger(),
    }
    return RunResult(name=name, **{**values, **fields})


def recorded() -> RunResult:
    detection = Detection(
        malicious=("<b>",), seen=("<b>", "a"), round=2, scores={"<b>": 2.0, "a": 1}
    )
    curve = [{"round": 3, "ter": 0.5, "asr": 0.9}]
    return result("record", ledger=None, detection=detection, curve=curve)


class Checked(HTMLParser):
    """Collects text and curves, and fails on a tag that is not closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.paths: list[str] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "wbr":
            self.open.append(tag)
        if tag == "path" and (dict(attrs).get("class") or "").startswith("line"):
            self.paths.append(dict(attrs)["d"] or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data
        if {"td", "th"} & set(self.open):
            self.cells.append(data)


def test_a_result_in_the_terminal_is_one_line_without_tensors() -> None:
    line = "RunResult(FedRecover: 4 rounds in 1.3 s, TER 12.5 %, f1 0.750, ACP 62.5 %)"
    assert repr(result()) == line
    line = "4 rounds in 1.3 s, TER 50.0 %, ASR 90.0 %, flagged 1 of 2 clients in round 2"
    assert repr(recorded()) == f"RunResult(record: {line})"
    assert repr(result(curve=(), ledger=None)) == "RunResult(FedRecover: 4 rounds in 1.3 s)"


def test_a_result_in_a_notebook_has_its_figures_and_a_curve() -> None:
    shown = Checked(result()._repr_html_())
    heads = ["Model", "TER %", "f1", "ACP %", "Exact rounds", "Client MB", "Rounds", "Seconds"]
    assert [c for c in shown.cells if c in heads] == heads
    assert [c for c in shown.cells if re.fullmatch(r"[\d.]+", c)] == [
        *("12.5", "0.750", "62.5", "1.5", "4.5", "4", "1.3"),
    ]
    # Rounds 1 and 3, at 50 and 12.5 percent, in the wide image: from left to right and down.
    points = [p for p in shown.paths if p.count(" ") == 2]
    (x0, y0), (x1, y1) = (map(float, p.split(" ")) for p in points[0].removeprefix("M").split("L"))
    assert x0 < x1
    assert y0 < y1


def test_names_of_clients_are_text_in_html() -> None:
    html = recorded()._repr_html_()
    assert "flagged 1 of 2 clients in round 2: <b>." in Checked(html).text
    assert "<b>" not in html
    detection = recorded().detection
    assert detection is not None
    cells = Checked(detection._repr_html_()).cells
    assert cells == ["Client", "Score", "Verdict", "<b>", "2", "flagged", "a", "1"]


def test_a_result_without_a_curve_shows_its_table() -> None:
    shown = Checked(result(curve=(), ledger=None)._repr_html_())
    assert shown.cells == ["Model", "Rounds", "Seconds", "Fed", "Recover", "4", "1.3"]


def test_how_clients_were_computed_and_why() -> None:
    plan = {
        "executor": "E",
        "device": "cpu",
        "path": "sequential",
        "threads": 1,
        "refused": "Noisy draws a number",
    }
    text = Checked(result(execution=plan)._repr_html_()).text
    assert text.endswith("Computed on cpu (sequential, 1 thread): Noisy draws a number.")
    departure = {"round": 3, "reason": "a hook was added", "client": None, "difference": None}
    text = Checked(result(execution={**plan, "departure": departure})._repr_html_()).text
    assert text.endswith("The executor left its plan in round 3: a hook was added")


def test_the_file_of_the_model_is_named(tmp_path: Any) -> None:
    shown = Checked(result(checkpoint=tmp_path / "model.ckpt")._repr_html_())
    assert shown.text.endswith(f"Model: {tmp_path / 'model.ckpt'}")


def test_the_ledger_in_a_notebook() -> None:
    shown = Checked(ledger()._repr_html_())
    assert shown.text.startswith("2 clients: ACP 62.5 %, CP 50.0 to 75.0 %.")
    rows = [shown.cells[i : i + 5] for i in range(5, 15, 5)]
    assert rows == [["warmup", "1.0", "2", "4", "3.0"], ["final", "0.5", "1", "1", "1.5"]]
    # By client, beside training from scratch: a row for each, and one for both.
    assert shown.cells[-10:-5] == ["b", "2", "3.00", "4", "6.00"]
    assert shown.cells[-5:] == ["all", "3", "4.50", "8", "12.00"]
    assert "nobody has rounds to save" in Checked(CostLedger({"a": 0})._repr_html_()).text


def test_frames_of_a_result_and_its_ledger() -> None:
    frame = result().to_pandas()
    assert frame.to_dict("list") == {"round": [1, 3], "ter": [0.5, 0.125], "f1": [0.25, 0.75]}
    frame = ledger().to_pandas()
    assert list(frame.columns) == [
        "client_id",
        "round",
        "reason",
        "local_steps",
        "num_bytes",
        "seconds",
    ]
    assert frame.values.tolist() == [list(entry) for entry in ledger().entries]
    assert frame.groupby("reason", observed=True)["local_steps"].sum().to_dict() == {
        "warmup": 4, "final": 1,
    }  # fmt: skip
    assert CostLedger({"a": 1}).to_pandas().empty


def test_frames_of_a_detection() -> None:
    rounds = {4: {"a": 0.5}, 5: {"a": 0.25, "b": 0.75}}
    detection = Detection(
        malicious=("b",), seen=("a", "b"), scores={"b": 0.75}, round_scores=rounds
    )
    frame = detection.to_pandas()
    assert frame["client_id"].tolist() == ["a", "b"]
    assert np.isnan(frame["score"][0])
    assert frame["flagged"].tolist() == [False, True]
    frame = detection.to_pandas(by_round=True)
    assert frame.values.tolist() == [
        [4, "a", 0.5, False], [5, "a", 0.25, False], [5, "b", 0.75, True],
    ]  # fmt: skip


def test_results_side_by_side() -> None:
    both = compare(recorded(), result(), result())
    assert repr(both).splitlines() == [
        "Model           TER %  ASR %     f1  ACP %  Exact rounds  Client MB  Rounds  Seconds",
        "record           50.0   90.0      -      -             -          -       4      1.3",
        "FedRecover       12.5      -  0.750   62.5           1.5        4.5       4      1.3",
        "FedRecover (2)   12.5      -  0.750   62.5           1.5        4.5       4      1.3",
    ]
    frame = both.to_pandas()
    assert frame["name"].tolist() == ["record", "FedRecover", "FedRecover (2)"]
    assert frame["acp"].tolist()[1:] == [0.625, 0.625]
    assert frame["exact_rounds"].isna().tolist() == [True, False, False]
    assert frame["client_bytes"][1] == 4_500_000
    shown = Checked(both._repr_html_())
    assert "TER, % by round" in shown.text
    assert "ASR, % by round" in shown.text


@pytest.mark.parametrize("wrong", [(), ("record",), (RunResult,)])
def test_only_results_can_be_compared(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigurationError, match="one or more `RunResult`s"):
        Comparison(wrong)


def test_curves_by_matplotlib() -> None:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    assert result().plot(ax=ax) is ax
    (line,) = ax.lines
    assert line.get_xydata().tolist() == [[1, 50], [3, 12.5]]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("round", "TER, %")
    ax = compare(recorded(), result()).plot("f1", ax=Figure().subplots())
    assert ax.lines[0].get_ydata().tolist() == [0.25, 0.75]
    assert isinstance(ax, Axes)
    with pytest.raises(ConfigurationError, match=r"Did you mean `ter`\? Known: ter, f1"):
        result().plot("tre")
    with pytest.raises(ConfigurationError, match="needs test data"):
        result(curve=()).plot()


@pytest.mark.parametrize(
    ("package", "extra", "call"),
    [
        ("pandas", "pandas", lambda: result().to_pandas()),
        ("pandas", "pandas", lambda: ledger().to_pandas()),
        ("matplotlib", "plot", lambda: result().plot()),
    ],
)
def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, package: str, extra: str, call: Any
) -> None:
    importing = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return importing(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingDependencyError, match=rf"fedrec\[{extra}\]"):
        call()


def test_a_ledger_shows_what_each_client_has_cost() -> None:
    """Two requests of 1.5 MB and 0.25 s each; training from scratch would be eight of them."""
    costs = CostLedger({"a": 8})
    for t in (0, 1):
        costs.add("a", t, "warmup", num_bytes=1_500_000, seconds=0.25)
    assert costs_table(costs).rows[0] == ["a", "2", "3.00", "0.5", "8", "12.00", "2.0"]
    untimed = CostLedger({"a": 8})
    untimed.add("a", 0, "warmup", num_bytes=1_500_000)
    assert costs_table(untimed).rows[0] == ["a", "1", "1.50", "8", "12.00"]


def test_a_page_has_the_costs_of_each_client(tmp_path: Path) -> None:
    """One of eight rounds was asked of one client, and none of the other: CP 7/8 and 1."""
    costs = CostLedger({"<a>": 8, "b": 8})
    costs.add("<a>", 0, "warmup", num_bytes=1_500_000, seconds=0.25)
    page = write_costs(costs, tmp_path / "costs.html", title="Of <mine>").read_text()
    assert "<h1>Of &lt;mine&gt;</h1>" in page
    assert "<p>2 clients: ACP 93.8 %.</p>" in page
    cells = ("1", "1.50", "0.2", "8", "12.00", "2.0")
    row = "".join(f"<td>{cell}</td>" for cell in cells)
    assert f'<tr><th scope="row">&lt;a&gt;</th>{row}</tr>' in page
