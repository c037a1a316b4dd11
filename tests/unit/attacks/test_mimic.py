from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedrec import Callback, ClientSampler, FederatedLoop, Federation
from fedrec.aggregators import Median
from fedrec.attacks import AttackContext, Mimic, Scheduled
from fedrec.data import Digits
from fedrec.exceptions import ConfigurationError
from fedrec.executors import SequentialExecutor
from fedrec.history import LMDBHistory, MemoryHistory
from fedrec.loop.round import Engine
from fedrec.models import MLP
from fedrec.parameters import ParameterVector
from fedrec.recoverers import TrainFromScratch
from fedrec.testing.problems import quadratic_federation


def record(attack: Any, rounds: int = 8, **kwargs: Any) -> MemoryHistory:
    history = MemoryHistory()
    FederatedLoop(accelerator="cpu", enable_progress_bar=False, logger=False).record(
        quadratic_federation(num_clients=6, num_malicious=2),
        Median(),
        history,
        max_rounds=rounds,
        server_lr=0.2,
        attack=attack,
        **kwargs,
    )
    return history


def copied(history: MemoryHistory, t: int) -> set[str]:
    """Return which benign clients the malicious ones equal."""
    record = history.read_round(t)
    rows = dict(zip(record.client_ids, record.updates, strict=True))
    bad = [c for c in record.client_ids if c in ("q4", "q5")]
    assert all(torch.equal(rows[c], rows[bad[0]]) for c in bad)
    return {c for c, r in rows.items() if c not in bad and bad and torch.equal(r, rows[bad[0]])}


def test_after_the_warmup_it_sticks_to_one_client() -> None:
    history = record(Mimic(warmup_rounds=3))
    found = [copied(history, t) for t in range(8)]
    assert all(len(f) == 1 for f in found)
    assert len(set.union(*found[2:])) == 1


def test_a_round_without_that_client() -> None:
    history = record(Mimic(warmup_rounds=2), rounds=12, sampler=ClientSampler(fraction=0.6))
    attacked = [t for t in range(12) if {"q4", "q5"} & set(history.index(t).present)]
    assert all(len(copied(history, t)) == 1 for t in attacked)


def test_every_recording_and_recovery_starts_without_memory() -> None:
    attack = Mimic(warmup_rounds=3)
    first, second = record(attack), record(attack)
    assert torch.equal(first.read_round(7).aggregate, second.read_round(7).aggregate)
    federation = quadratic_federation(num_clients=6, num_malicious=2)
    loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False, logger=False)
    results = [
        loop.recover(federation, first, TrainFromScratch(), ["q4"], attack=a).global_weights
        for a in (attack, attack, Mimic(warmup_rounds=3))
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    "attack", [Mimic(warmup_rounds=5), Scheduled(Mimic(warmup_rounds=5), start=2)], ids=repr
)
@pytest.mark.parametrize("stopped", [3, 7])
def test_stored_rounds_bring_the_memory_back(attack: Any, stopped: int) -> None:
    history = record(attack)
    federation = quadratic_federation(num_clients=6, num_malicious=2)
    engine = Engine(
        federation=federation,
        phase="record",
        executor=SequentialExecutor(),
        aggregator=Median(),
        server_lr=0.2,
        attack=attack,
        malicious=frozenset(federation.malicious),
        seed=0,
        device=torch.device("cpu"),
        autocast=torch.no_grad,
    )
    assert attack.has_memory
    for t in range(stopped):
        stored = history.read_round(t)
        ctx = engine.context(t, stored.cohort, stored.global_weights)
        engine.remember(ctx, stored.sent)
    ctx = engine.context(stopped, federation.client_ids, history.read_round(stopped).global_weights)
    sent = engine.ask(ctx, federation.client_ids)
    assert torch.equal(sent.updates, history.read_round(stopped).updates)
    # As does a state that was saved.
    state = attack.state_dict()
    after = engine.ask(ctx, federation.client_ids).updates
    attack.reset(federation.malicious)
    assert attack.state_dict()["num_seen"] == 0
    attack.load_state_dict(state)
    engine.end_round()
    assert torch.equal(engine.ask(ctx, federation.client_ids).updates, after)


def test_asked_again_within_a_round_it_copies_the_same_client_and_learns_nothing() -> None:
    def context(t: int) -> AttackContext:
        return AttackContext(
            round=t,
            phase="recover",
            client_ids=tuple("abcde"),
            global_weights=torch.zeros(6),
            layout=ParameterVector(torch.nn.Linear(6, 1, bias=False)),
        )

    attack, mask = Mimic(warmup_rounds=9), torch.tensor([False] * 4 + [True])
    first, second = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    for t in range(3):
        target = attack.craft(first, mask, context(t))[4]
        row = (first[:4] == target).all(dim=1)
        mean, direction = attack.state_dict()["mean"], attack.state_dict()["direction"]
        again = attack.craft(second, mask, context(t))[4]  # after other local work, say
        assert torch.equal(again, second[:4][row][0])
        assert attack.state_dict()["num_seen"] == t + 1
        assert torch.equal(attack.state_dict()["mean"], mean)
        assert torch.equal(attack.state_dict()["direction"], direction)


def test_bad_warmup_is_named() -> None:
    with pytest.raises(ConfigurationError, match="Expected `warmup_rounds`"):
        Mimic(warmup_rounds=0)


class _Stop(Exception):
    """Ends a recording as an interruption does."""


class StopAfter(Callback):
    def __init__(self, last: int) -> None:
        self.last = last

    def on_round_end(self, loop: Any, ctx: Any, values: Any) -> None:
        if ctx.round == self.last:
            raise _Stop


@pytest.mark.parametrize("codec", ["float32", "sign"])
@pytest.mark.parametrize("stopped", [1, 3, 7])
def test_a_resumed_recording_copies_the_same_client(
    tmp_path: Path, codec: str, stopped: int
) -> None:
    arguments: dict[str, Any] = {
        "max_rounds": 10,
        "server_lr": 0.2,
        "attack": Mimic(warmup_rounds=5),
    }

    def record(history: LMDBHistory, *callbacks: Callback) -> None:
        loop = FederatedLoop(
            accelerator="cpu", enable_progress_bar=False, logger=False, callbacks=callbacks
        )
        torch.manual_seed(0)
        module = MLP(in_features=64, hidden=(4,))
        federation = Federation.from_data(Digits(num_clients=8), module, malicious=2, batch_size=2)
        loop.record(federation, Median(), history, resume=True, **arguments)

    with (
        LMDBHistory(tmp_path / "a", codec=codec) as whole,
        LMDBHistory(tmp_path / "b", codec=codec) as parts,
    ):
        record(whole)
        with pytest.raises(_Stop):
            record(parts, StopAfter(stopped))
        record(parts)
        for t in range(10):
            assert torch.equal(whole.read_round(t).updates, parts.read_round(t).updates)
