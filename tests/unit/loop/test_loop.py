"""FederatedLoop: what it records, refuses and resumes."""

import inspect
import json
import math
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import TensorDataset

from fedrec import Attack, Callback, ClientSampler, FederatedLoop, Federation, LightningClient
from fedrec.aggregators import FedAvg, FedAvgM, Median
from fedrec.attacks import BackdoorAttack, TrimAttack
from fedrec.callbacks import LoopSettings
from fedrec.data import Digits
from fedrec.detectors import KnownMalicious
from fedrec.exceptions import (
    AggregationError,
    ConfigurationError,
    FedrecWarning,
    HistoryFormatError,
    RecoveryError,
    UpdateError,
)
from fedrec.functional.kernels._finite import are_finite, nonfinite_rows
from fedrec.history import LMDBHistory, MemoryHistory
from fedrec.models import MLP
from fedrec.recoverers import FedRecover, HistoricalOnly, ReplayRecoverer, TrainFromScratch
from fedrec.testing.problems import QuadraticClient, quadratic_federation


def quiet(**kwargs) -> FederatedLoop:
    return FederatedLoop(accelerator="cpu", enable_progress_bar=False, **kwargs)


def digits(**kwargs) -> Federation:
    torch.manual_seed(0)
    module = MLP(in_features=64, hidden=(8,))
    return Federation.from_data(Digits(num_clients=4), module, batch_size=8, **kwargs)


def record(federation=None, history=None, loop=None, rounds=6, aggregator=None, **kwargs):
    federation = federation or quadratic_federation()
    history = MemoryHistory() if history is None else history
    result = (loop or quiet()).record(
        federation, aggregator or FedAvg(), history, max_rounds=rounds, server_lr=0.3, **kwargs
    )
    return federation, history, result


class Scale(Attack):
    """Malicious clients send a multiple."""

    def __init__(self, factor: float = 3.0) -> None:
        self.factor = factor

    def craft(self, updates, malicious, ctx):
        return torch.where(malicious[:, None], self.factor * updates, updates)


class Seen(Attack):
    """Sends the mean of the benign, and remembers what it was shown."""

    full_knowledge = True

    def __init__(self) -> None:
        self.shown: list[tuple[int, tuple[str, ...]]] = []

    def craft(self, updates, malicious, ctx):
        self.shown.append((ctx.round, ctx.client_ids))
        return torch.where(malicious[:, None], updates[~malicious].mean(dim=0), updates)


# -- the round ----------------------------------------------------------------------------------


def test_recorded_rounds_are_gradient_descent_by_hand() -> None:
    federation, history, result = record()
    sizes = np.array([c.num_samples for c in federation.clients], dtype=float)
    w = np.zeros(4)
    for t in range(6):
        found = history.read_round(t)
        g = [
            c.hessian.double().numpy() @ (w - c.centre.double().numpy()) for c in federation.clients
        ]
        np.testing.assert_allclose(found.global_weights.numpy(), w, atol=1e-6)
        np.testing.assert_allclose(found.updates.numpy(), np.array(g), atol=1e-5)
        w = w - 0.3 * (sizes / sizes.sum()) @ np.array(g)
    np.testing.assert_allclose(result.global_weights.numpy(), w, atol=1e-6)


def test_attack_changes_what_malicious_clients_send_and_nothing_else() -> None:
    federation, history, _ = record(attack=Scale(3.0))
    honest = record()[1].read_round(0).updates
    sent = history.read_round(0).updates
    assert federation.malicious == ("q4",)
    torch.testing.assert_close(sent[4], 3 * honest[4])
    assert torch.equal(sent[:4], honest[:4])


def test_manifest_says_what_a_recovery_needs() -> None:
    _, history, _ = record(attack=Scale(2.0))
    manifest = history.manifest
    assert manifest.clients == {"q0": 1, "q1": 2, "q2": 3, "q3": 4, "q4": 5}
    assert manifest.malicious == ("q4",)
    assert manifest.server_lr == 0.3
    assert manifest.max_rounds == 6
    assert manifest.aggregator["class_path"].endswith("FedAvg")
    assert manifest.attack["init_args"] == {"factor": 2.0}
    assert manifest.execution["path"] == "sequential"
    assert json.loads(manifest.to_json())["seed"] == 0


