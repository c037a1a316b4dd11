"""Which hooks are called, warned of and refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedrec import Federation, LightningClient
from fedrec.clients import LocalObjective, LocalWork
from fedrec.clients.hooks import (
    CALLED,
    CALLED_ONCE,
    DATAMODULE_HOOKS,
    MODULE_HOOKS,
    NOT_CALLED,
    REFUSED,
    WARNED,
    needs_sequential,
    unwrapped,
)
from fedrec.data import Digits, FederatedDataModule
from fedrec.exceptions import ConfigurationError, FedrecWarning
from fedrec.executors import VectorizedExecutor
from fedrec.loop.checkpoint import lightning_checkpoint
from fedrec.parameters import ParameterVector
from fedrec.types import RoundContext

DATA = TensorDataset(torch.ones(6, 2), torch.ones(6, 1))
PAIRS = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6) % 2)
# What a LightningModule can do, and calls for nobody to override it.
METHODS = {
    *("log", "log_dict", "print", "all_gather", "optimizers", "lr_schedulers", "manual_backward"),
    *("toggle_optimizer", "untoggle_optimizer", "toggled_optimizer", "clip_gradients"),
    *("freeze", "unfreeze", "to_onnx", "to_torchscript", "to_tensorrt", "load_from_checkpoint"),
}


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        return ((self(batch[0]) - batch[1]) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def overriding(name: str, base: type = Net) -> Any:
    return type("Overriding", (base,), {name: lambda self, *args, **kwargs: None})()


def federation(module: nn.Module) -> Federation:
    return Federation(
        [LightningClient("a", module, DATA), LightningClient("b", module, DATA)], module
    )


def context(made: Federation, **given: Any) -> RoundContext:
    weights = made.layout.flatten(made.module)
    return RoundContext(
        round=0,
        phase="record",
        client_ids=made.client_ids,
        global_weights=weights,
        layout=made.layout,
        **given,
    )


def functions(*classes: type) -> set[str]:
    return {
        name
        for one in classes
        for name, value in vars(one).items()
        if not name.startswith("_")
        and not isinstance(value, property)
        and callable(getattr(one, name))
    }


def test_the_tables_name_every_hook_of_lightning() -> None:
    """A new version of Lightning with another hook fails here, not in somebody's numbers."""
    of_modules = functions(ModelHooks, DataHooks, CheckpointHooks, pl.LightningModule)
    assert of_modules - METHODS == set(MODULE_HOOKS)
    of_data = functions(DataHooks, pl.LightningDataModule)
    assert of_data - {"from_datasets", "load_from_checkpoint"} == set(DATAMODULE_HOOKS)


