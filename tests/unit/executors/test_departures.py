"""A run whose fast path stops being right is computed sequentially from that round on."""

import json
import random
import warnings

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedrec import FederatedLoop, Federation, LightningClient
from fedrec.aggregators import FedAvg
from fedrec.exceptions import FedrecWarning
from fedrec.executors import VectorizedExecutor
from fedrec.federation import ClientSampler
from fedrec.history import LMDBHistory, MemoryHistory, export_history, forget, import_history
from fedrec.recoverers import TrainFromScratch

CHANGE = 4
KINDS = {
    "flooding": "`abs` of a value of the whole batch is not linear in it",
    "clamp": "`clamp` of a value of the whole batch is not linear in it",
    "ignored": "its loss leaves out samples with label -1",
    "item": "it reads the value of a tensor",
    "numpy": "it reads the value of a tensor",
    "draw": "it draws random numbers",
    "numpy draw": "it draws random numbers",
    "python draw": "it draws random numbers",
    "counter": "it changes calls",
    "hook": "it hooks into a gradient",
    "parameter hook": "net.weight has a hook",
    "centred": "`sub` lets a value of the whole batch change single samples",
    "position": "`mul` tells samples apart by their position in the batch",
    "gradient": "it computes a gradient itself",
    "own backward": "it has a backward pass of its own (ReversedBackward)",
    "penalty": "net.weight is used outside of its layer",
    "skip": "training_step returned None",
    "logged": "it reads what it has logged",
    "optimizers": "it looks at its optimizers",
    "weights": "it changes its weights itself",
}


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Changing(pl.LightningModule):
    """Does something else from a round on, which it is told by a sample's last feature."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.net = nn.Linear(4, 3)
        self.calls = 0
        self.now = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        if not self.now:
            return functional.cross_entropy(self.net(x), y)
        if self.kind == "centred":
            x = x - x.mean(0)
        logits = self.net(x)
        if self.kind == "own backward":
            logits = Reversed.apply(logits)
        if self.kind == "hook":
            logits.register_hook(lambda g: 2 * g)
        if self.kind == "ignored":
            y = torch.where(y == 0, -1, y)
        loss = functional.cross_entropy(logits, y, ignore_index=-1)
        if self.kind == "flooding":
            loss = (loss - 1.0).abs() + 1.0
        if self.kind == "clamp":
            loss = loss.clamp(max=1.05)
        if self.kind == "item":
            loss = loss * (2 if loss.item() > 1 else 1)
        if self.kind == "numpy":
            loss = loss * float(y.numpy().mean())
        if self.kind == "draw":
            loss = loss * torch.rand(())
        if self.kind == "numpy draw":
            loss = loss * np.random.rand()  # noqa: NPY002
        if self.kind == "python draw":
            loss = loss * random.random()
        if self.kind == "counter":
            self.calls += 1
        if self.kind == "position":
            each = functional.cross_entropy(logits, y, reduction="none")
            loss = (each * torch.arange(len(y))).mean()
        if self.kind == "logged":
            self.log("loss", loss)
            loss = loss / self.trainer.callback_metrics.get("loss", 1.0)
        if self.kind == "optimizers":
            loss = loss * (1 + len(self.trainer.optimizers))
        if self.kind == "weights":
            with torch.no_grad():
                self.net.weight.mul_(0.5)
        if self.kind == "gradient":
            (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
            loss = loss + gradient.square().sum()
        if self.kind == "penalty":
            loss = loss + self.net.weight.square().sum()
        return None if self.kind == "skip" else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Later(VectorizedExecutor):
    """Tells the module when to change, and how."""

    dies = None

    def compute(self, clients, global_weights, ctx):
        module = clients[0].module
        module.now = ctx.round >= CHANGE
        if ctx.round == self.dies:
            raise RuntimeError("the power went off")
        if module.now and module.kind == "parameter hook" and not module.net.weight._backward_hooks:
            module.net.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return super().compute(clients, global_weights, ctx)


class LaterSequential(Later):
    def __init__(self):
        super().__init__(path="sequential")


def federation(kind, module=Changing, sizes=(12, 12, 12, 12), **local):
    torch.manual_seed(1)
    module = module(kind)
    clients = []
    for i, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(i)
        data = TensorDataset(torch.randn(size, 4, generator=generator), torch.arange(size) % 3)
        clients.append(LightningClient(f"c{i}", module, data, batch_size=4, **local))
    return Federation(clients, module)


def record(kind, executor, history=None, max_rounds=8, resume=False, seed=0, sampler=None, **made):
    loop = FederatedLoop(executor=executor, logger=False, enable_progress_bar=False, seed=seed)
    history = MemoryHistory() if history is None else history
    arguments = {"max_rounds": max_rounds, "server_lr": 0.1, "resume": resume}
    arguments["sampler"] = sampler
    return loop.record(federation(kind, **made), FedAvg(), history, **arguments), history, loop


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_regime_is_seen_in_its_round(kind):
    executor = Later(path="grouped", audit=0)
    with pytest.warns(FedrecWarning, match=f"From round {CHANGE} on") as caught:
        result, history, _ = record(kind, executor)
    assert len(caught) == 1
    departure = result.execution["departure"]
    assert departure["round"] == CHANGE
    assert KINDS[kind] in departure["reason"]
    slow, slowly, _ = record(kind, LaterSequential())
    assert "departure" not in slow.execution
    for t in range(8):
        fast, reference = history.read_round(t), slowly.read_round(t)
        assert (fast.departure is None) == (t < CHANGE)
        difference = (fast.updates - reference.updates).norm(dim=1)
        assert bool((difference <= 1e-5 * reference.updates.norm(dim=1) + 1e-6).all())


@pytest.mark.parametrize("steps", [1, 2])
def test_stacked_weights_that_a_step_changes_are_no_longer_those_of_the_server(steps):
    with pytest.warns(FedrecWarning, match="it changes its weights itself"):
        _, history, _ = record("weights", Later(path="vmap", audit=0), local_steps=steps)
    _, slowly, _ = record("weights", LaterSequential(), local_steps=steps)
    for t in range(8):
        fast, reference = history.read_round(t), slowly.read_round(t)
        assert torch.allclose(fast.global_weights, reference.global_weights, rtol=1e-5, atol=1e-6)
        assert torch.allclose(fast.updates, reference.updates, rtol=1e-4, atol=1e-5)


class Slower(Changing):
    """Has another learning rate, and later another optimiser, in later rounds."""

    round = 0

    def configure_optimizers(self):
        lr = 0.1 / (1 + self.round)
        if self.round >= CHANGE:
            return torch.optim.Adam(self.parameters(), lr=lr)
        return torch.optim.SGD(self.parameters(), lr=lr)


class TellsRound(VectorizedExecutor):
    def compute(self, clients, global_weights, ctx):
        clients[0].module.round = ctx.round
        return super().compute(clients, global_weights, ctx)


def test_the_optimizer_is_that_of_the_round():
    """The update is the gradient times learning rate over `local_lr`: 1, 1/2, 1/3 and so on."""
    _, history, _ = record("plain", TellsRound(), module=Slower, local_lr=0.1)
    _, slowly, _ = record("plain", TellsRound(path="sequential"), module=Slower, local_lr=0.1)
    for t in range(8):
        fast, reference = history.read_round(t), slowly.read_round(t)
        assert fast.departure is None
        assert torch.allclose(fast.updates, reference.updates, rtol=1e-4, atol=1e-6)


class TellsClients(VectorizedExecutor):
    """Changes something of the third client, from a round on."""

    change = None

    def compute(self, clients, global_weights, ctx):
        if ctx.round == CHANGE:
            type(self).change(clients[2])
        return super().compute(clients, global_weights, ctx)


def other_labels(client):
    client.dataset.tensors[1].zero_()


def other_tensors(client):
    client.dataset.tensors = (-client.dataset.tensors[0], client.dataset.tensors[1])


def other_rate(client):
    client.local_lr = 0.3


@pytest.mark.parametrize("change", [other_labels, other_tensors, other_rate])
def test_clients_that_change_are_those_of_the_round(change):
    class Tells(TellsClients):
        pass

    Tells.change = staticmethod(change)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedrecWarning)
        fast, history, _ = record("plain", Tells(audit=0), local_lr=0.1)
    _, slowly, _ = record("plain", Tells(path="sequential"), local_lr=0.1)
    for t in range(8):
        one, reference = history.read_round(t), slowly.read_round(t)
        assert torch.allclose(one.updates, reference.updates, rtol=1e-4, atol=1e-6)
    departed = "departure" in fast.execution
    assert departed == (change is other_rate)


def test_a_single_step_is_the_last_one():
    class Last(Changing):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (1 + self.trainer.is_last_batch)

    _, history, _ = record("plain", VectorizedExecutor(path="grouped"), module=Last, max_rounds=1)
    _, once, _ = record("plain", VectorizedExecutor(path="grouped"), max_rounds=1)
    assert torch.allclose(history.read_round(0).updates, 2 * once.read_round(0).updates)


class OverLength(Changing):
    """Divides by twice the number of samples, from a round on."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        total = functional.cross_entropy(self.net(x), y, reduction="sum")
        return total / ((2 if self.now else 1) * len(x))