def test_module_is_left_as_it_was_found() -> None:
    federation = digits()
    before = federation.layout.flatten(federation.module)
    loop = quiet()
    _, history, result = record(federation, loop=loop)
    loop.recover(federation, history, TrainFromScratch(), [])
    loop.test(federation, result.global_weights)
    assert torch.equal(federation.layout.flatten(federation.module), before)


def test_batches_do_not_depend_on_who_is_excluded() -> None:
    """Rule: a client replays in recovery the mini-batch it drew in the recording."""
    federation = digits()
    loop = quiet()
    _, history, _ = record(federation, loop=loop, rounds=1)
    seen = {}

    class Keep(Callback):
        def on_updates(self, loop, ctx, updates):
            seen.update(zip(updates.client_ids, updates.updates.clone(), strict=True))

    loop = quiet(callbacks=Keep())
    loop.recover(federation, history, TrainFromScratch(), ["client-0"])
    recorded = history.read_round(0)
    for client_id, row in zip(recorded.client_ids[1:], recorded.updates[1:], strict=True):
        torch.testing.assert_close(seen[client_id], row)
    loop.recover(federation, history, TrainFromScratch(), ["client-0"], batch_policy="fresh")
    assert not torch.allclose(seen["client-1"], recorded.updates[1])


def test_executors_give_the_same_recording() -> None:
    paths, ends = [], []
    for executor in ("sequential", "vectorized"):
        _, history, result = record(digits(), loop=quiet(executor=executor), rounds=10)
        paths.append(history.manifest.execution.get("path", "sequential"))
        ends.append(result.global_weights)
    assert paths == ["sequential", "grouped"]
    assert float((ends[0] - ends[1]).norm() / ends[0].norm()) < 1e-5


# -- what is refused ----------------------------------------------------------------------------


class Sick(QuadraticClient):
    """Sends something else from round 2 on."""

    sends = torch.full((4,), float("nan"))

    def local_update(self, global_weights, ctx):
        sent = super().local_update(global_weights, ctx)
        if ctx.round < 2:
            return sent
        return type(sent)(update=self.sends, num_samples=self.num_samples)


def sick(sends: torch.Tensor) -> Federation:
    good = quadratic_federation(num_malicious=0)
    clients = list(good.clients)
    clients[1] = Sick("q1", clients[1].hessian, clients[1].centre, num_samples=2)
    clients[1].sends = sends
    return Federation(clients, good.module)


@pytest.mark.parametrize(
    ("sends", "reason"),
    [
        (torch.tensor([0.0, float("nan"), 0.0, 0.0]), "NaN or infinity"),
        (torch.full((4,), float("inf")), "NaN or infinity"),
        (torch.zeros(5), r"shape \(4,\), but got \(5,\)"),
        (torch.zeros(4, 1), "shape"),
        (torch.zeros(4, dtype=torch.int64), "floating-point"),
    ],
)
def test_unusable_updates_are_refused_by_name(sends: torch.Tensor, reason: str) -> None:
    history = MemoryHistory()
    with pytest.raises(UpdateError, match=f"client 'q1'.*{reason}"):
        record(sick(sends), history)
    assert len(history.rounds()) == 2, "rounds before are kept, the bad one is not stored"
    federation, history, result = record(sick(sends), on_bad_update="drop")
    last = history.read_round(5)
    assert last.client_ids == ("q0", "q2", "q3", "q4")
    assert list(last.refused) == ["q1"]
    assert bool(torch.isfinite(result.global_weights).all())
    # The others still recover, from the rounds in which each was there.
    recovered = quiet().recover(federation, history, FedRecover(warmup_rounds=3), ["q0"])
    assert recovered.ledger.cp()["q1"] == 0.0
    assert recovered.ledger.num_rounds["q1"] == 2


def test_other_recordings_cannot_be_resumed() -> None:
    federation, history, _ = record()
    with pytest.raises(ConfigurationError, match="already holds a recording of 6 rounds"):
        record(federation, history)
    with pytest.raises(ConfigurationError, match=r"aggregator: .*FedAvg.* recorded, .*Median"):
        record(federation, history, aggregator=Median(), resume=True)
    with pytest.raises(ConfigurationError, match="seed: 0 recorded, 1 now"):
        record(federation, history, loop=quiet(seed=1), resume=True)
    with pytest.raises(HistoryFormatError, match="4 parameters"):
        record(quadratic_federation(size=5), history, resume=True)


