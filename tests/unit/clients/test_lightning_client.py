"""LightningClient: what is returned as an update."""

from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fedrec import LightningClient
from fedrec.clients import LocalObjective, LocalWork
from fedrec.clients.batches import batch_indices
from fedrec.exceptions import ConfigurationError
from fedrec.parameters import ParameterVector
from fedrec.types import RoundContext


class Linear(pl.LightningModule):
    """Least squares with a choice of optimiser."""

    def __init__(self, optimizer="sgd", lr=0.1, scheduler=None):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.choice, self.lr, self.scheduler = optimizer, lr, scheduler

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = ((self(x) - y) ** 2).mean()
        self.log("loss", loss)
        self.log_dict({"epochs": float(self.trainer.max_epochs), "device_ok": 1.0})
        return {"loss": loss}

    def configure_optimizers(self):
        kinds = {
            "sgd": lambda: torch.optim.SGD(self.parameters(), lr=self.lr),
            "momentum": lambda: torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9),
            "decay": lambda: torch.optim.SGD(self.parameters(), lr=self.lr, weight_decay=0.1),
            "adam": lambda: torch.optim.Adam(self.parameters(), lr=self.lr),
            "groups": lambda: torch.optim.SGD(
                [
                    {"params": [self.layer.weight], "lr": 0.1},
                    {"params": [self.layer.bias], "lr": 0.3},
                ]
            ),
            "lbfgs": lambda: torch.optim.LBFGS(self.parameters()),
        }
        optimizer = kinds[self.choice]()
        if self.scheduler is None:
            return optimizer
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": self.scheduler},
        }


def data(size: int = 10, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(size, 3, generator=generator), torch.randn(size, 2, generator=generator)
    )


def ask(client: LightningClient, weights: torch.Tensor, **kwargs):
    layout = ParameterVector(client.module)
    ctx = RoundContext(
        round=kwargs.pop("round", 0),
        phase="record",
        client_ids=(client.client_id,),
        global_weights=weights,
        layout=layout,
        **kwargs,
    )
    return client.local_update(weights, ctx)


def draw(**kwargs) -> list[np.ndarray]:
    """Draw the batches of client `a` with ten samples in round 0."""
    given = {
        "seed": 0,
        "round": 0,
        "client_id": "a",
        "num_samples": 10,
        "batch_size": 4,
        "local_steps": None,
        "local_epochs": None,
    }
    return batch_indices(**{**given, **kwargs})


