"""Both executors give the same updates, along the path they say they take."""

import warnings

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedrec import FederatedLoop, LightningClient
from fedrec.exceptions import FedrecWarning
from fedrec.executors import SequentialExecutor, VectorizedExecutor
from fedrec.models import CNN, MLP
from fedrec.parameters import ParameterVector
from fedrec.types import RoundContext


class Net(pl.LightningModule):
    """A small network with a choice of optimiser and an extra layer."""

    def __init__(self, optimizer="sgd", extra=None, steps_kind=None):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), extra or nn.Tanh(), nn.Linear(6, 3))
        self.choice, self.kind = optimizer, steps_kind

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.body(x), y)
        if self.kind == "noise":
            loss = loss * (1 + 0.01 * torch.rand(()))
        if self.kind == "item":
            loss = loss if loss.item() > -1 else None
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        if self.choice == "adam":
            return torch.optim.Adam(self.parameters(), lr=1e-2)
        return torch.optim.SGD(
            self.parameters(), lr=1e-2, momentum=0.9 if self.choice == "momentum" else 0.0
        )


def clients(module, sizes=(20, 20, 20), seed=0, features=(4,), classes=3, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i, size in enumerate(sizes):
        x = torch.randn(size, *features, generator=generator)
        y = torch.randint(classes, (size,), generator=generator)
        made.append(LightningClient(f"c{i}", module, TensorDataset(x, y), **kwargs))
    return made


def both(module, made, executor=None):
    layout = ParameterVector(module)
    weights = layout.flatten(module)
    ctx = RoundContext(
        round=1,
        phase="record",
        client_ids=tuple(c.client_id for c in made),
        global_weights=weights,
        layout=layout,
    )
    executor = executor or VectorizedExecutor()
    plan = executor.plan(made, weights, ctx)
    fast = executor.compute(made, weights, ctx)
    slow = SequentialExecutor().compute(made, weights, ctx)
    assert fast.client_ids == slow.client_ids
    assert torch.equal(fast.num_samples, slow.num_samples)
    return plan, fast, slow


def relative(fast, slow) -> float:
    rows = (fast.updates - slow.updates).norm(dim=1) / slow.updates.norm(dim=1)
    return float(rows.max())


@pytest.mark.parametrize(
    ("optimizer", "kwargs"),
    [
        ("sgd", {"batch_size": 5}),
        ("sgd", {"batch_size": None}),
        ("sgd", {"batch_size": 5, "local_steps": 4}),
        ("sgd", {"batch_size": 8, "local_epochs": 2}),
        ("momentum", {"batch_size": 5, "local_steps": 3}),
        ("adam", {"batch_size": 5}),
        ("adam", {"batch_size": 5, "local_steps": 3}),
    ],
)
@pytest.mark.parametrize("sizes", [(20, 20, 20), (20, 3, 7)])
def test_vectorised_equals_sequential(optimizer: str, kwargs: dict, sizes: tuple) -> None:
    module = Net(optimizer)
    plan, fast, slow = both(module, clients(module, sizes, **kwargs))
    assert plan["path"] == "vmap"
    assert relative(fast, slow) < 1e-5
    assert fast.metrics["loss"] == pytest.approx(slow.metrics["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("module", "features"),
    [(MLP(in_features=16, hidden=(8,)), (1, 4, 4)), (CNN(hidden=10), (1, 28, 28))],
    ids=["mlp", "cnn"],
)
def test_shipped_models_can_be_vectorised(module, features: tuple) -> None:
    made = clients(module, (6, 6), features=features, classes=10, batch_size=3)
    plan, fast, slow = both(module, made)
    assert plan["path"] == "vmap"
    assert relative(fast, slow) < 1e-5


def test_chunks_do_not_matter() -> None:
    module = Net()
    made = clients(module, (20,) * 5, batch_size=4)
    _, fast, slow = both(module, made, VectorizedExecutor(chunk_size=2))
    assert relative(fast, slow) < 1e-5


def test_clients_with_modules_of_their_own_are_sequential() -> None:
    """Equal layers do not make equal modules: a learning rate or a loss weight may differ."""
    made = [clients(Net(), batch_size=5)[i] for i in range(3)]
    with pytest.warns(FedrecWarning, match="do not share a module"):
        plan, fast, slow = both(made[0].module, made)
    assert plan["path"] == "sequential"
    assert torch.equal(fast.updates, slow.updates)


def test_random_data_sets_draw_the_same_in_both() -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + torch.randn_like(x), y

    module = Net()
    made = clients(module, batch_size=5, local_steps=2)
    for client in made:
        client.dataset = Noisy(*client.dataset.tensors)
    plan, fast, slow = both(module, made)
    assert plan["path"] == "vmap"
    assert relative(fast, slow) < 1e-5


def test_frozen_batchnorm_and_dropout_can_be_vectorised() -> None:
    module = Net(extra=nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5)))
    module.body[1].eval()
    plan, fast, slow = both(module, clients(module, batch_size=5))
    assert plan["path"] == "vmap"
    assert relative(fast, slow) < 1e-5


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Net(extra=nn.Dropout(0.5)), "Dropout draws random numbers"),
        (Net(extra=nn.BatchNorm1d(6)), "BatchNorm1d changes its buffers"),
        (Net(steps_kind="noise"), "cannot be vectorised"),
        (Net(steps_kind="item"), "cannot be vectorised"),
    ],
    ids=["dropout", "batchnorm", "rand", "item"],
)
def test_what_cannot_be_vectorised_is_sequential_with_one_warning(module, reason: str) -> None:
    made = clients(module, batch_size=5)
    executor = VectorizedExecutor()
    layout = ParameterVector(module)
    weights = layout.flatten(module)
    ctx = RoundContext(
        round=0, phase="record", client_ids=(), global_weights=weights, layout=layout
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = executor.plan(made, weights, ctx)
        executor.compute(made, weights, ctx)
        executor.compute(made, weights, ctx)
    assert [w.category for w in caught] == [FedrecWarning]
    assert reason in str(caught[0].message)
    assert plan["path"] == "sequential"


def test_auto_chooses_by_a_static_rule_without_a_warning() -> None:
    loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module, kind in [
            (Net(), VectorizedExecutor),
            (Net(extra=nn.Dropout(0.5)), SequentialExecutor),
            (CNN(hidden=10), SequentialExecutor),
        ]:
            made = clients(module, features=(4,))
            assert type(loop.choose_executor(made, module)) is kind


def test_an_error_in_a_client_names_it() -> None:
    class Broken(Net):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("no")

    module = Broken()
    made = clients(module)
    layout = ParameterVector(module)
    weights = layout.flatten(module)
    ctx = RoundContext(
        round=4, phase="record", client_ids=(), global_weights=weights, layout=layout
    )
    with pytest.raises(RuntimeError) as caught:
        SequentialExecutor().compute(made, weights, ctx)
    assert caught.value.__notes__ == ["while client 'c0' trained in round 4"]