def test_clients_that_are_computed_with_others_are_audited_first():
    """Whose batch has a size of its own is right whatever the others do to each other."""
    for seed in range(5):
        with pytest.warns(FedrecWarning, match=f"From round {CHANGE} on"):
            record("plain", Later(), module=OverLength, sizes=(12, 12, 2), seed=seed)


class Wrong(VectorizedExecutor):
    """Computes the update of one client wrongly, from a round on."""

    def _compute_together(self, data, clients, global_weights, ctx):
        sent = super()._compute_together(data, clients, global_weights, ctx)
        if ctx.round >= CHANGE:
            sent.updates[[c.client_id for c in clients].index("c2")] *= 1.1
        return sent


def test_an_audited_difference_makes_the_run_sequential():
    """Which client is audited is drawn: with all four, the wrong one is found at once."""
    with pytest.warns(FedrecWarning, match="client 'c2' by 0.1 of its size"):
        result, _, _ = record("plain", Wrong(audit=4))
    departure = dict(result.execution["departure"])
    assert departure.pop("difference") == pytest.approx(0.1, rel=1e-4)
    reason = "updates differ from the sequential ones"
    assert departure == {"round": CHANGE, "client": "c2", "reason": reason}
    slow, _, _ = record("plain", "sequential")
    assert torch.allclose(result.global_weights, slow.global_weights, rtol=1e-5, atol=1e-6)


