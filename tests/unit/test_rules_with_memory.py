"""Rules with memory in the loop: they resume to the same bits, and start fresh in a recovery."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from fedrec import Callback, ClientSampler, FederatedLoop
from fedrec.aggregators import (
    Aggregator,
    Bucketing,
    CenteredClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedYogi,
    FoolsGold,
    Median,
    ServerOptimizer,
    TrimmedMean,
)
from fedrec.attacks.base import Attack
from fedrec.detectors import KnownMalicious
from fedrec.history import HistoryStore, LMDBHistory, MemoryHistory
from fedrec.recoverers import FedRecover, TrainFromScratch
from fedrec.testing.problems import quadratic_federation

ROUNDS = 6

RULES: dict[str, Aggregator] = {
    "CenteredClipping": CenteredClipping(tau=0.5, iterations=2),
    "FedAvgM": FedAvgM(TrimmedMean(trim=1), momentum=0.6),
    "FedAdam": FedAdam(FedAvg(), tau=0.1),
    "FedYogi": FedYogi(FedAvg(), tau=0.1),
    "ServerOptimizer": ServerOptimizer(Median(), optimizer="AdamW"),
    "FoolsGold": FoolsGold(),
    "nested": FedAvgM(Bucketing(CenteredClipping(tau=0.5)), momentum=0.6),
}


class Interrupt(Callback):
    """Ends the recording after a round, as a crash would."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_round_end(self, loop, ctx, metrics) -> None:
        if ctx.round == self.round:
            raise KeyboardInterrupt


def loop(folder: Path | None = None, **kwargs) -> FederatedLoop:
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "checkpoint_every": 0.0}
    return FederatedLoop(**{**quiet, "default_root_dir": folder, **kwargs})


def record(rule: Aggregator, history: HistoryStore, *, resume: bool = False, **kwargs):
    attack, detector = kwargs.pop("attack", None), kwargs.pop("detector", None)
    return loop(**kwargs).record(
        quadratic_federation(),
        rule,
        history,
        max_rounds=ROUNDS,
        server_lr=0.1,
        attack=attack,
        detector=detector,
        sampler=ClientSampler(fraction=0.8),
        resume=resume,
    )


@pytest.mark.parametrize(
    ("name", "codec"), [("nested", "float32"), *((name, "int8") for name in RULES)]
)
def test_resumed_equals_uninterrupted(name: str, codec: str, tmp_path: Path) -> None:
    # A lossy codec changes what a replayed rule sees; the first run has to see the same.
    rule = RULES[name]
    with LMDBHistory(tmp_path / "whole", codec=codec) as history:
        whole = record(rule, history)
        aggregates = [history.read_round(t).aggregate for t in range(ROUNDS)]
    for kept in (True, False):  # with the memory that was saved in the run folder, and by replaying
        path, folder = tmp_path / f"history-{kept}", tmp_path / "run" if kept else None
        with LMDBHistory(path, codec=codec) as history, pytest.raises(KeyboardInterrupt):
            record(rule, history, folder=folder, callbacks=Interrupt(3))
        with LMDBHistory(path, codec=codec) as history:
            resumed = record(rule, history, folder=folder, resume=True)
            assert torch.equal(resumed.global_weights, whole.global_weights)
            for t, aggregate in enumerate(aggregates):
                assert torch.equal(history.read_round(t).aggregate, aggregate)


def interrupted(rule: Aggregator, tmp_path: Path, **kwargs) -> LMDBHistory:
    with LMDBHistory(tmp_path / "history") as history, pytest.raises(KeyboardInterrupt):
        record(rule, history, folder=tmp_path / "run", callbacks=Interrupt(3), **kwargs)
    return LMDBHistory(tmp_path / "history")


def test_saved_memory_saves_replaying(tmp_path: Path) -> None:
    seen = []

    class Counting(CenteredClipping):
        def aggregate(self, updates, client_weights=None, ctx=None):
            seen.append(ctx.round)
            return super().aggregate(updates, client_weights, ctx)

    with interrupted(Counting(tau=0.5), tmp_path) as history:
        seen.clear()
        record(Counting(tau=0.5), history, folder=tmp_path / "run", resume=True)
    # What `on_round_end` interrupts comes before the saving of this round.
    assert seen == list(range(3, ROUNDS))