def weights_of(module: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    return 0.3 * torch.randn(ParameterVector(module).num_parameters)


def gradient(module: nn.Module, w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The gradient of the mean squared error, by hand: weight (2, 3), then bias (2,)."""
    a, b = w[:6].reshape(2, 3), w[6:]
    residual = x @ a.T + b - y
    return np.concatenate([(residual.T @ x).ravel(), residual.sum(0)]) * 2 / residual.size


def test_one_step_of_plain_sgd_returns_the_full_batch_gradient() -> None:
    module, samples = Linear(), data()
    client, w = LightningClient("a", module, samples), weights_of(module)
    x, y = (t.double().numpy() for t in samples.tensors)
    expected = gradient(module, w.double().numpy(), x, y)
    np.testing.assert_allclose(ask(client, w).update.numpy(), expected, rtol=1e-5, atol=1e-7)


def test_learning_rate_does_not_scale_one_step() -> None:
    one, other = Linear(lr=0.1), Linear(lr=7.0)
    w = weights_of(one)
    first = ask(LightningClient("a", one, data()), w).update
    assert torch.equal(first, ask(LightningClient("a", other, data()), w).update)


def test_batch_is_the_keyed_draw() -> None:
    module, samples = Linear(), data()
    client, w = LightningClient("a", module, samples, batch_size=4), weights_of(module)
    indices = draw(seed=5, round=2, local_steps=1)[0]
    assert len(set(indices.tolist())) == 4
    x, y = (t[indices].double().numpy() for t in samples.tensors)
    expected = gradient(module, w.double().numpy(), x, y)
    found = ask(client, w, seed=5, round=2).update.numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    assert not np.allclose(ask(client, w, seed=5, round=3).update.numpy(), expected)
    fresh = ask(client, w, seed=5, round=2, batch_policy="fresh").update.numpy()
    assert not np.allclose(fresh, expected)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "decay", "adam"])
def test_several_steps_return_what_was_subtracted_over_the_learning_rate(optimizer: str) -> None:
    """Against the same optimiser run in float64 from the start."""
    module, samples, lr = Linear(optimizer, lr=1e-3), data(), 1e-3
    client = LightningClient("a", module, samples, batch_size=4, local_steps=3)
    w = weights_of(module)
    found = ask(client, w).update.double()
    reference = Linear(optimizer, lr=lr).double()
    layout = ParameterVector(module)
    for name, value in layout.unflatten(w.double()).items():
        reference.get_parameter(name).data = value.clone()
    steps = reference.configure_optimizers()
    batches = draw(local_steps=3)
    for indices in batches:
        x, y = (t[indices].double() for t in samples.tensors)
        steps.zero_grad()
        ((reference(x) - y) ** 2).mean().backward()
        steps.step()
    after = torch.cat([reference.get_parameter(n).detach().reshape(-1) for n in layout.names])
    expected = (w.double() - after) / lr
    # A float32 difference of weights would be off by 1e-4 here.
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_local_epochs_pass_over_all_samples() -> None:
    batches = draw(local_epochs=2)
    assert [len(b) for b in batches] == [4, 4, 2, 4, 4, 2]
    assert sorted(np.concatenate(batches[:3]).tolist()) == list(range(10))


def test_several_steps_share_a_permutation_until_it_is_used_up() -> None:
    batches = draw(local_steps=3)
    assert len(set(np.concatenate(batches[:2]).tolist())) == 8
    assert len(set(batches[2].tolist())) == 4


def test_batch_size_is_at_most_the_number_of_samples() -> None:
    batches = draw(num_samples=3, batch_size=32, local_steps=2)
    assert [b.tolist() for b in batches] == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize(("interval", "expected"), [("step", 1 + 0.5 + 0.25), ("epoch", 3.0)])
def test_schedulers_step_within_the_round(interval: str, expected: float) -> None:
    """A constant gradient makes the update the sum of the learning-rate factors."""

    class Constant(Linear):
        def training_step(self, batch, batch_idx):
            return self.layer.weight.sum() + self.layer.bias.sum()

    module = Constant(scheduler=interval)
    client = LightningClient("a", module, data(), local_steps=3)
    update = ask(client, torch.zeros(8)).update
    torch.testing.assert_close(update, torch.full((8,), expected))


def test_groups_with_different_rates_need_an_explicit_local_lr() -> None:
    module, w = Linear("groups"), torch.zeros(8)
    with pytest.raises(ConfigurationError, match="local_lr="):
        ask(LightningClient("a", module, data()), w)
    found = ask(LightningClient("a", module, data(), local_lr=0.1), w).update
    plain = ask(LightningClient("a", Linear(), data()), w).update
    torch.testing.assert_close(found[:6], plain[:6])
    torch.testing.assert_close(found[6:], 3 * plain[6:])


def test_logging_and_trainer_work_without_a_trainer() -> None:
    module = Linear()
    sent = ask(LightningClient("a", module, data()), weights_of(module))
    assert sent.metrics["epochs"] == 1.0
    assert sent.metrics["loss"] > 0
    assert "log" not in vars(module)
    assert module._trainer is None


def test_work_changes_the_number_of_steps_for_one_call() -> None:
    module = Linear()
    client, w = LightningClient("a", module, data(), batch_size=2), weights_of(module)
    three = LightningClient("a", module, data(), batch_size=2, local_steps=3)
    found = ask(client, w, work=LocalWork(local_steps=3)).update
    assert torch.equal(found, ask(three, w).update)


def test_work_changes_everything_it_names_and_nothing_else() -> None:
    module = Linear(scheduler="step")
    client = LightningClient("a", module, data(), batch_size=2, local_epochs=2)
    w = weights_of(module)
    work = LocalWork(local_epochs=1, batch_size=4, lr=0.02)
    other = LightningClient("a", Linear(lr=0.02), data(), batch_size=4, local_epochs=1)
    assert torch.equal(ask(client, w, work=work).update, ask(other, w).update)
    # A learning rate that is given has no schedule, and scales the update.
    assert client.num_local_steps(SimpleNamespace(work=work)) == 3
    assert client.num_local_steps(SimpleNamespace(work=LocalWork(lr=0.02))) == 10
    # Fewer steps than there are epochs otherwise.
    one = LightningClient("a", Linear(), data(), batch_size=2)
    assert torch.equal(ask(client, w, work=LocalWork(1)).update, ask(one, w).update)


def test_another_objective_is_minimised_in_its_place() -> None:
    class Uphill(LocalObjective):
        def loss(self, module, batch, step):
            return -super().loss(module, batch, step)

        def is_done(self, module, batch):
            return True

    module = Linear()
    client = LightningClient("a", module, data(), batch_size=2, local_steps=3)
    w = weights_of(module)
    one = LightningClient("a", module, data(), batch_size=2)
    sent = ask(client, w, work=LocalWork(objective=Uphill())).update
    torch.testing.assert_close(sent, -ask(one, w).update)  # stopped after a step


def test_any_map_style_data_set_works() -> None:
    class Samples(Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, i):
            return tuple(t[i] for t in data().tensors)

    module = Linear()
    w = weights_of(module)
    plain = ask(LightningClient("a", module, data(), batch_size=4), w).update
    other = ask(LightningClient("a", module, Samples(), batch_size=4), w).update
    torch.testing.assert_close(plain, other)


def test_frozen_parameters_do_not_travel() -> None:
    module = Linear()
    module.layer.bias.requires_grad_(False)
    assert ask(LightningClient("a", module, data()), torch.zeros(6)).update.shape == (6,)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"local_steps": 0}, "local_steps"),
        ({"local_steps": 1, "local_epochs": 1}, "local_epochs"),
        ({"local_lr": 0.0}, "local_lr"),
    ],
)
def test_bad_arguments_are_named(kwargs: dict, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        LightningClient("a", Linear(), data(), **kwargs)


def test_modules_that_cannot_train_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="training_step"):
        LightningClient("a", nn.Linear(1, 1), data())
    with pytest.raises(ConfigurationError, match="no data"):
        LightningClient("a", Linear(), TensorDataset(torch.zeros(0, 3)))
    with pytest.raises(ConfigurationError, match="first-order"):
        ask(LightningClient("a", Linear("lbfgs"), data()), torch.zeros(8))
    with pytest.raises(ConfigurationError, match="positive"):
        ask(LightningClient("a", Linear(lr=0.0), data()), torch.zeros(8))


class Dropping(Linear):
    """Draws random numbers in every step."""

    def forward(self, x):
        return self.layer(nn.functional.dropout(x, 0.5, training=self.training))


def test_dropout_is_a_function_of_seed_round_and_client() -> None:
    module = Dropping()
    client, w = LightningClient("a", module, data()), weights_of(module)
    first = ask(client, w, seed=1, round=2).update.clone()
    torch.rand(7)  # somebody else draws
    state = torch.get_rng_state()
    assert torch.equal(first, ask(client, w, seed=1, round=2).update)
    assert torch.equal(state, torch.get_rng_state()), "the global generator is left alone"
    assert not torch.equal(first, ask(client, w, seed=1, round=3).update)
    assert not torch.equal(
        first, ask(LightningClient("b", module, data()), w, seed=1, round=2).update
    )


def test_module_trains_in_the_mode_it_was_handed_over_in() -> None:
    module = Dropping().eval()
    plain, w = Linear(), weights_of(module)
    found = ask(LightningClient("a", module, data()), w).update
    assert torch.equal(found, ask(LightningClient("a", plain, data()), w).update)
    assert not module.training


def test_training_step_without_a_batch_index_and_trainer_in_configure_optimizers() -> None:
    class Short(Linear):
        def training_step(self, batch):
            return super().training_step(batch, 0)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1 * self.trainer.max_epochs)

    w = weights_of(Short())
    found = ask(LightningClient("a", Short(), data()), w).update
    assert torch.equal(found, ask(LightningClient("a", Linear(), data()), w).update)


def test_optimizers_over_foreign_parameters_are_refused() -> None:
    class Foreign(Linear):
        def configure_optimizers(self):
            return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(5))], lr=0.1)

    with pytest.raises(ConfigurationError, match=r"shapes \[\(5,\)\]"):
        ask(LightningClient("a", Foreign(), data()), torch.zeros(8))


def test_iterable_data_sets_are_refused() -> None:
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    with pytest.raises(ConfigurationError, match="map-style"):
        LightningClient("a", Linear(), Stream())
