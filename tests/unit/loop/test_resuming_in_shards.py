"""A recording of clients in shards resumes to the same bits, whatever its history is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import FedAvg, FedAvgM
from fedrec.attacks import Mimic
from fedrec.callbacks import Callback
from fedrec.data import Digits
from fedrec.detectors import FLDetector
from fedrec.history import LMDBHistory, ShardedHistory
from fedrec.models import MLP

ROUNDS = 8


class Stop(Callback):
    """Ends a recording before a round, as an error would."""

    def on_round_start(self, loop, ctx):
        if ctx.round == 5:
            raise RuntimeError("stopped")


def _record(history, folder: Path, *callbacks: Callback):
    torch.manual_seed(0)
    data = Digits(num_clients=9)
    federation = Federation.from_data(data, MLP(in_features=64), malicious=2, batch_size=8)
    loop = FederatedLoop(
        accelerator="cpu", num_shards=3, logger=False, enable_progress_bar=False, eval_every=99,
        callbacks=callbacks, default_root_dir=folder,
    )  # fmt: skip
    with history:
        result = loop.record(
            federation, FedAvgM(FedAvg()), history, max_rounds=ROUNDS, server_lr=0.1,
            attack=Mimic(warmup_rounds=4), detector=FLDetector(start_round=1, window=3),
            resume=True,
        )  # fmt: skip
    return result.global_weights, result.detection.round_scores


@pytest.mark.parametrize("codec", ["float32", "int8"])
@pytest.mark.parametrize("kind", [LMDBHistory, ShardedHistory])
def test_rule_attack_and_detector_go_on_with_what_they_remember(tmp_path, kind, codec):
    weights, scores = _record(kind(tmp_path / "whole", codec=codec), tmp_path / "run")
    with pytest.raises(RuntimeError, match="stopped"):
        _record(kind(tmp_path / "cut", codec=codec), tmp_path / "other", Stop())
    resumed, again = _record(kind(tmp_path / "cut", codec=codec), tmp_path / "other")
    assert torch.equal(resumed, weights)
    assert again == scores
    assert list(scores) == list(range(1, ROUNDS))
