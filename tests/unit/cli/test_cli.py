"""The command: arguments, exit codes, and what reaches the terminal."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning  # noqa: F401 - sets up its logger when it is first imported

from fedrec.cli.main import main
from fedrec.exceptions import RecipeError

_RECIPE = """
data: {class_path: Digits, init_args: {num_clients: 4}}
model: {class_path: MLP, init_args: {in_features: 64, hidden: [4]}}
federation: {malicious: 1, batch_size: 8}
aggregator: Median
detector: KnownMalicious
record: {max_rounds: 4, server_lr: 0.5}
recoverers: [HistoricalOnly]
"""
_OWN = """
import signal

from fedrec.aggregators import Aggregator
from fedrec.callbacks import Callback
from fedrec.exceptions import ConfigurationError
from fedrec.recoverers import HistoricalOnly

class Refusing(HistoricalOnly):
    def start(self, history, max_rounds):
        raise ConfigurationError("Refusing has its reasons.")

class Largest(Aggregator):
    def aggregate(self, updates, client_weights=None, ctx=None):
        return updates.amax(dim=0)

class Stop(Callback):
    def on_round_end(self, loop, ctx, metrics):
        raise KeyboardInterrupt

class Terminate(Callback):
    def on_round_end(self, loop, ctx, metrics):
        if (ctx.phase, ctx.round) == ("record", 1):
            signal.raise_signal(signal.SIGTERM)
"""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Logging and warnings are as before after a command; the path is the process's."""
    loggers = [logging.getLogger(name) for name in ("fedrec", "pytorch_lightning")]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    filters, path = list(warnings.filters), list(sys.path)
    yield
    after = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    assert after == before
    assert list(warnings.filters) == filters
    sys.path[:] = path
    sys.modules.pop("own_parts", None)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a recipe and a module of one's own."""
    (tmp_path / "small.yaml").write_text(_RECIPE)
    (tmp_path / "own_parts.py").write_text(_OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_run_then_every_step_on_its_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "small.yaml", "seed=1", "--no-progress", "name=one"]) == 0
    out, err = capsys.readouterr()
    assert "HistoricalOnly" in out
    assert "runs/one/report.html" in out
    assert err.splitlines()[0].startswith("Recording 4 rounds of Federation(4 clients")
    assert (here / "runs" / "one" / "results.json").is_file()

    detector = "detector={class_path: KnownMalicious, init_args: {ids: [client-3]}}"
    assert main(["detect", "runs/one", detector]) == 0
    assert "Flagged as malicious in round 0: client-3." in capsys.readouterr().out
    assert main(["recover", "runs/one", "--no-progress"]) == 0
    out, err = capsys.readouterr()
    assert "Recovering without 1 client: HistoricalOnly." in err
    *_, where, line = out.splitlines()
    assert where == "The recovered model is runs/one/recover/HistoricalOnly/model.ckpt. To load it:"
    names: dict[str, Any] = {}
    exec(line.strip(), names)
    assert type(names["model"]).__name__ == "MLP"
    (here / "runs" / "one" / "report.html").unlink()
    assert main(["report", "runs/one"]) == 0
    assert (here / "runs" / "one" / "report.html").is_file()
    assert main(["report", "runs/one", "runs/one"]) == 0
    assert "<h1>Comparison of 2 runs</h1>" in (here / "report.html").read_text()
    assert main(["report", "runs/one", "-o", "elsewhere.html"]) == 0
    page = here / "runs" / "one" / "report.html"
    assert (here / "elsewhere.html").read_text() == page.read_text()
    assert main(["report", "runs/one", "runs/none"]) == 2


def test_record_alone_then_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "small.yaml", "--output-dir", "elsewhere", "--no-progress"]) == 0
    assert "No detection." in capsys.readouterr().out
    assert main(["run", "small.yaml", "--output-dir", "elsewhere", "--no-progress"]) == 0
    assert capsys.readouterr().err.startswith("Recording: kept, 4 rounds.")
    assert not (here / "runs").exists()