@pytest.mark.parametrize("name", [n for n, how in MODULE_HOOKS.items() if how == REFUSED])
def test_refused_hooks_are_named_before_round_0(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Overriding overrides `{name}`.*HINT"):
        federation(overriding(name))


def test_ignored_hooks_are_named_in_one_warning() -> None:
    names = [n for n, how in MODULE_HOOKS.items() if how == WARNED]
    module = type("Loading", (Net,), {n: lambda self, *args: None for n in names})()
    with pytest.warns(FedrecWarning, match="Loading") as caught:
        federation(module)
    assert len(caught) == 1
    assert all(f"`{name}`" in str(caught[0].message) for name in names)


@pytest.mark.parametrize("name", [n for n, how in MODULE_HOOKS.items() if how == NOT_CALLED])
def test_hooks_of_other_stages_are_left_alone(name: str) -> None:
    module = overriding(name)
    made = federation(module)
    setattr(module, name, None)  # a call would fail
    ctx = context(made)
    made.clients[0].local_update(ctx.global_weights, ctx)
    assert needs_sequential(module) is None


def test_set_up_once_in_lightnings_order() -> None:
    calls: list[Any] = []

    class Made(Net):
        def prepare_data(self):
            calls.append("prepare_data")

        def setup(self, stage):
            calls.append(stage)

        def configure_model(self):
            calls.append("configure_model")
            self.layer = nn.Linear(2, 1, bias=False)

    made = federation(Made())
    assert calls == ["prepare_data", "fit", "configure_model"]
    assert made.layout.num_parameters == 2
    ctx = context(made)
    for client in made.clients:
        client.local_update(ctx.global_weights, ctx)
    assert len(calls) == 3


@pytest.mark.parametrize("name", [n for n, how in DATAMODULE_HOOKS.items() if how == REFUSED])
def test_data_modules_that_change_batches_are_refused(name: str) -> None:
    own = type("Own", (Digits,), {name: lambda self, *args: None})(num_clients=2)
    with pytest.raises(ConfigurationError, match=f"Own overrides `{name}`.*LightningModule"):
        Federation.from_data(own, Net())


def test_hooks_of_a_data_module() -> None:
    calls: list[str] = []

    def note(name: str) -> Any:
        def hook(self: Any, *args: Any) -> Any:
            calls.append("".join([name, *map(str, args)]))
            test = TensorDataset(-PAIRS.tensors[0] - 1, PAIRS.tensors[1])
            loaders = {"train_dataloader": PAIRS, "test_dataloader": test}
            return DataLoader(loaders[name]) if name in loaders else None

        return hook

    hooks = [n for n, how in DATAMODULE_HOOKS.items() if how != REFUSED]
    data = type("Data", (pl.LightningDataModule,), {name: note(name) for name in hooks})()
    datasets = FederatedDataModule.from_datamodule(data, num_clients=2).client_datasets()
    assert sum(map(len, datasets.values())) == 6
    wanted = {"prepare_data", "setupfit", "train_dataloader", "setuptest", "test_dataloader"}
    assert set(calls) == wanted
    assert {n for n, how in DATAMODULE_HOOKS.items() if how == CALLED} == {
        *("prepare_data", "setup", "train_dataloader", "test_dataloader", "val_dataloader")
    }


def test_hooks_of_a_checkpoint(tmp_path: Path) -> None:
    class Counting(Net):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = 3

        def on_load_checkpoint(self, checkpoint):
            self.loaded = checkpoint["mine"]

    module = Counting()
    federation(module)
    path = tmp_path / "model.ckpt"
    path.write_bytes(lightning_checkpoint(module, rounds=1))
    assert Counting.load_from_checkpoint(path, weights_only=True).loaded == 3


def test_reasons_to_compute_clients_one_by_one() -> None:
    harmless = ("configure_optimizers", "training_step", "forward", "on_save_checkpoint")
    harmless = (*harmless, "on_load_checkpoint")
    for name, how in MODULE_HOOKS.items():
        if how == CALLED and name not in harmless:
            assert needs_sequential(overriding(name)) == f"Overriding overrides `{name}`"
        elif how in (CALLED_ONCE, NOT_CALLED):
            assert needs_sequential(overriding(name)) is None
    module = Net()
    module.on_after_backward = lambda: None  # of the object, not of its class
    assert needs_sequential(module) == "Net overrides `on_after_backward`"
    module = Net()
    module.automatic_optimization = False
    assert needs_sequential(module) == "Net uses manual optimization"


def test_the_executor_asks_for_reasons() -> None:
    made = federation(overriding("on_train_batch_end"))
    executor = VectorizedExecutor(warn=False)
    plan = executor.plan(made.clients, context(made).global_weights, context(made))
    assert plan["path"] == "sequential"
    assert plan["refused"] == "Overriding overrides `on_train_batch_end`"


def test_a_scheduler_that_watches_a_metric_is_a_reason() -> None:
    class Watching(Net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "loss"}

    made = federation(Watching())
    executor = VectorizedExecutor(warn=False)
    plan = executor.plan(made.clients, context(made).global_weights, context(made))
    assert plan["path"] == "sequential"
    assert plan["refused"] == "a scheduler watches a metric"


def test_a_compiled_module_is_the_module_in_it() -> None:
    module = Net()
    compiled = torch.compile(module, backend="eager")
    made = federation(compiled)
    assert made.module is made.clients[0].module is module
    assert made.layout == ParameterVector(Net())
    assert unwrapped(compiled) is module
    assert needs_sequential(module) == "Net is compiled"
    # torch.compile of something that is no LightningModule is not Lightning's business.
    other = torch.compile(nn.Linear(1, 1), backend="eager")
    assert unwrapped(other) is other


# --- what cannot be ------------------------------------------------------------------------------


def update(module: Any, **given: Any) -> Any:
    made = federation(module)
    ctx = context(made, **given)
    return made.clients[0].local_update(ctx.global_weights, ctx)


def test_several_optimizers_need_manual_optimization() -> None:
    class Two(Net):
        def configure_optimizers(self):
            return [torch.optim.SGD([p], lr=0.1) for p in self.parameters()]

    with pytest.raises(ConfigurationError, match=r"2 optimizers.*automatic_optimization = False"):
        update(Two())


def test_another_objective_needs_automatic_optimization() -> None:
    module = Net()
    module.automatic_optimization = False
    with pytest.raises(ConfigurationError, match="manual optimization"):
        update(module, work=LocalWork(objective=LocalObjective()))


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"interval": "batch"}, "`interval`.*'batch'"),
        ({"every": 2}, "'every'"),
        ({"scheduler": "constant"}, "is no scheduler of torch.*lr_scheduler_step"),
    ],
)
def test_wrong_schedulers_are_named(config: dict[str, Any], match: str) -> None:
    class Wrong(Net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **config}}

    with pytest.raises(ConfigurationError, match=match):
        update(Wrong())


@pytest.mark.parametrize("monitor", [None, "val_loss"])
def test_a_metric_to_watch_that_is_not_there_is_named(monitor: str | None) -> None:
    class Watching(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": monitor}

    match = "`monitor`" if monitor is None else r"watches 'val_loss'.*logged \['loss'\]"
    with pytest.raises(ConfigurationError, match=match):
        update(Watching())


def test_a_closure_that_is_not_called_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="optimizer_step did not call the closure"):
        update(overriding("optimizer_step"))