def test_memory_of_another_history_or_damaged_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rule = CenteredClipping(tau=0.5)
    whole = record(rule, MemoryHistory())
    saved = tmp_path / "run" / "record" / "aggregator.npz"
    with interrupted(rule, tmp_path / "other") as _:
        foreign = (tmp_path / "other" / "run" / "record" / "aggregator.npz").read_bytes()
    for damage in (foreign, saved, b"PK\x03\x04"):
        with interrupted(rule, tmp_path) as history:
            saved.write_bytes(saved.read_bytes()[:-9] if damage is saved else damage)
            resumed = record(rule, history, folder=tmp_path / "run", resume=True)
        assert torch.equal(resumed.global_weights, whole.global_weights)
        for file in (tmp_path / "history").iterdir():
            file.unlink()
    assert caplog.text.count("The whole history is replayed instead") == 2


@pytest.mark.parametrize("name", RULES)
def test_a_recovery_starts_fresh(name: str) -> None:
    history = MemoryHistory()
    whole = record(RULES[name], history)
    again = loop().recover(quadratic_federation(), history, TrainFromScratch(), [])
    assert torch.equal(again.global_weights, whole.global_weights)


def test_fedrecover_asks_little_and_comes_close_to_training_from_scratch(tmp_path: Path) -> None:
    history, federation = MemoryHistory(), quadratic_federation(num_clients=8, size=3)
    rule = CenteredClipping(tau=1.0)
    result = loop().record(federation, rule, history, max_rounds=40, server_lr=0.1)
    scratch = loop().recover(federation, history, TrainFromScratch(), federation.malicious)
    recoverer = FedRecover(
        warmup_rounds=8, correction_period=10, final_rounds=4, estimator="paired"
    )
    runs = [
        loop(tmp_path, callbacks=callbacks).recover for callbacks in (None, Interrupt(20), None)
    ]
    args = (federation, history, recoverer, federation.malicious)
    recovered = runs[0](*args, name="whole")
    # On quadratic losses with full batches the estimates are as good as exact.
    torch.testing.assert_close(
        recovered.global_weights, scratch.global_weights, rtol=5e-3, atol=1e-3
    )
    assert not torch.allclose(recovered.global_weights, result.global_weights, atol=1e-2)
    assert recovered.ledger.acp() > 0.5
    with pytest.raises(KeyboardInterrupt):
        runs[1](*args, name="cut")
    resumed = runs[2](*args, name="cut", resume=True)
    assert torch.equal(resumed.global_weights, recovered.global_weights)


class LooksAhead(Attack):
    """Tries out what the server would make of it, before it sends what it would have anyway."""

    def craft(self, updates, malicious, ctx):
        for factor in (-1.0, 10.0):
            ctx.aggregator(factor * updates)
        return updates


def test_an_attacker_that_tries_the_rule_out_leaves_its_memory_alone() -> None:
    rule = RULES["nested"]
    plain = record(rule, MemoryHistory())
    attacked = record(rule, MemoryHistory(), attack=LooksAhead())
    assert torch.equal(attacked.global_weights, plain.global_weights)


def test_a_detector_is_shown_every_round_also_those_the_rule_remembers(tmp_path: Path) -> None:
    class Watching(KnownMalicious):
        seen: ClassVar[list[int]] = []

        def observe(self, record):
            self.seen.append(record.round)
            super().observe(record)

    rule = CenteredClipping(tau=0.5)
    whole = record(rule, MemoryHistory())
    with interrupted(rule, tmp_path) as history:
        resumed = record(rule, history, folder=tmp_path / "run", resume=True, detector=Watching())
    assert Watching.seen == list(range(ROUNDS))
    assert torch.equal(resumed.global_weights, whole.global_weights)
