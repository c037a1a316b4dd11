"""The live view: in a terminal of 60 columns, in a notebook, and nothing elsewhere."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import FedAvg
from fedrec.callbacks import progress
from fedrec.data import Digits
from fedrec.history import MemoryHistory
from fedrec.models import MLP
from fedrec.recoverers import FedRecover

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture(autouse=True)
def _every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    monkeypatch.setattr(progress, "_COSTS", 0)


def run() -> None:
    """Record 8 rounds of 4 clients and recover without one."""
    federation = Federation.from_data(Digits(num_clients=4), MLP(in_features=64, hidden=(4,)))
    loop, history = FederatedLoop(logger=False, eval_every=4), MemoryHistory()
    loop.record(federation, FedAvg(), history, max_rounds=8, server_lr=0.1)
    method = FedRecover(
        warmup_rounds=3, correction_period=4, final_rounds=1, abnormality_threshold=1e9
    )
    loop.recover(federation, history, method, ["client-0"])
    assert loop.history is None


def drawn(monkeypatch: pytest.MonkeyPatch, **terminal: Any) -> str:
    """Return all that a run draws."""
    file = io.StringIO()
    made = Console(file=file, width=60, _environ={"TERM": "xterm"}, **terminal)
    monkeypatch.setattr("rich.console.Console", lambda **_: made)
    run()
    return file.getvalue()


def test_a_terminal_of_sixty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ESCAPES.sub("", drawn(monkeypatch, force_terminal=True, force_jupyter=False))
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text)]
    assert max(map(len, lines)) <= 60
    names = [line.split()[0] for line in lines if re.search(r"\d/8", line)]
    assert list(dict.fromkeys(names)) == ["record", "FedRecover"]
    counts = [int(c) for c in re.findall(r"FedRecover .*? (\d)/8", text)]
    assert counts == sorted(counts)
    assert set(counts) == set(range(9))
    # Rounds 0 to 2 are asked for, round 3 is the first from history, round 7 the last one.
    figures = re.findall(r"exact (\d)  fixed (\d)  from history (\d)", text)
    assert list(dict.fromkeys(figures)) == [("3", "0", "0"), ("0", "0", "3")]
    assert re.search(r"TER \d+\.\d %  4 clients  \d+ MB", text)


def test_nothing_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert drawn(monkeypatch, force_terminal=False, force_jupyter=False) == ""
    assert capfd.readouterr() == ("", "")


def test_a_picture_waits_until_the_last_one_has_paid_off(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Slow:
        shown: ClassVar[list[tuple[int, str]]] = []

        def show(self, name: str, done: int, total: int, left: str, figures: str) -> None:
            self.shown.append((done, left))
            now[0] += 0.25

        def close(self) -> None:
            pass

    monkeypatch.setattr(progress, "_EVERY", 2.0)
    monkeypatch.setattr(progress, "_COSTS", 20)
    monkeypatch.setattr(progress, "_new_view", Slow)
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    class Context:
        phase, round, client_ids = "record", 0, ()

    loop: Any = FederatedLoop(enable_progress_bar=False)
    view = progress.RichProgressBar()
    view.on_record_start(loop, 25, 0)  # until 0.25: the next is drawn at 5.25
    for t in range(12):
        now[0] += 1.0
        Context.round = t
        view.on_round_end(loop, Context, {})  # type: ignore[arg-type]
    # Five rounds took 5.25 seconds, and 20 are left: 21 seconds. The third is drawn 5 s after 5.5.
    assert Slow.shown == [(0, ""), (5, "0:21 left"), (10, "0:16 left")]


NOTEBOOK = """
import warnings
warnings.simplefilter("error")
import sys
sys.path.insert(0, {folder!r})
from test_progress import run
run()
"""


@pytest.mark.slow
def test_a_notebook() -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cell = nbformat.v4.new_code_cell(NOTEBOOK.format(folder=str(Path(__file__).parent)))
    notebook = nbformat.v4.new_notebook(cells=[cell])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the client's own
        nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    assert [output.output_type for output in outputs] == ["display_data"] * 2
    plain = [output.data["text/plain"] for output in outputs]
    assert plain[0].startswith("record  8/8")
    assert plain[1].startswith("FedRecover  8/8")
    assert "exact 3  fixed 0  from history 0" in plain[1]
    assert "<progress value='8' max='8'>" in outputs[1].data["text/html"]
