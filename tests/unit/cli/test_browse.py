"""`fedrec history browse`: the figures of a small history, in the terminal and as a page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from fedrec.cli.browse import look_text
from fedrec.cli.history import main as history_main
from fedrec.cli.parser import Options, command_line
from fedrec.exceptions import ConfigurationError
from fedrec.history import LMDBHistory, Manifest, RoundArrays
from fedrec.history.tools.browse import browse, select
from fedrec.report.history import write_look

EVIL = "<script>alert(1)</script>"
CLIENTS = {"a": 10, "b": 20, EVIL: 30}


def arrays(t: int, updates: dict[str, list[float]], refused: dict[str, str]) -> RoundArrays:
    rows = np.array(list(updates.values()), np.float32)
    return RoundArrays(
        round=t,
        global_weights=np.zeros(2, np.float32),
        client_ids=tuple(updates),
        updates=rows,
        num_samples=np.array([CLIENTS[c] for c in updates]),
        aggregate=np.array([0.0, 2.0 * (t + 1)], np.float32),
        cohort=(*updates, *refused),
        refused=refused,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder: in round 1 one client is refused, in round 2 one is not asked."""
    folder = tmp_path / "run"
    manifest = Manifest(
        model_fingerprint="f", num_parameters=2, clients=CLIENTS, seed=0, server_lr=0.1,
        aggregator={"class_path": "FedAvg", "init_args": {}}, max_rounds=3, malicious=("b",),
        attack={"class_path": "fedrec.attacks.SignFlip", "init_args": {}},
    )  # fmt: skip
    with LMDBHistory(folder / "history") as history:
        history.begin(manifest)
        history.append(arrays(0, {"a": [3.0, 4.0], "b": [6.0, 8.0], EVIL: [0.0, 1.0]}, {}))
        history.append(arrays(1, {"a": [0.0, 2.0], EVIL: [0.0, 0.5]}, {"b": "not finite"}))
        history.append(arrays(2, {"a": [0.0, 3.0], "b": [5.0, 12.0]}, {}))
    (folder / "recipe.yaml").write_text("name: run\n")
    found = {"scores": {"a": 0.5, "b": 2.5, EVIL: 0.25}, "malicious": ["b"]}
    (folder / "detection.json").write_text(json.dumps({"result": found}))
    return folder


def command(*words: str) -> int:
    """Run the command in this process."""

    def here(options: Options) -> int:
        return history_main(json.dumps(vars(options)))

    return int(command_line(here).main(["history", "browse", *words], standalone_mode=False))


def test_norms_in_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(run), "--clients", "a,b") == 0
    text = capsys.readouterr().out
    table = [line.split() for line in text.split("\n\n")[1].splitlines()]
    assert table == [
        ["round", "score", "0", "1", "2"],
        ["a", "0.500", "5.00", "2.00", "3.00"],
        ["b*!", "2.50", "10.0", "x", "13.0"],
        ["aggregate", "2.00", "4.00", "6.00"],
        ["asked", "3", "3", "2"],
        ["used", "3", "2", "2"],
    ]
    assert "attack: SignFlip" in text
    assert "A part of the history: 2 of 3 clients." in text
    assert "Refused in round 1: b: not finite" in text


def test_json_has_everything(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(run / "history"), "--json", "--rounds", "-1") == 0
    look = json.loads(capsys.readouterr().out)
    (last,) = look["rounds"]
    assert last["round"] == 2
    assert last["norms"] == {"a": 3.0, "b": 13.0}
    assert last["aggregate"] == 6.0
    assert look["clients"] == CLIENTS
    assert look["flagged"] == look["malicious"] == ["b"]


def test_lines_fit_sixty_columns_and_rounds_go_below(run: Path) -> None:
    look = browse(run, most_rounds=9, most_clients=9)
    lines = look_text(look, 60).splitlines()[1:]
    assert max(map(len, lines)) <= 60
    assert sum(line.startswith("round") for line in lines) == 1
    narrow = look_text(look, 32).splitlines()  # a name, a score, one round
    assert sum(line.startswith("round") for line in narrow) == 3
    assert any(line.startswith("<script>alert...") for line in narrow)


def test_many_clients_are_sampled_and_the_malicious_stay(run: Path) -> None:
    look = browse(run, most_rounds=2, most_clients=2)
    assert list(look.clients) == ["a", "b"]
    assert [r.round for r in look.rounds] == [0, 2]
    assert look.sampled == "A part of the history: 2 of 3 rounds and 2 of 3 clients."
    assert list(browse(run, most_rounds=2, most_clients=1).clients) == ["b"]
    assert browse(run, most_rounds=9, most_clients=9).sampled == ""


@pytest.mark.parametrize("text", ["3", "-4", "x", "1:2:0", "1:2:3:4", "", "2:1"])
def test_rounds_that_are_not_there(text: str) -> None:
    with pytest.raises(ConfigurationError, match="Expected `--rounds` to be stored rounds"):
        select(text, 3)


def test_clients_that_are_not_there(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(str(run), "--clients", "a,q") == 2
    assert "Expected `--clients` to be ids of clients, but got 'q'" in capsys.readouterr().err


def test_a_history_without_rounds(tmp_path: Path) -> None:
    with LMDBHistory(tmp_path / "history") as history:
        history.begin(
            Manifest(
                model_fingerprint="f", num_parameters=2, clients=CLIENTS, seed=0, server_lr=0.1,
                aggregator={}, max_rounds=3,
            )
        )  # fmt: skip
    look = browse(tmp_path / "history", most_rounds=9, most_clients=9)
    assert look.rounds == ()
    assert "0 rounds, 3 clients" in look_text(look, 60)
    assert "No round is stored yet." in write_look(look, tmp_path / "page.html").read_text()


def test_the_page(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = run / "look.html"
    assert command(str(run), "-o", str(page)) == 0
    assert capsys.readouterr().out == f"{page}\n"
    text = page.read_text()
    # 9 cells: 7 norms between 0.5 (the lightest) and 13, one refused, one not asked.
    shown = re.findall(r'<rect class="(\w+)"(?: fill-opacity="([\d.]+)")? x="(\d)" y="(\d)"', text)
    assert len(shown) == 8
    assert ("bad", "", "1", "1") in shown
    assert ("heat", "1.00", "2", "1") in shown
    assert ("heat", "0.12", "1", "2") in shown
    assert EVIL not in text
    assert "alert(1)" in text
    # Forgetting a client removes it: it shows norms of single clients.
    assert '"file": "look.html"' in (run / "derived.jsonl").read_text()
    elsewhere = run.parent / "look.html"
    write_look(browse(run, most_rounds=9, most_clients=9), elsewhere)
    assert not (run.parent / "derived.jsonl").exists()
