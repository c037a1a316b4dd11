"""The page: complete, self-contained, and safe whatever a recipe says."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fedrec.recipe.schema import folder_name
from fedrec.report import print_results, write_report

EVIL = "</pre><script>alert('x')</script><img src=http://evil.example onerror=alert(1)>"


def results(**more: Any) -> dict[str, Any]:
    reasons = {"warmup": 20.0, "correction": 10.0}
    cost = {"acp": 0.7, "cp_min": 0.69, "cp_max": 0.71, "seconds": 1.5}
    method = {"ter": 0.0512, "asr": None, "exact_rounds_by_reason": reasons, **cost}
    return {
        "recipe": {
            "name": "tiny",
            "recoverers": [
                {"class_path": "FedRecover", "label": "Mine"},
                "TrainFromScratch",
            ],
        },
        "poisoned": {"ter": 0.5, "asr": None},
        "detection": {"malicious": ["client-1"], "fnr": 0.0, "fpr": 0.25, "round": 30},
        "methods": [{"name": "Mine", **method}, {"name": "TrainFromScratch", **method}],
        "history": {"bytes": 1_500_000, "rounds": 100, "clients": 5},
        "execution": {"device": "cpu"},
        "versions": {"fedrec": "0.1.0"},
        **more,
    }


def folder(path: Path, content: dict[str, Any]) -> Path:
    (path / "record").mkdir(parents=True)
    (path / "results.json").write_text(json.dumps(content))
    (path / "record" / "metrics.csv").write_text("round,ter,asr\n0,0.9,\n1,,\n2,0.5,\n")
    for name in ("Mine", "TrainFromScratch"):
        (path / "recover" / name).mkdir(parents=True)
        (path / "recover" / name / "metrics.csv").write_text("round,ter,asr\n0,0.9,\n2,0.05,\n")
    detection = {"scores": {"client-1": 2.0}, "malicious": ["client-1"], "truth": ["client-1"]}
    (path / "detection.json").write_text(json.dumps({"spec": {}, "result": detection}))
    return path


class Reader(HTMLParser):
    """Collects tags, references and headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "data", "action", "srcset"):
                self.references.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)


def test_sections_and_curves(tmp_path: Path) -> None:
    text = write_report(folder(tmp_path, results())).read_text()
    assert re.findall(r"<h2>([^<]+)</h2>", text) == [
        "Summary",
        "Beside training from scratch",
        "Test error rate (TER, %) by round",
        "What recovery costs clients, by reason",
        "Detection",
        "History",
        "Settings",
        "Execution and versions",
        "Do it again",
    ]
    assert "TrainFromScratch (reference)" in text
    assert "Poisoned recording" in text
    assert 'class="line method-0"' in text
    assert 'class="line scratch-line"' in text
    assert '<td><data value="0.0512">5.1</data></td>' in text
    assert "recipe.yaml name=tiny-again" in text
    assert "prefers-color-scheme: dark" in text


def test_names_break_between_their_words(tmp_path: Path) -> None:
    text = write_report(folder(tmp_path, results())).read_text()
    assert "Train<wbr>From<wbr>Scratch <small>(reference)" in text


def test_attack_success_has_a_curve_where_it_is_defined(tmp_path: Path) -> None:
    path = folder(tmp_path, results())
    (path / "record" / "metrics.csv").write_text("round,ter,asr\n0,0.9,0.1\n2,0.5,0.8\n")
    assert "Attack success rate (ASR, %) by round" in write_report(path).read_text()


def test_a_low_attack_success_rate_is_explained_where_there_is_one(tmp_path: Path) -> None:
    said = "A model that predicts nothing well has a low ASR, too."
    without, having = results(), results()
    having["poisoned"]["asr"] = 0.9
    assert said not in write_report(folder(tmp_path / "without", without)).read_text()
    assert said in write_report(folder(tmp_path / "having", having)).read_text()


def test_the_summary_has_attack_success_rates_where_there_are_any(tmp_path: Path) -> None:
    without, having = results(), results()
    having["poisoned"]["asr"] = 0.9
    assert ">ASR %<" not in write_report(folder(tmp_path / "without", without)).read_text()
    assert ">ASR %<" in write_report(folder(tmp_path / "having", having)).read_text()


def test_savings_that_are_the_same_for_all_clients_take_one_line(tmp_path: Path) -> None:
    path = folder(tmp_path, results())
    name = results()["methods"][0]["name"]
    result = path / "recover" / folder_name(name) / "result.json"
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps({"result": {"cp": {"a": 0.8, "b": 0.8}}}))
    assert "<td>80.0 % for each of 2 clients</td>" in write_report(path).read_text()