def test_one_of_twenty_updates_is_audited_and_of_clients_that_are_asked_alone_none():
    class Counts(VectorizedExecutor):
        audited = 0

        def _difference(self, *args):
            self.audited += 1
            return super()._difference(*args)

    def audited(num_clients, rounds):
        executor = Counts()
        sampler = ClientSampler(num_clients=num_clients)
        record("plain", executor, max_rounds=rounds, sampler=sampler)
        return executor.audited

    assert audited(1, 100) == 0
    # 20 of 200 rounds, with a standard deviation of 4.2.
    assert 3 <= audited(2, 200) <= 37
    assert audited(4, 8) == 8  # all of them


@pytest.mark.parametrize("seed", range(3))
def test_audits_start_from_the_global_weights_whatever_was_audited_before(seed):
    """Audits of c1 and c3, which take three steps, leave other weights in the module."""
    base = federation("plain")
    for client, size in zip(base.clients, (12, 4, 12, 4), strict=True):
        client.batch_size, client.local_steps, client.local_epochs = size, None, 1
    loop = FederatedLoop(
        executor=Wrong(audit=4), logger=False, enable_progress_bar=False, seed=seed
    )
    with pytest.warns(FedrecWarning, match="client 'c2' by 0.1 of its size"):
        result = loop.record(base, FedAvg(), MemoryHistory(), max_rounds=8, server_lr=0.1)
    assert result.execution["path"] == "grouped and vmap"
    assert result.execution["departure"]["round"] == CHANGE


