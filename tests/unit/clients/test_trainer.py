"""What `self.trainer` and `self.log` are in local training."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import TensorDataset

from fedrec import Federation, LightningClient
from fedrec.clients.trainer import LocalTrainer, unknown_attributes
from fedrec.exceptions import ConfigurationError, FedrecError, FedrecWarning
from fedrec.types import RoundContext

DATA = TensorDataset(torch.arange(4.0)[:, None], torch.tensor([0, 1, 1, 1]))


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        self.do(batch, batch_idx)
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def do(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def metrics(module: Any, **local: Any) -> Any:
    client = LightningClient("a", module, DATA, **local)
    made = Federation([client], module)
    weights = made.layout.flatten(module)
    ctx = RoundContext(
        round=0, phase="record", client_ids=("a",), global_weights=weights, layout=made.layout
    )
    return client.local_update(weights, ctx).metrics


def test_other_attributes_are_refused_by_name() -> None:
    trainer = LocalTrainer(Net())
    with pytest.raises(FedrecError, match=r"no `trainer\.datamodule`.*HINT"):
        _ = trainer.datamodule
    with pytest.raises(AttributeError, match="fit_loop"):
        _ = trainer.fit_loop
    assert not hasattr(trainer, "datamodule")
    assert getattr(trainer, "profiler", None) is None
    trainer.mine = 3
    assert trainer.mine == 3


def test_attributes_that_the_module_reads_are_named_before_round_0() -> None:
    class Curious(Net):
        def do(self, batch, batch_idx):
            trainer = self.trainer
            if trainer.max_epochs > 1:
                trainer.profiler.start("x")
            return [self.trainer.limit_val_batches for _ in batch]

        def validation_step(self, batch, batch_idx):
            return self.trainer.num_test_batches  # is not called

        def spare(self):
            return self.trainer.ckpt_loader  # nor is this

        @property
        def width(self):
            return self.trainer.datamodule.width

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1 if self.width else 1)

    assert unknown_attributes(Curious()) == ["datamodule", "limit_val_batches", "profiler"]
    module = Curious()
    with pytest.warns(
        FedrecWarning, match=r"Curious reads `self\.trainer\.datamodule`, "
    ) as caught:
        Federation([LightningClient("a", module, DATA)], module)
    assert len(caught) == 1
    assert unknown_attributes(Net()) == []


@pytest.mark.parametrize(
    ("value", "what"),
    [(torch.ones(2), r"a tensor of shape \(2,\)"), ("high", "str"), ({"a": 1}, "dict")],
)
def test_what_cannot_be_logged_is_named(value: Any, what: str) -> None:
    class Logging(Net):
        def do(self, batch, batch_idx):
            self.log("score", value)

    with pytest.raises(ConfigurationError, match=rf"self\.log\('score', \.\.\.\).*{what}.*HINT"):
        metrics(Logging())


def test_a_metric_of_several_numbers_is_named() -> None:
    class Logging(Net):
        def __init__(self):
            super().__init__()
            self.recall = torchmetrics.Recall(task="multiclass", num_classes=2, average=None)

        def do(self, batch, batch_idx):
            self.recall(self(batch[0]), batch[1])
            self.log("recall", self.recall)

    with pytest.raises(ConfigurationError, match=r"'recall'.*shape"):
        metrics(Logging())


def test_reductions_are_checked() -> None:
    class Logging(Net):
        def do(self, batch, batch_idx):
            self.log("score", 1.0, on_epoch=True, reduce_fx="median")

    with pytest.raises(ConfigurationError, match=r"reduce_fx.*'median'"):
        metrics(Logging())


def test_metric_objects_are_computed_over_the_epoch_and_reset() -> None:
    """Class 0 is right once in 4; the metric knows nothing of another client's samples."""

    class Scored(Net):
        def __init__(self):
            super().__init__()
            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=2)
            self.more = torchmetrics.MetricCollection([torchmetrics.MeanMetric()])

        def do(self, batch, batch_idx):
            self.accuracy(torch.zeros(len(batch[1]), dtype=torch.long), batch[1])
            self.more.update(batch[0])
            self.log("accuracy", self.accuracy)
            self.log_dict(self.more)
            self.log_dict({"epoch": self.current_epoch, "batch": batch_idx})

    module = Scored()
    expected = {"accuracy": 0.25, "MeanMetric": 1.5, "epoch": 1.0, "batch": 1.0}
    for _ in range(2):
        assert metrics(module, batch_size=2, local_epochs=2) == expected
    assert int(module.accuracy.tp.sum()) == 0


def test_a_module_may_have_a_log_of_its_own() -> None:
    class Prefixed(Net):
        def log(self, name, value, **kwargs):
            super().log(f"train/{name}", value, **kwargs)

        def do(self, batch, batch_idx):
            self.log("loss", torch.tensor(2.0), on_epoch=True)
            assert float(self.trainer.callback_metrics["train/loss"]) == 2

    assert metrics(Prefixed()) == {"train/loss": 2.0}


def test_reductions_of_an_epoch() -> None:
    """Values 0, 1 and 2, of batches of 2, 1 and 1 samples in the mean."""
    found: list[dict[str, float]] = []

    class Reducing(Net):
        def do(self, batch, batch_idx):
            for name in ("mean", "sum", "max", "min"):
                value = float(batch_idx)
                self.log(name, value, on_step=False, on_epoch=True, reduce_fx=name)
            self.log("weighted", value, on_epoch=True, on_step=False, batch_size=1 + batch_idx)

        def on_train_epoch_end(self):
            self.log("late", 7.0)

        def on_train_end(self):
            found.append({n: float(v) for n, v in self.trainer.callback_metrics.items()})

    metrics(Reducing(), batch_size=2, local_epochs=1)
    assert found == [
        pytest.approx({"mean": 0.5, "sum": 1, "max": 1, "min": 0, "weighted": 2 / 3, "late": 7})
    ]


def test_what_a_module_asks_a_strategy_for() -> None:
    class Asking(Net):
        def do(self, batch, batch_idx):
            strategy = self.trainer.strategy
            assert torch.equal(self.all_gather(torch.ones(2)), torch.ones(2))
            assert strategy.reduce(3) == strategy.broadcast(3) == 3
            assert strategy.barrier() is None
            assert strategy.root_device == self.device
            assert isinstance(self.optimizers(), torch.optim.SGD)
            assert self.optimizers(use_pl_optimizer=False) is self.trainer.optimizers[0]
            self.print("a step")

    metrics(Asking())


def test_the_trainer_goes_when_training_ends(capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[Any] = []

    class Keeping(Net):
        def do(self, batch, batch_idx):
            kept.append(self.optimizers())
            self.print("here")

    module = Keeping()
    metrics(module)
    assert capsys.readouterr().out == "here\n"
    assert module._trainer is None
    assert "log" not in vars(module)
    copy.deepcopy(module)
    with pytest.raises((ConfigurationError, ReferenceError)):
        kept[0].step()


def test_an_error_with_the_name_of_an_attribute_travels() -> None:
    with pytest.raises(FedrecError) as caught:
        _ = LocalTrainer(Net()).datamodule
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