def test_nothing_is_fetched_and_one_script_runs(tmp_path: Path) -> None:
    text = write_report(folder(tmp_path, results())).read_text()
    reader = Reader(text)
    assert reader.references == []
    assert reader.handlers == []
    assert reader.tags.count("script") == 1
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert "default-src 'none'" in text


def test_what_a_recipe_says_stays_text(tmp_path: Path) -> None:
    recipe = {
        "name": "tiny",
        "note": EVIL,
        "recoverers": [
            {"class_path": "FedRecover", "label": "Mine"},
            {"class_path": "X", "label": EVIL},
        ],
    }
    content = results(
        recipe=recipe,
        detection={"malicious": [EVIL], "fnr": None, "fpr": None, "round": None},
        versions={EVIL: EVIL},
    )
    content["methods"][1]["name"] = EVIL
    path = folder(tmp_path, content)
    detection = {"scores": {EVIL: 1.0}, "malicious": [EVIL], "truth": []}
    (path / "detection.json").write_text(json.dumps({"result": detection}))
    reader = Reader(write_report(path).read_text())
    assert reader.tags.count("script") == 1
    assert "img" not in reader.tags
    assert reader.handlers == []


def test_a_recording_alone_has_a_page(tmp_path: Path) -> None:
    text = write_report(folder(tmp_path, results(methods=[], detection=None))).read_text()
    assert "No detection." in text
    assert "What recovery costs" not in text


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    content = results()
    content["methods"][0] |= {"name": "[bold]not markup[/bold]", "relative_distance": 0.125}
    content["methods"][1]["metrics"] = {"forgotten": 0.25}
    print_results(content, Console(width=80))
    lines = capsys.readouterr().out.splitlines()
    row, own = [line for line in lines if "not markup" in line]
    assert own.split() == ["[bold]not", "markup[/bold]", "-"]
    assert row.split() == [
        "[bold]not", "markup[/bold]", "5.1", "0.125", "70.0", "69.0-71.0", "30.0", "1.5",
    ]  # fmt: skip
    assert any(line.split() == ["Poisoned", "50.0", "-"] for line in lines)
    assert any(line.split() == ["TrainFromScratch", "0.250"] for line in lines)
    assert any(line.split() == ["Model", "forgotten"] for line in lines)
    assert lines[0].rstrip() == "tiny"
    assert lines[-1].startswith("Flagged as malicious in round 30: client-1. FNR 0.000, FPR 0.250.")


def test_the_table_names_synthetic_data_and_breaks_no_name_of_one_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from rich.console import Console

    content = results(synthetic_data=True)
    content["methods"][0] |= {"name": "KnowledgeDistillation", "cp_max": 1.0, "seconds": 1234.5}
    content["poisoned"]["asr"] = 0.9
    print_results(content, Console(width=80))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].rstrip() == "tiny (synthetic data)"
    (row,) = [line for line in lines if "Knowledge" in line]
    assert row.split() == [
        "KnowledgeDistillation", "5.1", "-", "-", "70.0", "69.0-100.0", "30.0", "1234.5",
    ]  # fmt: skip


def test_nobody_flagged_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    nobody = {"malicious": [], "fnr": 1.0, "fpr": 0.0, "round": None}
    print_results(results(detection=nobody), Console(width=200))
    # Also where clients are listed, and the methods do not ask the detector.
    said = "Nobody was flagged as malicious; recoveries need `recover.exclude`."
    assert said in capsys.readouterr().out
    honest = {**results(), "recording": {"malicious": []}}
    print_results(honest, Console(width=200))
    assert "Recorded " in capsys.readouterr().out


def test_costs_of_each_client_beside_training_from_scratch(tmp_path: Path) -> None:
    """One client was spared all that the other was asked for."""
    path = folder(tmp_path, results())
    heads = "client_id,round,reason,local_steps,num_bytes,seconds\n"
    entries = {"Mine": ("a",), "TrainFromScratch": ("a", "b", "b")}
    for name, clients in entries.items():
        (path / "recover" / name).mkdir(parents=True, exist_ok=True)
        lines = [f"{c},{t},scratch,1,1500000,0.25\n" for t, c in enumerate(clients)]
        (path / "recover" / name / "ledger.csv").write_text(heads + "".join(lines))
    text = write_report(path).read_text()
    listed = text.partition("<details><summary>Mine</summary>")[2].partition("</table>")[0]
    rows = re.findall(r'<th scope="row">(\w+)</th>(.*?)</tr>', listed)
    assert {name: re.findall(r"<td>(.*?)</td>", cells) for name, cells in rows} == {
        "a": ["1", "1.50", "0.2", "1", "1.50", "0.2"],
        "b": ["0", "0.00", "0.0", "2", "3.00", "0.5"],
        "all": ["1", "1.50", "0.2", "3", "4.50", "0.8"],
    }
