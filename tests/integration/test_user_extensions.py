"""A user outside the package writes four components, runs them and their contracts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedrec.cli.main import main

COMPONENTS = """
import torch
from fedrec import Aggregator, Attack, Detector
from fedrec.recoverers import ReplayRecoverer
from fedrec.types import Detection


class ClippedMean(Aggregator):
    def __init__(self, radius=1.0):
        self.radius = radius

    def aggregate(self, updates, client_weights=None, ctx=None):
        norms = updates.norm(dim=1, keepdim=True).clamp(min=1e-12)
        return (updates * (self.radius / norms).clamp(max=1.0)).mean(dim=0)


class Backwards(Attack):
    def __init__(self, factor=5.0):
        self.factor = factor

    def craft(self, updates, malicious, ctx):
        return torch.where(malicious[:, None], -self.factor * updates, updates)


class LoudestPart(Detector):
    def __init__(self, number=1):
        self.number = number
        self.reset()

    def reset(self, truth=()):
        self.norms, self.last = {}, None

    def observe(self, record):
        self.last = record.round
        for client_id, norm in zip(record.client_ids, record.updates.norm(dim=1).tolist()):
            self.norms[client_id] = self.norms.get(client_id, 0.0) + norm

    def result(self):
        loud = sorted(self.norms, key=lambda c: (-self.norms[c], c))[: self.number]
        seen, loud = tuple(sorted(self.norms)), tuple(sorted(loud))
        return Detection(malicious=loud, seen=seen, round=self.last, scores=self.norms)


class EveryOther(ReplayRecoverer):
    def __init__(self, period=2):
        self.period = period

    def round_updates(self, t, global_weights, ctx):
        if t % self.period == 0:
            return ctx.exact(ctx.client_ids, "other")
        return ctx.history(t).updates
"""

CONTRACTS = """
from my_package.components import Backwards, ClippedMean, EveryOther, LoudestPart
from fedrec.testing import AggregatorContract, AttackContract, DetectorContract, RecovererContract


class TestClippedMean(AggregatorContract):
    unanimous = False  # what all agree on may be clipped

    def make(self):
        return ClippedMean()


class TestBackwards(AttackContract):
    def make(self):
        return Backwards()


class TestLoudestPart(DetectorContract):
    max_false_positive_rate = 1.0  # it always flags someone

    def make(self):
        return LoudestPart()


class TestEveryOther(RecovererContract):
    def make(self):
        return EveryOther()
"""

RECIPE = """
name: mine
data: {class_path: Digits, init_args: {num_clients: 5}}
model: {class_path: MLP, init_args: {in_features: 64, hidden: [8]}}
federation: {malicious: 1, batch_size: 8}
aggregator: {class_path: ClippedMean, init_args: {radius: 2.0}}
attack: Backwards
detector: LoudestPart
record: {max_rounds: 10, server_lr: 0.1}
recoverers:
  - {class_path: my_package.components.EveryOther, init_args: {period: 5}}
  - TrainFromScratch
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("from my_package.components import *\n")
    (package / "components.py").write_text(COMPONENTS)
    (tmp_path / "test_mine.py").write_text(CONTRACTS)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [n for n in sys.modules if n.split(".")[0] == "my_package"]:
        del sys.modules[name]


def test_own_components_run_from_a_recipe(project: Path) -> None:
    assert main(["run", "mine.yaml", "--allow", "my_package", "--no-progress"]) == 0
    results = json.loads((project / "runs" / "mine" / "results.json").read_text())
    assert [m["name"] for m in results["methods"]] == ["EveryOther", "TrainFromScratch"]
    # Rounds 0 and 5 of 10 were asked for.
    assert results["methods"][0]["acp"] == pytest.approx(0.8)
    assert results["methods"][0]["exact_rounds_by_reason"]["other"] == 2.0
    assert len(results["detection"]["malicious"]) == 1
    manifest = results["recipe"]["aggregator"]
    assert manifest["init_args"] == {"radius": 2.0}


def test_without_allow_they_are_refused(project: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["run", "mine.yaml", "--no-progress"]) == 2
    message = capsys.readouterr().err
    assert "my_package" in message
    assert "--allow" in message
    assert not (project / "runs").exists()


@pytest.mark.slow  # another interpreter; the pages under docs/extend/ run theirs in this one
def test_own_components_pass_the_contracts(project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