@pytest.mark.parametrize("output", [{"other": 1}, "loss", torch.ones(2)])
def test_what_is_no_loss_is_refused(output: Any) -> None:
    module = Net()
    module.training_step = lambda batch, batch_idx: output
    with pytest.raises(ConfigurationError, match=r"training_step to return a scalar.*HINT"):
        update(module)


def take_an_iterator(self: Any, dataloader_iter: Any) -> Any:
    return next(dataloader_iter)


def replace_layer(self: Any) -> None:
    self.layer = nn.Linear(2, 1)


def turn_manual(self: Any) -> None:
    self.automatic_optimization = self.current_epoch == 0


@pytest.mark.parametrize(
    ("methods", "match"),
    [
        ({"training_step": take_an_iterator}, "takes `dataloader_iter`"),
        (
            {"training_step": lambda self, batch, i: self(batch[0]).mean().detach()},
            "does not depend on any parameter that is trained. HINT: look for",
        ),
        (
            {"training_step": lambda self, batch, i: self.logger.experiment.add_scalar("x", i)},
            "reads `logger.experiment`, but a module has no logger",
        ),
        ({"on_train_start": replace_layer}, r"in the place of `layer\.weight`, `layer\.bias`"),
        ({"on_train_epoch_start": turn_manual}, "changes `automatic_optimization` in the middle"),
    ],
    ids=["iterator", "detached", "logger", "replaced", "manual"],
)
def test_what_local_training_cannot_do_is_named(methods: dict[str, Any], match: str) -> None:
    module = type("Odd", (Net,), methods)()
    with pytest.raises(ConfigurationError, match=match):
        update(module, work=LocalWork(local_epochs=2))


@pytest.mark.parametrize(
    "weight", [torch.zeros(1, 1).expand(1, 2), torch.empty(1, 2, device="meta")]
)
def test_parameters_without_memory_of_their_own_are_refused(weight: torch.Tensor) -> None:
    module = Net()
    module.layer.weight = nn.Parameter(weight)
    with pytest.raises(ConfigurationError, match=r"memory of its own, but got \['layer\.weight'\]"):
        ParameterVector(module)


def test_what_was_frozen_cannot_be_trained() -> None:
    class Thawing(Net):
        def __init__(self):
            super().__init__()
            self.layer.bias.requires_grad_(False)

        def on_train_start(self):
            self.layer.bias.requires_grad_(True)

        def on_train_batch_end(self, *args):
            pass

    module = Thawing()
    with pytest.raises(ConfigurationError, match=r"`layer\.bias` of Thawing is trained now"):
        update(module)
    assert not module.layer.bias.requires_grad


def test_lazy_layers_that_cannot_be_tried_are_refused() -> None:
    class Lazy(Net):
        def __init__(self):
            super().__init__()
            self.layer, self.spare = nn.LazyLinear(1), nn.LazyLinear(1)

    with pytest.raises(ConfigurationError, match=r"`spare\.weight` of Lazy is lazy"):
        federation(Lazy())
    module = Lazy()
    module.training_step = lambda batch, batch_idx: 1 / 0
    with pytest.raises(ConfigurationError, match=r"ZeroDivisionError.*HINT: call the module once"):
        federation(module)


def test_lazy_layers_are_what_they_would_become() -> None:
    class Lazy(Net):
        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.LazyLinear(1))

    module = Lazy()
    clients = [LightningClient("a", module, DATA)]
    made = Federation(clients, module, buffers="average")
    assert type(module.layer[0]) is nn.Linear
    assert [module.layer[0].in_features, module.layer[1].num_features] == [2, 3]
    assert module.layer[1].training
    assert torch.equal(module.layer[1].running_mean, torch.zeros(3))
    assert made.layout.num_parameters == 9 + 6 + 4


def test_local_training_leaves_no_trace() -> None:
    class Remembering(Net):
        def __init__(self):
            super().__init__()
            self.steps, self.made = 0, torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

        def training_step(self, batch, batch_idx):
            self.steps += 1
            return super().training_step(batch, batch_idx) * self.steps

        def configure_optimizers(self):
            self.schedule = torch.optim.lr_scheduler.StepLR(self.made, 1)
            return [self.made], [self.schedule]

    module = Remembering()
    made = federation(module)
    ctx = context(made)
    first, again = (made.clients[0].local_update(ctx.global_weights, ctx).update for _ in "ab")
    assert torch.equal(first, again)
    assert module.steps == 0
    assert not module.made.state
    assert not hasattr(module, "schedule")
    assert module.made.param_groups[0]["lr"] == 0.1
    assert all(p.grad is None for p in module.parameters())


def test_nothing_is_said_about_a_plain_module() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federation(Net())