def test_what_happens_in_the_audit_alone_ends_the_fast_path_too():
    """Of one client's four samples the module makes something else than of all sixteen."""

    class Small(Changing):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if self.now and len(batch[1]) == 4:
                self.calls += 1
                loss = loss * len(self.trainer.optimizers)
            return loss

    base = federation("plain")
    base.module.__class__ = Small
    loop = FederatedLoop(executor=Later(), logger=False, enable_progress_bar=False)
    with pytest.warns(FedrecWarning, match="it looks at its optimizers"):
        result = loop.record(base, FedAvg(), MemoryHistory(), max_rounds=8, server_lr=0.1)
    assert result.execution["departure"]["round"] == CHANGE
    assert base.module.calls == 0


def test_one_client_a_round_is_drawn_by_seed():
    asked = []

    class Noting(VectorizedExecutor):
        def _difference(self, client, update, global_weights, ctx):
            asked.append((ctx.round, client.client_id))
            return super()._difference(client, update, global_weights, ctx)

    record("plain", Noting(), max_rounds=30)
    first = list(asked)
    assert [t for t, _ in first] == list(range(30))
    assert {c for _, c in first} == {"c0", "c1", "c2", "c3"}
    asked.clear()
    record("plain", Noting(), max_rounds=30)
    assert asked == first
    asked.clear()
    record("plain", Noting(audit=0))
    assert asked == []


def test_a_resumed_recording_goes_on_sequentially(tmp_path):
    with pytest.warns(FedrecWarning):
        whole, _, _ = record("flooding", Later(path="grouped"))
    path = tmp_path / "history"

    executor = Later(path="grouped")
    executor.dies = CHANGE + 2
    with (
        LMDBHistory(path) as history,
        pytest.warns(FedrecWarning),
        pytest.raises(RuntimeError, match="power"),
    ):
        record("flooding", executor, history)
    with LMDBHistory(path) as history:
        assert len(history.rounds()) == CHANGE + 2
        resumed, _, _ = record("flooding", Later(path="grouped"), history, resume=True)
        assert resumed.execution["departure"] == whole.execution["departure"]
        assert torch.equal(resumed.global_weights, whole.global_weights)
        assert history.read_round(7).departure == whole.execution["departure"]


def test_training_from_scratch_without_exclusion_gives_the_same_bits():
    with pytest.warns(FedrecWarning):
        recorded, history, loop = record("flooding", Later(path="grouped"))
    with pytest.warns(FedrecWarning):
        again = loop.recover(federation("flooding"), history, TrainFromScratch(), exclude=[])
    assert torch.equal(again.global_weights, recorded.global_weights)
    assert again.execution["departure"] == recorded.execution["departure"]


def test_histories_keep_it_through_export_and_forgetting(tmp_path):
    path = tmp_path / "history"
    with LMDBHistory(path) as history, pytest.warns(FedrecWarning):
        recorded, _, _ = record("plain", Wrong(audit=4), history)
    departure = recorded.execution["departure"]
    export_history(path, tmp_path / "rounds")
    import_history(tmp_path / "rounds", tmp_path / "again")
    with LMDBHistory(tmp_path / "again") as history:
        assert history.read_round(CHANGE).departure == departure
        assert history.read_round(CHANGE - 1).departure is None
    forget(path, ["c2"])
    with LMDBHistory(path) as history:
        left = history.read_round(CHANGE).departure
    assert left == {**departure, "client": None, "difference": None}
    json.dumps(left)


def test_attributes_that_a_callback_sets_between_rounds_are_no_change():
    module_of = {}

    class Tells(VectorizedExecutor):
        def compute(self, clients, global_weights, ctx):
            clients[0].module.round = ctx.round
            module_of["module"] = clients[0].module
            return super().compute(clients, global_weights, ctx)

    result, _, _ = record("plain", Tells())
    assert "departure" not in result.execution
    assert result.execution["path"] == "grouped"
    assert module_of["module"].round == 7