def test_other_local_training_cannot_be_resumed_or_replayed() -> None:
    _, history, _ = record(digits(malicious=1))
    torch.manual_seed(0)
    module = MLP(in_features=64, hidden=(8,))
    other = Federation.from_data(Digits(num_clients=4), module, malicious=1, batch_size=5)
    with pytest.raises(ConfigurationError, match=r"training: .*'batch_size': 8.* recorded"):
        record(other, history, resume=True)
    with pytest.raises(ConfigurationError, match=r"'batch_size': 8.* in the recording"):
        quiet().recover(other, history, TrainFromScratch(), [])
    quiet().recover(other, history, TrainFromScratch(), [], batch_policy="fresh")
    honest = digits()
    with pytest.raises(ConfigurationError, match=r"malicious=history\.manifest\.malicious"):
        quiet().recover(honest, history, TrainFromScratch(), [], attack=Scale())


def test_a_recovery_on_other_data_is_refused() -> None:
    history = MemoryHistory()
    federation, *_ = record(digits(), history, rounds=2)
    fewer = Digits(num_clients=8)
    other = Federation.from_data(fewer, federation.module, batch_size=8)
    with pytest.raises(ConfigurationError, match=r"'client-0' had 337 samples .* has 169 now"):
        quiet().recover(other, history, HistoricalOnly(), exclude=[])


def test_components_with_tuples_can_be_resumed(tmp_path: Path) -> None:
    """A tuple is a list after it was stored as JSON."""
    attack = BackdoorAttack(image_shape=(1, 8, 8))
    federation = digits(malicious=1)
    with LMDBHistory(tmp_path / "history") as history:
        record(federation, history, rounds=2, attack=attack)
    with LMDBHistory(tmp_path / "history") as history:
        _, _, result = record(federation, history, rounds=2, attack=attack, resume=True)
    assert result.rounds == 2


def test_rules_with_memory_start_fresh_and_resume() -> None:
    class Momentum(FedAvg):
        def __init__(self, beta: float = 0.5) -> None:
            super().__init__()
            self.beta = beta
            self.velocity = None

        def aggregate(self, updates, client_weights=None, ctx=None):
            mean = super().aggregate(updates, client_weights, ctx)
            self.velocity = mean if self.velocity is None else self.beta * self.velocity + mean
            return self.velocity

        def state_dict(self):
            return {"velocity": self.velocity}

        def load_state_dict(self, state):
            self.velocity = state["velocity"]

    class Interrupt(Callback):
        def on_round_end(self, loop, ctx, metrics):
            if ctx.round == 3:
                raise KeyboardInterrupt

    rule = Momentum()
    _, _, whole = record(aggregator=rule, rounds=8)
    federation, history = quadratic_federation(), MemoryHistory()
    with pytest.raises(KeyboardInterrupt):
        record(federation, history, loop=quiet(callbacks=Interrupt()), aggregator=rule, rounds=8)
    _, _, resumed = record(federation, history, aggregator=rule, rounds=8, resume=True)
    assert torch.equal(resumed.global_weights, whole.global_weights)
    again = quiet().recover(federation, history, TrainFromScratch(), [], aggregator=rule)
    assert torch.equal(again.global_weights, whole.global_weights)


def test_resuming_under_another_plan_is_refused() -> None:
    federation = digits()
    _, history, _ = record(federation, loop=quiet(executor="sequential"))
    with pytest.raises(ConfigurationError, match="executor: 'SequentialExecutor' then"):
        record(federation, history, loop=quiet(executor="vectorized"), resume=True)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"devices": 0}, "devices"),
        ({"precision": "16-mixed"}, "precision"),
        ({"executor": "parallel"}, "executor"),
        ({"accelerator": "tpu"}, "accelerator"),
        ({"eval_every": 0}, "eval_every"),
        ({"seed": -1}, "seed"),
        ({"callbacks": Callback}, "callbacks"),
        ({"callbacks": [pl.Callback()]}, "callbacks"),
        ({"logger": "csv"}, "logger"),
        ({"logger": CSVLogger}, "logger"),
        ({"default_root_dir": 3}, "default_root_dir"),
        ({"deterministic": "warn"}, "deterministic"),
    ],
)
def test_bad_loop_arguments_are_named(kwargs: dict, match: str) -> None:
    with pytest.raises(ConfigurationError, match=f"`{match}`"):
        FederatedLoop(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"exclude": ["q9"]}, "exclude"),
        ({"exclude": "q4"}, "list of client ids"),
        ({"exclude": None}, "list of client ids"),
        ({"exclude": 4}, "list of client ids"),
        ({"exclude": [f"q{i}" for i in range(5)]}, "fewer than all"),
        ({"exclude": [], "max_rounds": 7}, "at most the 6 recorded rounds"),
        ({"exclude": [], "batch_policy": "new"}, "batch_policy"),
    ],
)
def test_bad_recover_arguments_are_named(kwargs: dict, match: str) -> None:
    federation, history, _ = record()
    with pytest.raises(ConfigurationError, match=match):
        quiet().recover(federation, history, HistoricalOnly(), **kwargs)


