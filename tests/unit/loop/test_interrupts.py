"""Ctrl-C, or a request to end, while a round is computed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from fedrec import FederatedLoop
from fedrec.aggregators import FedAvg
from fedrec.history import LMDBHistory, MemoryHistory
from fedrec.testing.problems import QuadraticClient, quadratic_federation
from fedrec.types import ClientUpdate, RoundContext, RunResult


def record(history: LMDBHistory | MemoryHistory) -> RunResult:
    loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False)
    return loop.record(
        quadratic_federation(), FedAvg(), history, max_rounds=6, server_lr=0.1, resume=True
    )


@pytest.mark.parametrize(
    ("number", "raised", "message"),
    [
        (signal.SIGINT, KeyboardInterrupt, "Stopped after round 2"),
        (signal.SIGTERM, SystemExit, "143"),
    ],
)
def test_a_signal_ends_the_recording_after_the_round(
    number: signal.Signals,
    raised: type[BaseException],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = record(MemoryHistory())
    honest, calls = QuadraticClient.local_update, []

    def update(self: QuadraticClient, weights: torch.Tensor, ctx: RoundContext) -> ClientUpdate:
        calls.append(ctx.round)
        if len(calls) == 2 * 5 + 3:  # the third of five clients in round 2
            signal.raise_signal(number)
        return honest(self, weights, ctx)

    before = signal.getsignal(number)
    with LMDBHistory(tmp_path) as history:
        with monkeypatch.context() as patch:
            patch.setattr(QuadraticClient, "local_update", update)
            with pytest.raises(raised, match=message):
                record(history)
        assert calls == [t for t in range(3) for _ in range(5)]  # the round was finished
        assert signal.getsignal(number) == before
        assert history.verify() == range(3)
        assert torch.equal(record(history).global_weights, whole.global_weights)
