"""`fedrec detect RUN --detector ...`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import pytorch_lightning  # noqa: F401 - sets up its logger when it is first imported

from fedrec.cli.main import main
from fedrec.detectors import NormOutlier
from fedrec.history import LMDBHistory

_RECIPE = """
name: attacked
data: {class_path: Digits, init_args: {num_clients: 8}}
model: {class_path: MLP, init_args: {in_features: 64, hidden: [4]}}
federation: {malicious: [client-1, client-6], batch_size: 8}
aggregator: Median
attack: TrimAttack
detector: KnownMalicious
record: {max_rounds: 6, server_lr: 0.1}
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detect")
    (folder / "recipe.yaml").write_text(_RECIPE)
    argv = [str(folder / "recipe.yaml"), "--output-dir", str(folder), "--no-progress"]
    assert main(["record", *argv]) == 0
    return folder / "attacked"


def contents(folder: Path) -> dict[str, bytes]:
    files = [f for f in folder.rglob("*") if f.is_file() and f.suffix != ".mdb"]
    return {str(f.relative_to(folder)): f.read_bytes() for f in files}


def test_compares_and_changes_nothing(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(recorded)
    capsys.readouterr()
    code = main(
        [
            "detect",
            str(recorded),
            "--json",
            *("--detector", "KnownMalicious"),
            *("--detector", "{class_path: KnownMalicious, init_args: {ids: [client-1, client-2]}}"),
            *("--detector", "{class_path: NormOutlier, init_args: {window: 3}}"),
            *("--detector", "{class_path: NormOutlier, init_args: {window: 30}}"),
        ]
    )
    out, _ = capsys.readouterr()
    assert code == 0
    assert contents(recorded) == before
    result = json.loads(out)
    assert result["truth"] == ["client-1", "client-6"]
    assert result["rounds"] == 6
    oracle, half, norm, late = result["detectors"]
    rates = ("precision", "recall", "fpr", "fnr", "round")
    assert [oracle[key] for key in rates] == [1.0, 1.0, 0.0, 0.0, 0]
    assert [half[key] for key in rates] == [0.5, 0.5, 1 / 6, 0.5, 0]
    # Six rounds are too few for a window of 30: nobody is flagged, so precision is undefined.
    assert [late[key] for key in rates] == [None, 0.0, 0.0, 1.0, None]
    with LMDBHistory(recorded / "history") as history:
        expected = NormOutlier(window=3).detect(history)
    assert norm["malicious"] == list(expected.malicious)
    assert norm["round"] == expected.round
    assert norm["scores"] == dict(expected.scores)
    assert norm["round_scores"] == {str(t): dict(s) for t, s in expected.round_scores.items()}
    assert sorted(expected.round_scores) == list(range(6))


def test_shows_a_table(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    capsys.readouterr()
    short = "{class_path: NormOutlier, init_args: {window: 3, threshold: 3.5}}"
    words = ["--detector", "KnownMalicious", "--detector", short]
    assert main(["detect", str(recorded), *words]) == 0
    out, _ = capsys.readouterr()
    assert "NormOutlier(window=3) " in out
    row = next(line for line in out.splitlines() if "KnownMalicious" in line)
    assert row.split()[1:-1] == ["2", "1.000", "1.000", "0.000", "0.000", "0"]
    assert "6 rounds, 2 malicious clients" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--detector", "NormOutlyer"], "Did you mean `NormOutlier`?"),
        (["--detector", "Median"], "to be a Detector, but got 'Median'"),
        (
            ["--detector", "{class_path: NormOutlier, init_args: {windw: 3}}"],
            "Did you mean `window`?",
        ),
        (["--detector", "{class_path: ["], "is not YAML"),
    ],
)
def test_mistakes_are_answered(
    recorded: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["detect", str(recorded), *words]) == 2
    assert said in capsys.readouterr().err


def test_needs_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text(_RECIPE)
    assert main(["detect", str(tmp_path), "--detector", "FLDetector"]) == 2
    recipe = f"{tmp_path / 'recipe.yaml'} --output-dir {tmp_path.parent}"
    said = f"has no recording. HINT: `fedrec record {recipe}` makes one."
    assert said in capsys.readouterr().err
    assert not (tmp_path / "results.json").exists()


def test_detectors_of_ones_own(
    recorded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "own_detectors.py").write_text(
        "from fedrec.detectors import ScoreDetector\n"
        "class First(ScoreDetector):\n"
        "    def score(self, record):\n"
        "        return record.updates[:, 0] * 0 + (record.updates[:, 0] * 0).cumsum(0) + 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    capsys.readouterr()
    node = "{class_path: First, init_args: {threshold: 0.5, window: 6}}"
    words = ["--detector", node, "--allow", "own_detectors", "--json"]
    assert main(["detect", str(recorded), *words]) == 0
    sys.modules.pop("own_detectors")
    (row,) = json.loads(capsys.readouterr().out)["detectors"]
    assert (row["recall"], row["fpr"], row["round"]) == (1.0, 1.0, 5)