@pytest.mark.parametrize(
    ("argument", "value", "match"),
    [
        ("federation", [], "a Federation, but got"),
        ("aggregator", FedAvg, r"an Aggregator, .*class; `FedAvg\(\.\.\.\)` makes one"),
        ("aggregator", "FedAvg", "an Aggregator, but got 'FedAvg'"),
        ("history", "runs/history", "a HistoryStore, but got 'runs/history'"),
        ("attack", TrimAttack, r"an Attack or None, .*`TrimAttack\(\.\.\.\)` makes one"),
        ("detector", KnownMalicious, "a Detector or None"),
        ("sampler", 0.5, "a ClientSampler or None, but got 0.5"),
    ],
)
def test_components_of_another_kind_are_named(argument: str, value: object, match: str) -> None:
    given: dict = {
        "federation": quadratic_federation(),
        "aggregator": FedAvg(),
        "history": MemoryHistory(),
        argument: value,
    }
    with pytest.raises(ConfigurationError, match=f"Expected `{argument}` to be {match}"):
        quiet().record(**given, max_rounds=1, server_lr=0.1)


def test_recoverers_and_weights_of_another_kind_are_named() -> None:
    federation, history, result = record()
    with pytest.raises(ConfigurationError, match=r"`recoverer`.*`FedRecover\(\.\.\.\)` makes one"):
        quiet().recover(federation, history, FedRecover, exclude=[])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="`global_weights` to be a Tensor"):
        quiet().test(federation, result.global_weights.numpy())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"malicious": None}, "`malicious` to be a count"),
        ({"malicious": "client-1"}, "`malicious` to be a count"),
        ({"malicious": torch.tensor(2)}, "`malicious` to be a count"),
    ],
)
def test_bad_federation_arguments_are_named(kwargs: dict, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        Federation.from_data(Digits(num_clients=4), MLP(in_features=64), **kwargs)


def test_what_is_no_client_and_no_data_is_named() -> None:
    data = Digits(num_clients=4)
    with pytest.raises(ConfigurationError, match="`clients` to be a Client"):
        Federation([data.train_dataset], MLP(in_features=64))  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="`data` to be a FederatedDataModule"):
        Federation.from_data(Digits, MLP(in_features=64))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="`joins` to be a dict"):
        ClientSampler(joins=["a"])  # type: ignore[arg-type]


def test_recovering_nothing_is_an_error() -> None:
    history = MemoryHistory()
    with pytest.raises(HistoryFormatError):
        quiet().recover(quadratic_federation(), history, HistoricalOnly(), [])


def test_a_recoverer_may_not_ask_excluded_clients() -> None:
    class Cheat(ReplayRecoverer):
        def round_updates(self, t, global_weights, ctx):
            return ctx.exact(["q4"], "other")

    federation, history, _ = record()
    with pytest.raises(RecoveryError, match=r"\['q4'\] in round 0"):
        quiet().recover(federation, history, Cheat(), federation.malicious)


def test_server_data_is_demanded_where_needed() -> None:
    class Needy(HistoricalOnly):
        needs_server_data = True

    federation, history, _ = record()
    with pytest.raises(ConfigurationError, match="server_data="):
        quiet().recover(federation, history, Needy(), federation.malicious)


def test_diverging_training_stops_before_anything_useless_is_stored() -> None:
    history = MemoryHistory()
    with pytest.raises((AggregationError, UpdateError), match="lower"):
        quiet().record(quadratic_federation(), FedAvg(), history, max_rounds=2000, server_lr=1e3)
    assert 0 < len(history.rounds()) < 2000