def test_mistakes_are_one_message_and_exit_code_2(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "small.yaml", "sede=1", "aggregator=Medain"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: The recipe has 2 mistakes:\n  - sede: ")
    assert "Traceback" not in err
    assert main(["validate", "small.yaml"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "small.yaml has no mistakes."
    assert out[1].startswith("Its history will take about ")
    assert out[2] == "It makes a recording and 1 recovery."
    assert out[3] == "Its clients are client-0, client-1, client-2, client-3."
    with pytest.raises(RecipeError):
        main(["validate", "small.yaml", "--debug", "sede=1"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["recover", "small.yaml"], "HINT: `fedrec run small.yaml`, if that is a recipe"),
        (["report", "small.yaml"], "Expected `RUN` to be a run folder"),
        (["detect", "small.yaml"], "Expected `RUN` to be a run folder"),
        (["run", "small.yaml", "--output-dir", "afile/sub"], "`afile` is a file, not a folder"),
        (["run", "small.yaml", "--output-dir", ".", "name=afile"], "`afile` is a file, not a"),
        (["schema", "-o", "afile/x.json"], "`afile/x.json` cannot be written: "),
    ],
    ids=str,
)
def test_a_file_where_a_folder_has_to_be(
    here: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "afile").write_text("")
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_another_recipe_in_the_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quietly = ["run", "small.yaml", "--no-progress"]
    assert main(quietly) == 0
    assert main([*quietly, "record.max_rounds=3"]) == 2
    assert "record.max_rounds: 4 there, 3 here" in capsys.readouterr().err
    assert main([*quietly, "record.max_rounds=3", "--overwrite"]) == 0


def test_interrupt_says_how_to_go_on(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "small.yaml", "loop.callbacks=[Stop]", "--allow", "own_parts", "--overwrite"]
    assert main(words) == 130
    err = capsys.readouterr().err
    assert "fedrec run small.yaml 'loop.callbacks=[Stop]' --allow own_parts\n" in err
    assert "--overwrite" not in err


def test_sigterm_ends_after_the_round_and_says_how_to_go_on(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "small.yaml", "loop.callbacks=[Terminate]", "--allow", "own_parts"]
    assert main([*words, "--overwrite"]) == 143
    again = "Stopped. What is done is kept; go on with:\n  fedrec run small.yaml "
    err = capsys.readouterr().err
    assert f"{again}'loop.callbacks=[Terminate]' --allow own_parts\n" in err
    assert "--overwrite" not in err
    assert main(words) == 0  # the round is stored, so that it does not come again
    assert "going on at round 2 of 4" in capsys.readouterr().err


def test_allow_finds_modules_in_the_working_folder(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "small.yaml", "aggregator=Largest"]) == 2
    assert "--allow my_package" in capsys.readouterr().err
    assert main(["validate", "small.yaml", "aggregator=Largest", "--allow", "own_parts"]) == 0
    assert main(["validate", "small.yaml", "aggregator=Deep", "--allow", "own_parts"]) == 2
    assert "its dotted path: `own_parts.module.Deep`." in capsys.readouterr().err
    assert main(["validate", "small.yaml", "metrics=[MulticlassF1Score]"]) == 2
    assert "`torchmetrics.classification.Name`" in capsys.readouterr().err
    assert main(["validate", "small.yaml", "--allow", "not_there"]) == 2
    assert "`not_there` cannot: No module named 'not_there'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["detect", "recover", "report"])
def test_no_run_folder(here: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "runs/none"]) == 2
    assert "Expected `RUN` to be a run folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [[], ["fly"], ["run"], ["run", "small.yaml", "--fast"], ["report", "runs/x", "--allow"]],
)
def test_usage_errors(here: Path, words: list[str]) -> None:
    assert main(words) == 2


