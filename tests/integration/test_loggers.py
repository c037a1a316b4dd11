"""Lightning's loggers in whole runs: what they hold, what they say, and whom they call."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedrec.loop.loggers import log_file, prepare
from fedrec.loop.logs import read_metrics

ROOT = Path(__file__).parents[2]
# Notes whom a process connects to, or asks the address of.
WATCH = """
import sys
def hook(event, args, file=open("connections", "a", buffering=1)):
    if event == "socket.connect" and not isinstance(args[1], str) and args[1][0] != "127.0.0.1":
        file.write(f"{args[1]}\\n")
    if event == "socket.getaddrinfo" and args[0] not in ("127.0.0.1", "localhost"):
        file.write(f"{args[0]}\\n")
sys.addaudithook(hook)
"""
METHOD = (
    "recoverers=[{class_path: FedRecover, "
    "init_args: {warmup_rounds: 4, correction_period: 10, final_rounds: 1}}]"
)


def run(folder: Path, logger: str) -> Path:
    """Run a recipe with a logger from the command line; return the run folder."""
    (folder / "sitecustomize.py").write_text(WATCH)
    environment = {name: os.environ[name] for name in ("PATH", "NUMBA_CACHE_DIR", "FEDREC_DATA")
                   if name in os.environ}  # fmt: skip
    environment |= {"HOME": str(folder), "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [
        *(sys.executable, "-m", "fedrec", "run", str(ROOT / "recipes" / "quickstart.yaml")),
        *("name=a", "record.max_rounds=12", "recover.exclude=[client-00]", METHOD),
        f"loop.logger=[{logger}]",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # Nothing but what fedrec says itself.
    said = [re.sub(r"\d.*", "", line) for line in done.stderr.splitlines()]
    assert said == ["Recording ", "Computing on cpu (grouped, ", "Recovering without "]
    assert (folder / "connections").read_text() == ""
    return folder / "runs" / "a"


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what the run wrote itself: the loss of each round, and the test error rate."""
    found = {}
    for part in ("record", "recover/FedRecover"):
        rows = read_metrics(folder / part / "metrics.csv")
        for name in ("ter", "asked"):
            values = [(int(row["round"]), row[name]) for row in rows if name in row]
            if values:
                found[f"{part}/{name}"] = values
    assert len(found["recover/FedRecover/asked"]) == 12
    return found


def test_tensorboard_has_the_figures_of_every_round(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = "{class_path: TensorBoardLogger, init_args: {save_dir: runs/tb, name: ''}}"
    folder = run(tmp_path, logger)
    events = EventAccumulator(str(tmp_path / "runs" / "tb" / "version_0")).Reload()
    for name, values in curves(folder).items():
        got = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in got] == [t for t, _ in values]
        assert [value for _, value in got] == pytest.approx([v for _, v in values])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mlflow") is None, reason="MLflow is not installed")
def test_mlflow_has_the_figures_and_the_files(tmp_path: Path) -> None:
    logger = (
        "{class_path: MLFlowLogger, init_args: {experiment_name: fedrec, "
        "tracking_uri: 'sqlite:///runs/mlflow.db', artifact_location: runs/mlartifacts}}"
    )
    folder = run(tmp_path, logger)
    script = (
        "import json, sys; from mlflow import MlflowClient; "
        "client = MlflowClient('sqlite:///runs/mlflow.db'); "
        "(run,) = client.search_runs([client.get_experiment_by_name('fedrec').experiment_id]); "
        "history = {n: sorted((m.step, m.value) for m in "
        "client.get_metric_history(run.info.run_id, n)) for n in sys.argv[1:]}; "
        "print(json.dumps([run.info.status, history]))"
    )
    expected = curves(folder)
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(
        [sys.executable, "-c", script, *expected],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    status, history = json.loads(done.stdout.splitlines()[-1])
    assert status == "FINISHED"
    assert {k: [tuple(v) for v in values] for k, values in history.items()} == expected
    files = {path.name: path for path in (tmp_path / "runs" / "mlartifacts").rglob("*.*")}
    assert set(files) == {"report.html", "ledger.csv", "model.ckpt"}
    for own in ("report.html", "recover/FedRecover/ledger.csv", "recover/FedRecover/model.ckpt"):
        kept = files[Path(own).name]
        assert kept.read_bytes() == (folder / own).read_bytes()
        assert str(kept).endswith(f"/artifacts/{own}")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason="W&B is not installed")
def test_wandb_offline_has_the_figures_and_the_files(tmp_path: Path) -> None:
    logger = (
        "{class_path: WandbLogger, init_args: {project: fedrec, save_dir: runs, offline: true}}"
    )
    folder = run(tmp_path, logger)
    (stored,) = (tmp_path / "runs" / "wandb").glob("offline-run-*/run-*.wandb")
    content = stored.read_bytes()
    for name, values in curves(folder).items():
        assert name.encode() in content
        assert repr(values[-1][1]).removesuffix(".0").encode() in content
    for name in ("report.html", "recover-FedRecover-ledger.csv", "recover-FedRecover-model.ckpt"):
        assert name.encode() in content


class _Files:
    def __init__(self) -> None:
        self.seen: list[object] = []

    def log_artifact(self, *args: object, **kwargs: object) -> None:
        self.seen.append((*args, kwargs) if kwargs else args)


class MLFlowLogger:
    run_id = "7"

    def __init__(self) -> None:
        self.experiment = _Files()


class WandbLogger:
    def __init__(self) -> None:
        self.experiment = _Files()
        self._wandb_init = {"anonymous": None, "project": "p"}


class Other:
    pass


def test_files_go_to_loggers_that_keep_them_under_names_they_take() -> None:
    mlflow, wandb = MLFlowLogger(), WandbLogger()
    loggers = [mlflow, Other(), wandb]
    prepare(loggers)
    assert wandb._wandb_init == {"project": "p"}
    log_file(loggers, Path("a/model.ckpt"), "recover/Fed Recover, k=1/model.ckpt")
    log_file(loggers, Path("a/report.html"), "report.html")
    assert mlflow.experiment.seen == [
        ("7", "a/model.ckpt", "recover/Fed Recover, k=1"),
        ("7", "a/report.html", None),
    ]
    assert wandb.experiment.seen == [
        ("a/model.ckpt", {"name": "recover-Fed-Recover-k-1-model.ckpt", "type": "model"}),
        ("a/report.html", {"name": "report.html", "type": "result"}),
    ]