def test_an_update_is_looked_at_for_nan_when_it_arrives_and_an_aggregate_once(monkeypatch) -> None:
    """Five clients in a recorded round, of whom one crafts; three in a recovered one."""
    looked: list[int] = []

    def counting(rows: torch.Tensor) -> list[int]:
        looked.append(len(rows))
        return nonfinite_rows(rows)

    def counting_together(*tensors: torch.Tensor) -> bool:
        looked.append(len(tensors))
        return are_finite(*tensors)

    for module in ("aggregators.base", "executors.finite", "loop.round", "loop.recovery"):
        monkeypatch.setattr(f"fedrec.{module}.nonfinite_rows", counting)
    monkeypatch.setattr("fedrec.loop.round.are_finite", counting_together)
    federation, history, _ = record(rounds=1)
    assert looked == [5, 1]
    looked.clear()
    record(rounds=1, attack=Scale(2.0))
    assert looked == [5, 1, 1]
    looked.clear()
    record(rounds=1, aggregator=FedAvgM(FedAvg()))  # a rule that calls another one
    assert looked == [5, 1]
    looked.clear()
    quiet().recover(federation, history, HistoricalOnly(), ["q0", "q4"])
    assert looked == [3, 1]


def test_a_crafted_update_is_refused_by_name() -> None:
    class Endless(Attack):
        def craft(self, updates, malicious, ctx):
            return torch.where(malicious[:, None], math.inf, updates)

    with pytest.raises(UpdateError, match=r"^Refused updates: client 'q4': the update has NaN or"):
        record(attack=Endless())
    _, history, _ = record(attack=Endless(), on_bad_update="drop")
    assert history.read_round(0).client_ids == ("q0", "q1", "q2", "q3")
    assert history.read_round(0).refused == {"q4": "the update has NaN or infinity"}


def test_decoded_updates_that_are_not_finite_are_refused_by_a_rule_that_remembers() -> None:
    """What a rule with a memory aggregates is what the history gives back."""

    class Overflowing(MemoryHistory):
        def as_stored(self, updates: torch.Tensor) -> torch.Tensor:
            return updates * math.inf

    with pytest.raises(AggregationError, match="Expected finite updates, but rows of clients"):
        record(history=Overflowing(), aggregator=FedAvgM(FedAvg()))


def test_one_bad_client_does_not_make_attackers_look_bad() -> None:
    good = quadratic_federation(num_malicious=1)
    clients = list(good.clients)
    clients[1] = Sick("q1", clients[1].hessian, clients[1].centre, num_samples=2)
    federation = Federation(clients, good.module, malicious=good.malicious)
    attack = TrimAttack()
    _, history, _ = record(federation, attack=attack, on_bad_update="drop")
    assert list(history.read_round(4).refused) == ["q1"]
    assert "q4" in history.read_round(4).client_ids


def test_a_client_cannot_choose_its_own_weight() -> None:
    class Greedy(QuadraticClient):
        def local_update(self, global_weights, ctx):
            sent = super().local_update(global_weights, ctx)
            return type(sent)(update=sent.update, num_samples=10**6)

    good = quadratic_federation(num_malicious=0)
    clients = list(good.clients)
    clients[0] = Greedy("q0", clients[0].hessian, clients[0].centre)
    with pytest.raises(UpdateError, match=r"'q0': expected num_samples=1, but got 1000000"):
        record(Federation(clients, good.module))


def test_abnormal_estimates_are_not_used_when_the_client_cannot_answer() -> None:
    """With `on_bad_update="drop"`, a client that should have been fixed is left out."""

    class Failing(QuadraticClient):
        def local_update(self, global_weights, ctx):
            sent = super().local_update(global_weights, ctx)
            if ctx.phase == "recover" and ctx.round == 4:
                return type(sent)(update=torch.full((4,), float("nan")), num_samples=1)
            return sent

    good = quadratic_federation(num_malicious=1)
    clients = list(good.clients)
    clients[0] = Failing("q0", clients[0].hessian, clients[0].centre)
    federation = Federation(clients, good.module, malicious=good.malicious)
    _, history, _ = record(federation)
    seen = []

    class Watch(FedAvg):
        def aggregate(self, updates, client_weights=None, ctx=None):
            seen.append((ctx.round, ctx.client_ids))
            return super().aggregate(updates, client_weights, ctx)

    recoverer = FedRecover(
        warmup_rounds=3, correction_period=None, final_rounds=0, abnormality_threshold=1e-6
    )
    quiet().recover(
        federation, history, recoverer, ["q4"], aggregator=Watch(), on_bad_update="drop"
    )
    assert dict(seen)[4] == ("q1", "q2", "q3")


