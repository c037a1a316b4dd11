"""Schedules, fake clients, collusion and data poisoning, from recording to recovery."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedrec import Attack, ClientSampler, FederatedLoop, Federation
from fedrec.aggregators import FedAvg, TrimmedMean
from fedrec.attacks import (
    ALIE,
    DBA,
    MPAF,
    BackdoorAttack,
    KrumAttack,
    LabelFlip,
    MinMax,
    Neurotoxin,
    Scheduled,
    SignFlip,
    TrimAttack,
)
from fedrec.clients import FakeClient
from fedrec.data import Digits
from fedrec.exceptions import ConfigurationError
from fedrec.executors import SequentialExecutor
from fedrec.history import MemoryHistory
from fedrec.models import MLP
from fedrec.recipe.classes import ClassFinder
from fedrec.recipe.instantiate import Instantiator
from fedrec.recoverers import FedRecover, ReplayRecoverer, TrainFromScratch
from fedrec.testing.problems import quadratic_federation
from fedrec.types import RoundContext


def loop() -> FederatedLoop:
    return FederatedLoop(accelerator="cpu", enable_progress_bar=False, logger=False)


def digits(**kwargs: Any) -> Federation:
    torch.manual_seed(0)
    module = MLP(in_features=64, hidden=(8,))
    return Federation.from_data(Digits(num_clients=4), module, batch_size=8, **kwargs)


def record(
    federation: Federation, attack: Attack | None, rounds: int = 5, **kwargs: Any
) -> MemoryHistory:
    history = MemoryHistory()
    arguments = {"aggregator": FedAvg(), "server_lr": 0.1, **kwargs}
    loop().record(federation, history=history, max_rounds=rounds, attack=attack, **arguments)
    return history


def updates(history: MemoryHistory, t: int, *client_ids: str) -> torch.Tensor:
    return history.read_round(t, list(client_ids) or None).updates


# -- schedules ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "rounds"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ({"start": 4}, [4, 5, 6, 7, 8]),
        ({"start": 4, "stop": 6}, [4, 5]),
        ({"every": 4}, [0, 4, 8]),
        ({"start": 1, "stop": 8, "every": 3}, [1, 4, 7]),
    ],
)
def test_rounds_of_a_schedule(arguments: dict[str, int], rounds: list[int]) -> None:
    attack = Scheduled(SignFlip(), **arguments)
    assert [t for t in range(9) if attack.is_active(t)] == rounds


def test_a_schedule_within_a_schedule() -> None:
    attack = Scheduled(Scheduled(SignFlip(), every=2), start=3)
    assert [t for t in range(9) if attack.is_active(t)] == [4, 6, 8]


@pytest.mark.parametrize(
    "arguments",
    [{"start": -1}, {"every": 0}, {"start": 3, "stop": 3}, {"stop": 0}, {"start": 1.5}],
)
def test_bad_schedules_are_named(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"Expected `(start|stop|every)`"):
        Scheduled(SignFlip(), **arguments)
    with pytest.raises(ConfigurationError, match="Expected `attack`"):
        Scheduled("SignFlip")  # type: ignore[arg-type]


@pytest.mark.parametrize("attack", [SignFlip(scale=3.0), LabelFlip(num_classes=10)], ids=repr)
def test_malicious_clients_are_honest_in_the_other_rounds(attack: Attack) -> None:
    honest = record(digits(malicious=2), None, rounds=4)
    history = record(digits(malicious=2), Scheduled(attack, start=2, every=2), rounds=4)
    always = record(digits(malicious=2), attack, rounds=1)
    for t in (0, 1):  # before the first attack everything is as without one
        assert torch.equal(updates(history, t), updates(honest, t))
    federation = digits(malicious=2)
    bad = federation.malicious
    good = [c for c in federation.client_ids if c not in bad]
    assert torch.equal(updates(history, 2, *good), updates(honest, 2, *good))
    assert not torch.equal(updates(history, 2, *bad), updates(honest, 2, *bad))
    assert not torch.equal(updates(always, 0, *bad), updates(honest, 0, *bad))
    # Round 3 is honest again, at the weights that the attack led to.
    weights = history.read_round(3).global_weights
    ctx = RoundContext(
        round=3,
        phase="record",
        client_ids=federation.client_ids,
        global_weights=weights,
        layout=federation.layout,
    )
    again = SequentialExecutor().compute(federation.clients, weights, ctx)
    torch.testing.assert_close(updates(history, 3), again.updates, rtol=1e-4, atol=1e-6)


def test_in_a_recovery_the_schedule_goes_on() -> None:
    federation = quadratic_federation(num_malicious=2)
    attack = Scheduled(SignFlip(scale=10.0), start=1, every=2)
    history = record(federation, attack)

    class AskAll(ReplayRecoverer):
        def round_updates(self, t: int, global_weights: torch.Tensor, ctx: Any) -> torch.Tensor:
            sent = ctx.exact(ctx.client_ids, "other").updates
            row = ctx.client_ids.index("q3")
            honest = federation.clients[3].local_update(global_weights, ctx).update
            flipped.append(bool((sent[row] + 10.0 * honest).abs().max() < 1e-4))
            return sent

    flipped: list[bool] = []
    loop().recover(federation, history, AskAll(), ["q4"], attack=attack)
    assert flipped == [False, True, False, True, False]


# -- fake clients -------------------------------------------------------------------------------


def test_fake_clients_join_and_are_malicious() -> None:
    federation = digits(malicious=1, fake_clients=2)
    assert federation.client_ids[-2:] == ("fake-0", "fake-1")
    assert len(federation.malicious) == 3
    real = [c.num_samples for c in federation.clients[:4]]
    assert federation.clients[-1].num_samples == round(sum(real) / 4)
    with pytest.raises(ConfigurationError, match="fake_clients"):
        digits(fake_clients=-1)
    with pytest.raises(ConfigurationError, match="num_samples"):
        FakeClient("f", num_samples=0)


def test_without_an_attack_fake_clients_send_zeros() -> None:
    history = record(digits(fake_clients=1), None, rounds=2)
    assert not updates(history, 0, "fake-0").any()
    # What poisons data has none of theirs to poison.
    history = record(digits(malicious=1, fake_clients=1), LabelFlip(num_classes=10), rounds=2)
    assert not updates(history, 1, "fake-0").any()


def test_real_clients_compute_as_if_there_were_no_fake_ones() -> None:
    alone = record(digits(), None, rounds=1)
    history = record(digits(fake_clients=3), MPAF(scale=1.0), rounds=1)
    ids = [f"client-{i}" for i in range(4)]
    assert torch.equal(updates(history, 0, *ids), updates(alone, 0, *ids))
    assert history.manifest.execution["path"] == alone.manifest.execution["path"] != "sequential"


def test_mpaf_by_fake_clients_is_undone_by_a_recovery() -> None:
    federation = digits(fake_clients=2)
    history = record(federation, MPAF(scale=2.0), rounds=30)
    base = MPAF().base_weights(federation.layout, seed=0)
    first, last = history.read_round(0), history.read_round(29)
    torch.testing.assert_close(
        first.select(["fake-1"]).updates[0], 2.0 * (first.global_weights - base)
    )
    # It is dragged all the way but for what the real clients do meanwhile.
    assert (last.global_weights - base).norm() < 0.5 * (first.global_weights - base).norm()
    clean = record(digits(), None, rounds=30)
    scratch = loop().recover(federation, history, TrainFromScratch(), ["fake-0", "fake-1"])
    expected = clean.read_round(29)
    torch.testing.assert_close(
        scratch.global_weights, expected.global_weights - 0.1 * expected.aggregate
    )
    # One that was not found goes on, asked alone too, and its rounds cost no local steps.
    result = loop().recover(
        federation,
        history,
        FedRecover(warmup_rounds=4, correction_period=5, final_rounds=2),
        ["fake-0"],
        attack=MPAF(scale=2.0),
    )
    assert torch.isfinite(result.global_weights).all()
    assert result.ledger is not None


def test_a_cohort_of_fake_clients_alone() -> None:
    class Only(ClientSampler):
        def sample(self, client_ids: Any, round: int, seed: int) -> tuple[str, ...]:
            return ("fake-0",) if round == 1 else tuple(client_ids)

    history = record(digits(fake_clients=1), MPAF(scale=1.0), rounds=3, sampler=Only())
    weights = [history.read_round(t).global_weights for t in range(3)]
    base = MPAF().base_weights(digits().layout, seed=0)
    torch.testing.assert_close(weights[2], weights[1] - 0.1 * (weights[1] - base))


# -- knowledge ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attack",
    [ALIE(), MinMax(full_knowledge=False), TrimAttack(full_knowledge=False)],
    ids=lambda a: type(a).__name__,
)
def test_colluding_attackers_asked_one_by_one_send_the_same(attack: Attack) -> None:
    federation = quadratic_federation(num_clients=6, num_malicious=3)
    history = record(federation, attack)

    class OneByOne(ReplayRecoverer):
        def round_updates(self, t: int, global_weights: torch.Tensor, ctx: Any) -> torch.Tensor:
            asked_before = [len(c.rounds_asked) for c in federation.clients[:3]]
            rows = [ctx.exact([c], "other").updates[0] for c in ("q3", "q4", "q5")]
            # Without full knowledge no benign client is computed for them.
            assert [len(c.rounds_asked) for c in federation.clients[:3]] == asked_before
            together = ctx.exact(ctx.client_ids, "other")
            for client_id, row in zip(("q3", "q4", "q5"), rows, strict=True):
                index = together.client_ids.index(client_id)
                torch.testing.assert_close(row, together.updates[index])
            return together.updates

    result = loop().recover(federation, history, OneByOne(), ["q0"], attack=attack)
    assert torch.isfinite(result.global_weights).all()


@pytest.mark.parametrize("attack", [KrumAttack(), TrimAttack()], ids=str)
def test_attackers_who_know_all_send_alone_what_they_sent_together(attack: Attack) -> None:
    federation = quadratic_federation(num_clients=6, num_malicious=3)
    recorded = record(federation, attack).read_round(0)

    class OneByOne(ReplayRecoverer):
        def round_updates(self, t: int, global_weights: torch.Tensor, ctx: Any) -> torch.Tensor:
            alone = ctx.exact(["q3"], "other").updates
            if t == 0:  # at the recorded weights
                torch.testing.assert_close(alone[0], recorded.select(["q3"]).updates[0])
            return ctx.exact(ctx.client_ids, "other").updates

    loop().recover(federation, record(federation, attack), OneByOne(), [], attack=attack)


def test_works_when_only_some_malicious_clients_take_part() -> None:
    for attack in (ALIE(), MinMax(), TrimAttack(full_knowledge=False), Neurotoxin(SignFlip())):
        federation = quadratic_federation(num_clients=8, num_malicious=3)
        history = record(federation, attack, rounds=8, sampler=ClientSampler(fraction=0.4))
        present = [set(history.index(t).present) & {"q5", "q6", "q7"} for t in range(8)]
        assert len({len(p) for p in present}) > 1
        assert torch.isfinite(history.read_round(7).aggregate).all()


# -- poisoned data ------------------------------------------------------------------------------


def test_label_flipping_acts_under_fedavg() -> None:
    # And exactly so: what a client with those labels would have sent.
    federation = digits(malicious=1)
    (bad,) = federation.malicious
    honest = record(digits(malicious=1), None, rounds=1)
    flipped = record(federation, LabelFlip(num_classes=10), rounds=1)
    assert not torch.equal(updates(flipped, 0, bad), updates(honest, 0, bad))
    assert not torch.equal(flipped.read_round(0).aggregate, honest.read_round(0).aggregate)
    other = digits()
    clients = [
        c.with_dataset(LabelFlip(num_classes=10).poison_dataset(c.dataset, c.client_id))
        if c.client_id == bad
        else c
        for c in other.clients
    ]
    by_hand = record(Federation(clients, other.module), None, rounds=1)
    assert torch.equal(updates(flipped, 0), updates(by_hand, 0))


def test_labels_beyond_the_classes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="more than the label 9"):
        record(digits(malicious=1), LabelFlip(num_classes=6), rounds=1)


def test_a_distributed_backdoor_is_learnt_whole() -> None:
    torch.manual_seed(0)
    module = MLP(in_features=64, hidden=(32,))
    federation = Federation.from_data(Digits(num_clients=8), module, malicious=4, batch_size=16)
    attack = DBA(num_parts=4, image_shape=[8, 8], scale=2.0)
    result = loop().record(
        federation, FedAvg(), MemoryHistory(), max_rounds=150, server_lr=0.3, attack=attack
    )
    tested = loop().test(federation, result.global_weights, attack=attack)
    whole = loop().test(
        federation, result.global_weights, attack=BackdoorAttack(image_shape=[8, 8])
    )
    assert tested["asr"] == whole["asr"] > 0.5
    assert tested["ter"] < 0.3


def test_a_robust_rule_with_a_schedule_from_a_recipe() -> None:
    instantiator = Instantiator(ClassFinder())
    attack = instantiator.component(
        {
            "class_path": "Scheduled",
            "init_args": {
                "every": 2,
                "attack": {
                    "class_path": "Neurotoxin",
                    "init_args": {
                        "attack": {
                            "class_path": "BackdoorAttack",
                            "init_args": {
                                "pattern": {
                                    "class_path": "SquareTrigger",
                                    "init_args": {"size": 2, "image_shape": [8, 8]},
                                }
                            },
                        }
                    },
                },
            },
        },
        "attack",
        [Attack],
    )
    assert instantiator.errors == []
    assert attack.target_label == 0
    history = record(digits(malicious=1), attack, rounds=3, aggregator=TrimmedMean(trim=1))
    assert history.manifest.attack == attack.spec()
