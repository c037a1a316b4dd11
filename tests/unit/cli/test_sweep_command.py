"""`fedrec sweep` and `fedrec plot`: words, exit codes, pictures."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from fedrec.cli.main import main
from fedrec.history import forecast
from fedrec.loop.footprint import num_bytes_text
from fedrec.recipe.tables import COLUMNS, write_table

_RECIPE = """
data: {class_path: Digits, init_args: {num_clients: 5}}
model: {class_path: MLP, init_args: {in_features: 64, hidden: [4]}}
federation: {malicious: 1, batch_size: 8}
aggregator: Median
detector: KnownMalicious
record: {max_rounds: 6, server_lr: 0.5}
loop: {accelerator: cpu}
recoverers:
  - {class_path: FedRecover, init_args: {warmup_rounds: 3, final_rounds: 1}}
  - TrainFromScratch
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.yaml").write_text(_RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_sweep_and_plot(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "small.yaml", "aggregator=Median,FedAvg", "--repeats", "2"]
    assert main([*words, "recoverers=[HistoricalOnly]", "--dry-run", "name=two"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[4:7] == [
        "Points: 4 to make, 0 there.",
        "Recordings: 4 to make, 0 there.",
        "Recoveries: 4 to make, 0 there.",
    ]
    size = forecast(num_clients=5, num_parameters=310, max_rounds=6).num_bytes
    each, total = num_bytes_text(size), num_bytes_text(4 * size)
    assert out[7:] == [f"Disk: up to {each} for a history, {total} in all, if they are kept."]
    assert [line.split()[1] for line in out[:4]] == ["missing"] * 4
    assert out[0].endswith("aggregator=Median, seed=0")
    assert not (here / "runs").exists()

    assert main([*words, "recoverers=[HistoricalOnly]", "name=two", "--no-progress"]) == 0
    out, err = capsys.readouterr()
    assert " ± " in out
    assert "runs/two/results.csv" in out
    assert "[4/4] aggregator=FedAvg, seed=1: done in" in err
    assert main([*words, "recoverers=[HistoricalOnly]", "name=two", "--dry-run"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in out[:4]] == ["done"] * 4
    assert out[4:] == [
        "Points: 0 to make, 4 there.",
        "Recordings: 0 to make, 4 there.",
        "Recoveries: 0 to make, 4 there.",
    ]

    for kind in ("values", "cost", "cp"):
        assert main(["plot", "runs/two", "--kind", kind]) == 0
        assert capsys.readouterr().out == f"runs/two/{kind}.svg\n"
        first = (here / "runs" / "two" / f"{kind}.svg").read_bytes()
        again = ["plot", "runs/two/results.csv", "--kind", kind, "-o", "again.svg"]
        assert main(again) == 0
        assert (here / "again.svg").read_bytes() == first
        capsys.readouterr()
    run = next((here / "runs" / "two").glob("recordings/*/points/*"))
    assert main(["plot", str(run), "-o", "cp.png"]) == 0
    assert (here / "cp.png").read_bytes().startswith(b"\x89PNG")


def test_synthetic_data_are_named_in_all_figures_of_a_run_and_a_sweep(here: Path) -> None:
    words = ["recoverers=[HistoricalOnly]", "--no-progress"]
    assert main(["run", "small.yaml", "name=one", *words]) == 0
    for stands_in in (False, True):
        record = here / "runs/one/record/result.json"
        stored = json.loads(record.read_text())
        stored["result"]["synthetic_data"] = stands_in
        record.write_text(json.dumps(stored))
        row = {"k": "1", "method": "HistoricalOnly", "ter": 0.5, "exact_rounds": 5.0}
        row |= {"synthetic_data": str(stands_in).lower(), "folder": "runs/one"}
        write_table(here / "results.csv", [row], ["k", *COLUMNS])
        for target, kind in (
            ("results.csv", "values"), ("results.csv", "cost"), ("results.csv", "cp"),
            ("runs/one", "cp"),
        ):  # fmt: skip
            assert main(["plot", target, "--kind", kind, "-o", "figure.svg"]) == 0
            # Letters are drawn as paths, with the text in a comment.
            said = "<!-- synthetic data -->" in (here / "figure.svg").read_text()
            assert said == stands_in


def test_a_point_that_fails_is_listed_and_the_exit_code_says_so(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = "Median,{class_path: Krum, init_args: {num_byzantine: 2}}"  # too many of 4 clients
    words = ["sweep", "small.yaml", f"recover.aggregator={rules}", "--no-progress"]
    assert main([*words, "recoverers=[HistoricalOnly]"]) == 1
    out = capsys.readouterr().out
    assert "1 points failed; the same command tries them again:" in out
    assert "  aggregator=Krum(num_byzantine=2): 1 method failed; the others are kept:" in out
    assert "HistoricalOnly (1 failed)" in out
    for kind in ("values", "cost", "cp"):  # draws what there is
        assert main(["plot", "runs/small", "--kind", kind]) == 0
    assert main(["plot", "runs/small", "--kind", "cost", "--y", "distance,ter"]) == 2
    assert "`y` to be one column for `--kind cost`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep", "small.yaml"], "`grid` to be more than one point"),
        (["sweep", "small.yaml", "aggregator=Median"], "`grid` to be more than one point"),
        (["sweep", "small.yaml", "aggregator=Median,"], "values with a comma between"),
        (["sweep", "small.yaml", "agregator=Median,Krum"], "Did you mean `aggregator`"),
        (["plot", "nothing"], "the folder of a sweep, its results.csv, or the folder of a run"),
        (["plot", "small.yaml"], "lacks seed, repeat"),
    ],
)
def test_mistakes(
    here: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_columns_that_are_not_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"a.b": "1", "a.c": "2", "method": "X", "ter": 0.5}
    write_table(here / "results.csv", [row], ["a.b", "a.c", *COLUMNS])
    for words, message in (
        (["--x", "d"], "`x` to be a column of the results"),
        (["--y", "tre"], "Did you mean `ter`"),
        (["--where", "b=3"], "`a.b` to be a value that was swept"),
        (["-o", "figure.bmp"], "a .png, .svg or .pdf file"),
    ):
        assert main(["plot", "results.csv", *words]) == 2
        assert message in capsys.readouterr().err


def test_figures_of_a_part_keep_colours(here: Path) -> None:
    table = [{"k": k, "method": m, "ter": 0.5} for k in ("1", "2") for m in ("A", "B")]
    write_table(here / "results.csv", table, ["k", *COLUMNS])
    strokes = []
    for where in ("method=A,B", "method=B"):
        assert main(["plot", "results.csv", "--y", "ter", "--where", where]) == 0
        text = (here / "values.svg").read_text()
        strokes.append(set(re.findall("stroke: (#(?!0000|e6e6)[0-9a-f]{6})", text)))
    first, second = "#0072b2", "#d55e00"
    assert strokes == [{first, second}, {second}]


def test_without_matplotlib(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_table(here / "results.csv", [{"k": "1", "method": "X", "ter": 0.5}], ["k", *COLUMNS])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", "results.csv"]) == 2
    assert "pip install 'fedrec[plot]'" in capsys.readouterr().err