def test_poisoning_needs_data_that_can_be_reached() -> None:
    with pytest.raises(ConfigurationError, match="whose data fedrec cannot reach"):
        record(quadratic_federation(), attack=BackdoorAttack())


# -- participation, knowledge, buffers ----------------------------------------------------------


def test_sampled_cohorts_are_replayed_and_counted() -> None:
    federation, history, _ = record(rounds=20, sampler=ClientSampler(fraction=0.4))
    cohorts = [history.read_round(t).client_ids for t in range(20)]
    assert {len(c) for c in cohorts} == {2}
    result = quiet().recover(federation, history, TrainFromScratch(), ["q4"])
    expected = {c: sum(c in cohort for cohort in cohorts) for c in ("q0", "q1", "q2", "q3")}
    assert result.ledger.num_rounds == expected
    assert result.ledger.acp() == 0.0
    # FedRecover works from the rounds each client took part in; whoever has no pair is asked.
    recovered = quiet().recover(federation, history, FedRecover(warmup_rounds=3), ["q4"])
    assert recovered.ledger.exact_rounds_by_reason()["fallback"] > 0
    assert bool(torch.isfinite(recovered.global_weights).all())


def test_a_round_without_remaining_clients_makes_no_step() -> None:
    class OneByOne(ClientSampler):
        def sample(self, client_ids, round, seed):
            return (client_ids[round % 5],)

    federation, history, _ = record(rounds=5, sampler=OneByOne())
    weights = []

    class Keep(Callback):
        def on_round_start(self, loop, ctx):
            weights.append(ctx.round)

    quiet(callbacks=Keep()).recover(federation, history, HistoricalOnly(), ["q2"])
    assert weights == [0, 1, 3, 4]


def test_benign_updates_an_attacker_sees_are_not_charged() -> None:
    """Only q4 is asked, but it crafts from what all remaining clients would send."""

    class AskAttacker(ReplayRecoverer):
        def round_updates(self, t, global_weights, ctx):
            rows = ctx.history(t).updates
            rows[-1] = ctx.exact(["q4"], "other").updates[0]
            return rows

    attack = Seen()
    federation, history, _ = record(attack=attack)
    attack.shown.clear()
    result = quiet().recover(federation, history, AskAttacker(), ["q0"], attack=attack)
    assert attack.shown == [(t, ("q1", "q2", "q3", "q4")) for t in range(6)]
    assert {e.client_id for e in result.ledger.entries} == {"q4"}


