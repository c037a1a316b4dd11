"""A small recipe that runs in a second."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_RECIPE = """
data: {class_path: Digits, init_args: {num_clients: 5}}
model: {class_path: MLP, init_args: {in_features: 64, hidden: [4]}}
federation: {malicious: 1, batch_size: 8}
aggregator: Median
attack: {class_path: BackdoorAttack, init_args: {scale: 2.0}}
detector: KnownMalicious
record: {max_rounds: 8, server_lr: 0.5}
loop: {eval_every: 4, accelerator: cpu}
recoverers:
  - class_path: FedRecover
    init_args: {warmup_rounds: 3, correction_period: null, final_rounds: 1, tolerance_rate: null}
  - TrainFromScratch
"""

_FAULTY = """
import os
from fedrec.exceptions import ConfigurationError
from fedrec.recoverers import HistoricalOnly

class Refusing(HistoricalOnly):
    "Refuses to start, for a reason that no recipe tells."
    def start(self, history, max_rounds):
        raise ConfigurationError("Refusing needs <more>.")

class Faulty(HistoricalOnly):
    "Fails in round 2, unless it is told not to."
    def step(self, t, global_weights, ctx):
        if t == 2 and "FAULTLESS" not in os.environ:
            raise ZeroDivisionError("by nothing")
        return super().step(t, global_weights, ctx)
"""


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "small.yaml"
    path.write_text(_RECIPE)
    return path


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with a recoverer that fails as long as FAULTLESS is not set, and one that does."""
    (tmp_path / "own_faulty.py").write_text(_FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_faulty"
    sys.modules.pop("own_faulty", None)