def test_help_is_quick_and_version_known(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys\n"
        "from fedrec.cli.main import main\n"
        "main(['--help'])\n"
        "heavy = {'torch', 'pytorch_lightning', 'omegaconf', 'rich', 'numpy'}\n"
        "sys.stderr.write(str(sorted(heavy & set(sys.modules))))\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "[]"
    assert "validate" in done.stdout
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("fedrec 0.")


def test_dependencies_keep_quiet_as_a_module(here: Path) -> None:
    method = "{class_path: FedRecover, init_args: {warmup_rounds: 3, final_rounds: 0}}"
    words = ["run", "small.yaml", "--no-progress", "attack=TrimAttack", f"recoverers=[{method}]"]
    done = subprocess.run(
        [sys.executable, "-W", "default", "-m", "fedrec", *words, "loop.accelerator=auto"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    starts = [line.partition(" ")[0] for line in done.stderr.splitlines()]
    # The recovery computes like the recording, and that is said once.
    steps = ["Recording", "Computing", "Detecting", "Flagged", "Recovering"]
    assert starts == steps


def test_validate_tells_what_is_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "small.yaml", "--no-progress", "--output-dir", "out"]) == 0
    capsys.readouterr()
    words = ["validate", "small.yaml", "--output-dir", "out"]
    assert main(words) == 0
    already = "the recording and {} of these are in out/small already."
    assert f"a recording and 1 recovery; {already.format(0)}" in capsys.readouterr().out
    assert main(["recover", "out/small", "--no-progress"]) == 0
    capsys.readouterr()
    assert main(words) == 0
    assert already.format(1) in capsys.readouterr().out
    assert main([*words, "record.max_rounds=5"]) == 0  # would be another recording
    assert "already" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.init_args.num_clients=5000"], "data: Cannot split 1348 samples over 5000 clients"),
        (["model.init_args.in_features=65"], "HINT: `model.init_args.in_features=64` fits."),
        (["federation.malicious=4"], "federation.malicious: Expected `malicious` to be a count be"),
    ],
)
def test_validate_finds_what_only_the_data_can_tell(
    here: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "small.yaml", *words]) == 2
    assert message in capsys.readouterr().err


def test_validate_does_without_data_that_are_not_here(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDREC_DATA", str(here))
    data = "data={class_path: MNIST, init_args: {num_clients: 5}}"
    assert main(["validate", "small.yaml", data, "model=CNN"]) == 0
    said = (
        "Its data are not here, so neither their split nor the model was checked: Expected `root`"
    )
    assert said in capsys.readouterr().out


def test_a_method_that_fails_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "small.yaml", "recoverers=[Refusing, HistoricalOnly]", "--no-progress"]
    assert main([*words, "--allow", "own_parts"]) == 1
    out, err = capsys.readouterr()
    said = "Refusing: Refusing has its reasons.\n"
    assert err.endswith(f"Error: 1 method failed; the others are kept:\n  - {said}")
    files = ["runs/small/results.json", "runs/small/report.html"]
    assert "HistoricalOnly" in out
    assert out.splitlines()[-2:] == files
    assert main(["report", "runs/small"]) == 0
    out = capsys.readouterr().out
    assert "HistoricalOnly" in out
    assert out.splitlines()[-2:] == ["Refusing failed: Refusing has its reasons.", files[1]]


def test_threads_that_wait_sleep_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert main(["ls"]) == 0
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert main(["ls"]) == 0
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert capsys.readouterr().err == ""


def test_torch_is_imported_after_it_is_set_how_threads_wait() -> None:
    """Its library of threads reads the variable when it is loaded, and never again."""
    code = (
        "import os, sys; os.environ.pop('OMP_WAIT_POLICY', None); from fedrec.cli import main; "
        "assert 'torch' not in sys.modules; main.main(['ls']); "
        "assert os.environ['OMP_WAIT_POLICY'] == 'PASSIVE'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