class Normed(pl.LightningModule):
    """A model with running statistics."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))

    def forward(self, x):
        return self.body(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_running_statistics_are_refused_or_averaged() -> None:
    data = Digits(num_clients=3)
    with pytest.raises(ConfigurationError, match=r"GroupNorm.*buffers=\"average\""):
        Federation.from_data(data, Normed())
    federation = Federation.from_data(data, Normed(), batch_size=16, buffers="average")
    _, history, result = record(federation, rounds=1)
    clients, indices = federation.clients, []
    means = []
    for client in clients:
        x = client.dataset.tensors[0].flatten(1)
        ctx = type("Ctx", (), {"seed": 0, "round": 0, "batch_policy": "replay", "work": None})
        indices = client.batches(ctx)[0]
        means.append(0.1 * x[indices].mean(dim=0))  # momentum 0.1, from zero
    sizes = torch.tensor([c.num_samples for c in clients], dtype=torch.float64)
    expected = (sizes / sizes.sum()) @ torch.stack(means).double()
    found = history.read_round(0).buffers
    torch.testing.assert_close(found[:64].double(), expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(found, result.buffers)
    # Unchanged where nobody is asked.
    recovered = quiet().recover(federation, history, HistoricalOnly(), ["client-0"])
    assert torch.equal(recovered.buffers, federation.layout.buffers(federation.module))


# -- Lightning's conveniences -------------------------------------------------------------------


def test_files_of_a_run(tmp_path: Path) -> None:
    federation = digits(malicious=1)
    loop = quiet(default_root_dir=tmp_path, eval_every=2)
    record(federation, loop=loop)
    history = MemoryHistory()
    loop.record(federation, FedAvg(), history, max_rounds=6, server_lr=0.3)
    result = loop.recover(federation, history, TrainFromScratch(), federation.malicious)
    lines = (tmp_path / "record" / "metrics.csv").read_text().splitlines()
    assert lines[0].split(",")[:3] == ["round", "ter", "asr"]
    assert len(lines) == 7
    assert [row["round"] for row in result.curve] == [1, 3, 5]
    folder = tmp_path / "recover" / "TrainFromScratch"
    assert {p.name for p in folder.iterdir()} == {
        "metrics.csv",
        "ledger.csv",
        "model.ckpt",
        "checkpoint.npz",
        "derived.jsonl",
    }
    module = MLP.load_from_checkpoint(folder / "model.ckpt")
    assert torch.equal(federation.layout.flatten(module), result.global_weights)
    assert module.hparams["hidden"] == (8,)
    # Done is done: resuming a finished recovery asks nobody.
    again = loop.recover(federation, history, TrainFromScratch(), federation.malicious, resume=True)
    assert torch.equal(again.global_weights, result.global_weights)
    assert again.ledger.entries == result.ledger.entries


def test_a_new_recovery_is_never_taken_for_an_earlier_one(tmp_path: Path) -> None:
    class Interrupt(Callback):
        def on_round_end(self, loop, ctx, metrics):
            if ctx.round == 2:
                raise KeyboardInterrupt

    federation, history, _ = record()
    whole = quiet(default_root_dir=tmp_path).recover(
        federation, history, TrainFromScratch(), ["q4"]
    )
    loop = quiet(default_root_dir=tmp_path, callbacks=Interrupt())
    for client in federation.clients:
        client.rounds_asked.clear()
    with pytest.raises(KeyboardInterrupt):
        loop.recover(federation, history, TrainFromScratch(), ["q4"])
    folder = tmp_path / "recover" / "TrainFromScratch"
    assert not (folder / "model.ckpt").exists()
    again = quiet(default_root_dir=tmp_path).recover(
        federation, history, TrainFromScratch(), ["q4"], resume=True
    )
    assert torch.equal(again.global_weights, whole.global_weights)
    assert federation.clients[0].rounds_asked == [0, 1, 2, *range(6)]


def test_models_with_odd_hyperparameters_can_be_saved(tmp_path: Path) -> None:
    class Odd(MLP):
        def __init__(self, activate=torch.relu, hidden=(8,)):
            super().__init__(in_features=64, hidden=hidden)
            self.save_hyperparameters()

    torch.manual_seed(0)
    module = Odd(activate=lambda x: x)
    federation = Federation.from_data(Digits(num_clients=3), module, batch_size=8)
    loop = quiet(default_root_dir=tmp_path)
    _, history, _ = record(federation, loop=loop, rounds=2)
    with pytest.warns(FedrecWarning, match="'activate' of Odd is a function"):
        result = loop.recover(federation, history, HistoricalOnly(), [])
    path = tmp_path / "recover" / "HistoricalOnly" / "model.ckpt"
    loaded = Odd.load_from_checkpoint(path, activate=torch.relu)
    assert torch.equal(federation.layout.flatten(loaded), result.global_weights)


def test_checkpoint_of_another_recovery_is_refused(tmp_path: Path) -> None:
    federation, history, _ = record()
    loop = quiet(default_root_dir=tmp_path)
    loop.recover(federation, history, HistoricalOnly(), ["q4"])
    with pytest.raises(ConfigurationError, match="differs in exclude"):
        loop.recover(federation, history, HistoricalOnly(), ["q3"], resume=True)


def test_lightnings_loggers_get_every_round(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="log", version=0)
    federation = digits()
    record(federation, loop=quiet(logger=logger, eval_every=3))
    text = (tmp_path / "log" / "version_0" / "metrics.csv").read_text()
    header = text.splitlines()[0].split(",")
    assert {"record/loss", "record/ter", "step"} <= set(header)
    assert len(text.splitlines()) == 7


def test_components_can_log(tmp_path: Path) -> None:
    class Chatty(FedAvg):
        def aggregate(self, updates, client_weights=None, ctx=None):
            ctx.logger("rows", len(updates))
            return super().aggregate(updates, client_weights, ctx)

    loop = quiet(default_root_dir=tmp_path)
    record(loop=loop, aggregator=Chatty(), rounds=2)
    assert (tmp_path / "record" / "metrics.csv").read_text() == (
        "round,ter,asr,rows\n0,,,5\n1,,,5\n"
    )


def test_callbacks_are_called_in_order() -> None:
    calls = []

    class Log(Callback):
        def __getattribute__(self, name):
            if name.startswith("on_"):
                calls.append(name)
            return super().__getattribute__(name)

    record(loop=quiet(callbacks=[Log()]), rounds=1)
    assert calls == [
        "on_record_start",
        "on_round_start",
        "on_updates",
        "on_round_end",
        "on_record_end",
    ]


def test_callbacks_may_read_every_argument_of_the_loop() -> None:
    arguments = set(inspect.signature(FederatedLoop).parameters)
    assert set(LoopSettings.__annotations__) == arguments | {"history"}
    assert arguments | {"history"} <= set(vars(FederatedLoop()))


def test_fast_dev_run_does_three_rounds_and_writes_nothing(tmp_path: Path) -> None:
    _, _, result = record(loop=quiet(fast_dev_run=True, default_root_dir=tmp_path), rounds=100)
    assert result.rounds == 3
    assert list(tmp_path.iterdir()) == []


def test_a_deciding_detector_can_stop_the_recording() -> None:
    _, history, result = record(detector=KnownMalicious(ids=["q1"]), stop_on_detection=True)
    assert result.detection.malicious == ("q1",)
    assert len(history.rounds()) == result.rounds == 1


def test_stopping_on_detection_needs_a_detector() -> None:
    with pytest.raises(ConfigurationError, match="Expected `stop_on_detection` to be false"):
        record(stop_on_detection=True)


def test_verdict_can_be_handed_to_recover() -> None:
    federation, history, result = record(detector=KnownMalicious(), attack=Scale())
    recovered = quiet().recover(federation, history, TrainFromScratch(), result.detection)
    assert sorted(recovered.ledger.cp()) == ["q0", "q1", "q2", "q3"]


def test_bf16_mixed_computes_in_bfloat16() -> None:
    exact = record(digits(), rounds=1)[1].read_round(0).updates
    rounded = record(digits(), loop=quiet(precision="bf16-mixed"), rounds=1)[1]
    error = float((rounded.read_round(0).updates - exact).norm() / exact.norm())
    assert 1e-4 < error < 5e-2
    assert rounded.manifest.execution["precision"] == "bf16-mixed"


def test_asr_is_measured_where_the_attack_has_a_target() -> None:
    class ToZero(Attack):
        target_label = 0

        def trigger(self, x):
            return torch.full_like(x, 100.0)

    federation = digits()
    layout = federation.layout
    always_zero = torch.zeros(layout.num_parameters)
    layout.unflatten(always_zero)[layout.names[-1]][0] = 1.0
    found = quiet().test(federation, always_zero, attack=ToZero())
    labels = federation.test_dataset.tensors[1]
    assert found == {"ter": pytest.approx(float((labels != 0).float().mean())), "asr": 1.0}
    assert quiet().test(federation, always_zero)["asr"] is None


def test_small_models_compute_on_one_thread() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        plans = [
            record(digits(), loop=quiet(**kwargs), rounds=1)[1].manifest.execution["threads"]
            for kwargs in ({}, {"num_threads": 2})
        ]
        torch.manual_seed(0)
        large = MLP(in_features=64, hidden=(300,))
        federation = Federation.from_data(Digits(num_clients=2), large, batch_size=8)
        plans.append(record(federation, rounds=1)[1].manifest.execution["threads"])
        assert plans == [1, 2, 2]
        assert torch.get_num_threads() == 2, "torch's own setting is left as it was"
    finally:
        torch.set_num_threads(before)


def test_testing_needs_test_data() -> None:
    federation = quadratic_federation()
    with pytest.raises(ConfigurationError, match="test_dataset="):
        quiet().test(federation, torch.zeros(4))


def test_single_client_federation_works() -> None:
    module = MLP(in_features=4, hidden=(2,), num_classes=2)
    samples = TensorDataset(torch.rand(3, 4), torch.tensor([0, 1, 0]))
    federation = Federation([LightningClient("only", module, samples, batch_size=32)], module)
    assert record(federation, rounds=2)[2].rounds == 2
