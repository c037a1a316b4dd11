"""A round of local training ends where `pl.Trainer.fit` on the same batches ends.

Every case is a module that does something of its own. What Lightning makes of it is compared with
the global weights minus what the client sends, times the local learning rate.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from fedrec import Federation, LightningClient
from fedrec.clients.hooks import CALLED, MODULE_HOOKS, needs_sequential
from fedrec.clients.trainer import LocalTrainer
from fedrec.exceptions import ConfigurationError
from fedrec.types import RoundContext

Pair = namedtuple("Pair", "features target")
LR = 0.1


def samples(size: int = 12) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(size) % 3


DATA = TensorDataset(*samples())


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return functional.cross_entropy(self(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {}


def case(name: str | None = None, **local: Any) -> Callable[[Any], Any]:
    """Add a module, or a function that makes one, and arguments of its client."""

    def add(make: Any) -> Any:
        CASES[name or make.__name__] = (make, local)
        return make

    return add


case("one step", epochs=1, batch_size=None)(Net)
case("plain")(Net)


# --- optimisers and schedulers -------------------------------------------------------------------


def with_optimizer(name: str, make: Callable[[Any], Any], **local: Any) -> None:
    case(name, **local)(type("Optimized", (Net,), {"configure_optimizers": make}))


def sgd(net: Any, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=LR, **kwargs)


def scheduled(net: Any, make: Callable[[Any], Any], **config: Any) -> dict[str, Any]:
    optimizer = sgd(net)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **config}}


rates = torch.optim.lr_scheduler
with_optimizer("momentum", lambda net: sgd(net, momentum=0.9, nesterov=True))
with_optimizer("weight decay", lambda net: sgd(net, weight_decay=0.1))
with_optimizer("weight decay in one step", lambda net: sgd(net, weight_decay=0.1), epochs=1)
with_optimizer("adam", lambda net: torch.optim.Adam(net.parameters(), lr=0.01), local_lr=0.01)
with_optimizer("adamw", lambda net: torch.optim.AdamW(net.parameters(), lr=0.01), local_lr=0.01)
with_optimizer(
    "groups",
    lambda net: torch.optim.SGD(
        [{"params": net.net[0].parameters()}, {"params": net.net[2].parameters(), "lr": 0.3}], lr=LR
    ),
    local_lr=LR,
)
with_optimizer("some parameters", lambda net: torch.optim.SGD(net.net[2].parameters(), lr=LR))
with_optimizer("step", lambda n: scheduled(n, lambda o: rates.StepLR(o, 2), interval="step"))
with_optimizer(
    "frequency", lambda n: scheduled(n, lambda o: rates.StepLR(o, 1), interval="step", frequency=2)
)
with_optimizer("epoch", lambda n: scheduled(n, lambda o: rates.ExponentialLR(o, 0.3)))
with_optimizer(
    "epoch frequency", lambda n: scheduled(n, lambda o: rates.ExponentialLR(o, 0.3), frequency=2)
)
with_optimizer(
    "lists", lambda n: ([o := sgd(n)], [rates.ExponentialLR(o, 0.3), rates.StepLR(o, 1)])
)
with_optimizer(
    "one cycle",
    lambda n: scheduled(
        n,
        lambda o: rates.OneCycleLR(o, 0.5, total_steps=n.trainer.estimated_stepping_batches),
        interval="step",
    ),
    local_lr=0.02,
)


# Until its data are loaded, Lightning's Trainer has no end of batches: the rate stays.
with_optimizer(
    "batches of an epoch",
    lambda n: scheduled(
        n,
        lambda o: rates.CosineAnnealingLR(o, T_max=n.trainer.num_training_batches),
        interval="step",
    ),
)
with_optimizer(
    "batches of an epoch, once loaded",
    lambda n: scheduled(
        n,
        lambda o: rates.CosineAnnealingLR(
            o, T_max=n.trainer.estimated_stepping_batches + n.trainer.num_training_batches
        ),
        interval="step",
    ),
)


@case(epochs=4)
class Plateau(Net):
    """The rate falls after the first epoch that is no better: each is worse by what is logged."""

    config: ClassVar[dict[str, Any]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("worse", float(self.global_step), on_epoch=True)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        def make(optimizer: Any) -> Any:
            return rates.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

        return scheduled(self, make, monitor="worse", **self.config)


@case(epochs=4)
class PlateauOfMean(Plateau):
    """Watches the mean over the epoch, weighted by the sizes of batches (5, 5 and 2)."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        # The last value of an epoch falls, the mean rises.
        value = [0.0, 10.0 * self.current_epoch, -self.current_epoch][batch_idx]
        self.log("worse", value, on_step=False, on_epoch=True)
        return Net.training_step(self, batch, batch_idx)


@case()
class PlateauInSteps(Plateau):
    config: ClassVar[dict[str, Any]] = {"interval": "step"}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("worse", float(self.global_step))
        return Net.training_step(self, batch, batch_idx)


@case()
class SchedulerHook(Net):
    def configure_optimizers(self) -> Any:
        return scheduled(self, lambda o: rates.StepLR(o, 1, 0.5), interval="step")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.global_step % 2:
            scheduler.step()


@case()
class MadeInInit(Net):
    def __init__(self) -> None:
        super().__init__()
        self.made = sgd(self, momentum=0.9)

    def configure_optimizers(self) -> Any:
        return self.made


# --- hooks ---------------------------------------------------------------------------------------


@case()
class Warmup(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure=closure)
        for group in optimizer.param_groups:
            group["lr"] = LR * (self.trainer.global_step + 1) / 10


@case("warm-up before the only step", epochs=1, batch_size=None)
class WarmupBefore(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = LR / 4
        super().optimizer_step(epoch, batch_idx, optimizer, closure)


@case()
class Accumulated(Net):
    """Steps every other batch, with the sum of both gradients."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if batch_idx % 2:
            optimizer.step(closure=closure)
        else:
            closure()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


@case()
class Clipped(Net):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any
    ) -> None:
        assert gradient_clip_val is None
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


@case("clipped in one step", epochs=1, batch_size=None)
class ClippedByValue(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")


@case()
class ClippedAfterBackward(Net):
    def on_after_backward(self) -> None:
        nn.utils.clip_grad_value_(self.parameters(), 0.02)


@case()
class WeightClamping(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["loss"].ndim == 0
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.2, 0.2)


@case("clamping behind autograd's back", epochs=1, batch_size=None)
class DataClamping(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        return super().training_step(batch, batch_idx)


def halve_gradient(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


@case()
class ParameterHooks(Net):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.net[0].parameters():
            parameter.register_hook(lambda g: g.clamp(-0.01, 0.01))
        for parameter in self.net[2].parameters():
            parameter.register_post_accumulate_grad_hook(halve_gradient)


@case("parameter hooks in one step", epochs=1, batch_size=None)
class ParameterHooksOnce(ParameterHooks):
    pass


@case("optimizer hooks", epochs=1, batch_size=None)
class OptimizerHooks(Net):
    def configure_optimizers(self) -> Any:
        optimizer = sgd(self)

        def shrink(optimizer: Any, args: Any, kwargs: Any) -> None:
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(0.9)

        optimizer.register_step_post_hook(shrink)
        return optimizer


@case("hooks mask weights")
@case("a hook masks weights once", epochs=1, batch_size=None)
class MasksWeights(Net):
    """Keeps weights at zero, and an average of weights, in a hook of the optimiser."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        near = functional.mse_loss(self(batch[0]), self.average(batch[0]))
        return near + super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        def mask(optimizer: Any, args: Any, kwargs: Any) -> None:
            with torch.no_grad():
                self.net[0].weight[:, 1] = 0.0
                for mean, parameter in zip(
                    self.average.parameters(), self.net.parameters(), strict=True
                ):
                    mean.lerp_(parameter, 0.5)

        optimizer = torch.optim.SGD(self.net.parameters(), lr=LR)
        optimizer.register_step_post_hook(mask)
        return optimizer


@case("own step", epochs=1, batch_size=None)
class OwnStep(Net):
    def configure_optimizers(self) -> Any:
        optimizer = sgd(self)
        usual: Any = optimizer.step

        def halved(self: Any, closure: Any = None) -> Any:
            loss = closure()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad *= 0.5
            usual()
            return loss

        optimizer.step = halved.__get__(optimizer)
        return optimizer


@case()
class OwnBackward(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)

    def on_before_backward(self, loss: Tensor) -> None:
        self.seen = float(loss.detach())


@case()
class Normalised(Net):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 1, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] / 4, batch[1]]


@case()
class StepDependent(Net):
    """The loss depends on every counter there is."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        trainer = self.trainer
        assert trainer.is_last_batch == (batch_idx + 1 == trainer.num_training_batches)
        weight = 1 + self.global_step + 10 * self.current_epoch + 100 * batch_idx
        weight += trainer.num_training_batches / trainer.max_epochs
        return super().training_step(batch, batch_idx) * weight / 400


@case()
class SkipsEpoch(Net):
    """-1 leaves out what is left of the epoch, not its end."""

    def configure_optimizers(self) -> Any:
        return scheduled(self, lambda o: rates.ExponentialLR(o, 0.3))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if (self.current_epoch, batch_idx) == (0, 1) else None


@case()
class ShouldStop(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = self.global_step == 4


@case()
class ReturnsDict(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "extra": batch_idx}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["extra"] == batch_idx
        with torch.no_grad():
            self.net[0].bias.add_(outputs["loss"])


@case()
class ReturnsNone(Net):
    """A step without a loss is a step: of the scheduler, and of momentum not."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self, momentum=0.5)
        schedule = {"scheduler": rates.StepLR(optimizer, 1, 0.5), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


@case()
class ChangesRate(Net):
    def on_train_epoch_start(self) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] = LR / (1 + self.current_epoch)


@case()
class OnEnds(Net):
    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.net[0].weight.mul_(0.9)

    def on_train_end(self) -> None:
        with torch.no_grad():
            self.net[2].bias.add_(0.5 * self.current_epoch)


@case()
class SetUp(Net):
    """Makes its layers in `setup` and `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Identity()

    def setup(self, stage: str) -> None:
        assert stage == "fit"
        self.first = nn.Linear(4, self.trainer.estimated_stepping_batches)

    def configure_model(self) -> None:
        self.net = nn.Sequential(self.first, nn.Tanh(), nn.LazyLinear(3))


# --- manual optimisation -------------------------------------------------------------------------


class ByHand(Net):
    """Takes each step by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@case()
class Manual(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self, momentum=0.9)
        return [optimizer], [rates.ExponentialLR(optimizer, 0.5)]


@case()
class ClippedByAHook(ByHand):
    """Clips gradients in a hook of the optimiser, where that is after the backward pass."""

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self)

        def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
            for group in optimizer.param_groups:
                nn.utils.clip_grad_norm_(group["params"], 0.01)

        optimizer.register_step_pre_hook(clip)
        return optimizer


@case(local_lr=LR)
class Adversaries(Net):
    """Two players with optimisers of their own; global_step counts the steps of both."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        made = self.generator(x)
        real, fake = self.discriminator(x), self.discriminator(made.detach())
        with self.toggled_optimizer(second):
            second.zero_grad()
            self.manual_backward(functional.softplus(fake).mean() - real.mean())
            second.step()
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(-self.discriminator(made).mean() * (1 + self.global_step))
        first.step()
        self.untoggle_optimizer(first)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.generator.parameters(), lr=LR),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.03, momentum=0.5),
        ]


@case()
class ManualClosure(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = Net.training_step(self, batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


@case()
class BehindTheBack(Manual):
    """Steps the bare optimiser, which no wrapper knows of."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        Net.training_step(self, batch, batch_idx).backward()
        optimizer.step()


class SharpnessAware(torch.optim.SGD):
    """Asks for the gradient again, uphill from where it is."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        uphill = [0.1 * p.grad for p in parameters]
        with torch.no_grad():
            for parameter, move in zip(parameters, uphill, strict=True):
                parameter.add_(move)
            with torch.enable_grad():
                closure()
            for parameter, move in zip(parameters, uphill, strict=True):
                parameter.sub_(move)
        super().step()
        return loss


with_optimizer("asks twice", lambda net: SharpnessAware(net.parameters(), lr=LR))


# --- kinds of modules ----------------------------------------------------------------------------


@case(dataset=[Pair(x, y) for x, y in zip(*samples(), strict=True)])
class NamedTuples(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.cross_entropy(self(batch.features), batch.target)


@case(dataset=[{"x": x, "y": y} for x, y in zip(*samples(), strict=True)])
class Dicts(Net):
    def training_step(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self(batch["x"]), batch["y"])


@case()
class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)


@case()
class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.net[2].weight = self.net[0].weight


@case()
class WeightNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.net[0])


@case()
class Checkpointed(Net):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[0](x)
        return checkpoint(self.net[1:], x, use_reentrant=self.reentrant)


@case()
class Reentrant(Checkpointed):
    reentrant = True


@case("reentrant in one step", epochs=1, batch_size=None)
class ReentrantOnce(Reentrant):
    pass


@case(dataset=TensorDataset(torch.arange(12) % 7, torch.arange(12) % 3))
class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.table(x))


@case("sparse in one step", epochs=1, batch_size=None, dataset=CASES["Sparse"][1]["dataset"])
class SparseOnce(Sparse):
    pass


@case()
class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(3))


case("compiled", epochs=1)(lambda: torch.compile(Net(), backend="eager"))


@case()
class Nested(Net):
    """A LightningModule in a LightningModule asks for its trainer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(x))


class Inner(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 + self.trainer.global_step)


# --- the comparison ------------------------------------------------------------------------------


class Epochs:
    """A batch sampler that gives the batches of one epoch after another."""

    def __init__(self, epochs: list[list[np.ndarray]]) -> None:
        self.epochs, self.next = epochs, 0

    def __len__(self) -> int:
        return len(self.epochs[0])

    def __iter__(self) -> Iterator[list[int]]:
        batches = self.epochs[self.next % len(self.epochs)]
        self.next += 1
        return iter([batch.tolist() for batch in batches])


class Start(pl.Callback):
    """Puts the initial weights in, once a module has all its layers."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = state

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.load_state_dict(self.state)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Lightning says what it has to say elsewhere."""
    logger = logging.getLogger("pytorch_lightning")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def train(module: Any, local: dict[str, Any]) -> tuple[Any, list[list[np.ndarray]], Any, Any]:
    """Return the federation, the batches of each epoch, initial weights and trained ones."""
    given = {"batch_size": 5, "dataset": DATA, "epochs": 3, **local}
    dataset, epochs = given.pop("dataset"), given.pop("epochs")
    client = LightningClient("a", module, dataset, local_epochs=epochs, **given)
    federation = Federation([client], module)
    layout = federation.layout
    weights = layout.flatten(federation.module)
    ctx = RoundContext(
        round=3, phase="record", client_ids=("a",), global_weights=weights, layout=layout
    )
    batches = client.batches(ctx)
    size = len(batches) // epochs
    sent = client.local_update(weights, ctx)
    trained = weights.double() - (client.local_lr or LR) * sent.update.double()
    return (
        federation,
        [batches[i : i + size] for i in range(0, len(batches), size)],
        weights,
        trained,
    )


def fit(module: Any, state: Any, epochs: list[list[np.ndarray]], dataset: Any, **kw: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            max_epochs=len(epochs),
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Start(state)],
            **kw,
        )
        trainer.fit(module, DataLoader(dataset, batch_sampler=Epochs(epochs)))


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_trainer_fit(name: str) -> None:
    make, local = CASES[name]
    torch.manual_seed(0)
    federation, epochs, weights, trained = train(make(), local)
    assert all(p.grad is None for p in federation.module.parameters())
    federation.layout.load(federation.module, weights)
    state = {n: v.clone() for n, v in federation.module.state_dict().items()}
    reference = make()
    fit(reference, state, epochs, local.get("dataset", DATA))
    reference = getattr(reference, "_orig_mod", reference)
    expected = federation.layout.flatten(reference).double()
    assert not torch.equal(expected, weights.double())
    assert float((trained - expected).norm() / expected.norm()) < 1e-6
    assert float((trained - expected).abs().max()) < 1e-6 * float(expected.abs().max())


def test_a_hook_of_all_optimizers_is_called() -> None:
    def shrink(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.9)

    handle = register_optimizer_step_post_hook(shrink)
    try:
        test_weights_are_those_of_trainer_fit("one step")
    finally:
        handle.remove()


class Clamps(torch.optim.SGD):
    """Clamps the parameters of a module, and not those in its groups."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net.parameters(), lr=LR)
        self.parameters = list(net.parameters())

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.clamp_(-9.0, 9.0)
        return loss


@pytest.mark.parametrize("epochs", [1, 2])
def test_an_optimizer_that_changes_the_modules_parameters_is_refused(epochs: int) -> None:
    module: Any = Net()
    module.configure_optimizers = lambda: Clamps(module.net)
    message = r"`Clamps.step` changes `net.0.weight` of Net.*register_step_post_hook"
    with pytest.raises(ConfigurationError, match=message):
        train(module, {"epochs": epochs})


def noting(calls: list[str]) -> Any:
    """Return a module that notes which hooks are called, all that local training calls."""
    names = [n for n, how in MODULE_HOOKS.items() if how == CALLED and "checkpoint" not in n]

    def note(name: str) -> Callable[..., Any]:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return getattr(super(kind, self), name)(*args, **kwargs)

        hook.__wrapped__ = getattr(Scheduled, name)  # its signature
        return hook

    kind = type("Noting", (Scheduled,), {name: note(name) for name in names})
    return kind()


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        return scheduled(self, lambda o: rates.ExponentialLR(o, 0.3))


def test_hooks_are_called_in_lightnings_order() -> None:
    ours: list[str] = []
    federation, epochs, weights, _ = train(noting(ours), {"epochs": 2})
    theirs: list[str] = []
    fit(noting(theirs), federation.module.state_dict(), epochs, DATA)
    # Lightning makes the optimisers before it says that the fit starts, and so do we.
    assert ours == theirs
    assert ours[:5] == [
        "configure_optimizers",
        "on_fit_start",
        "on_train_start",
        "on_train_epoch_start",
        "on_before_batch_transfer",
    ]
    assert ours.count("training_step") == 6


class Reading(Scheduled):
    """Notes what the attributes of its trainer are in each step."""

    def __init__(self, names: list[str], found: list[dict[str, Any]]) -> None:
        super().__init__()
        self.names, self.found = names, found.append

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("hidden", batch_idx * 1.0, logger=False)
        values = {name: getattr(self.trainer, name) for name in self.names}
        assert values["model"] is values["lightning_module"] is self
        assert self.lr_schedulers() is values["lr_scheduler_configs"][0].scheduler
        values["state"] = copy.copy(values["state"])  # Lightning's changes when it ends
        for name in ("optimizers", "lr_scheduler_configs"):
            values[name] = len(values[name])
        for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
            values[name] = {n: round(float(v), 4) for n, v in values[name].items()}
        self.found(values)
        return loss


# What has no value to compare, or is a matter of the Trainer's own callbacks and folders.
OBJECTS = ("model", "lightning_module", "strategy", "precision_plugin", "callbacks", "print")


def test_attributes_of_the_trainer_are_lightnings() -> None:
    names = sorted(attributes_of(LocalTrainer(Net())))
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    federation, epochs, weights, _ = train(Reading(names, ours), {})
    federation.layout.load(federation.module, weights)
    total = sum(map(len, epochs))
    state = {n: v.clone() for n, v in federation.module.state_dict().items()}
    fit(Reading(names, theirs), state, epochs, DATA, max_steps=total)
    assert len(ours) == len(theirs) == total == 9
    names = [name for name in names if name not in OBJECTS]
    mine, those = ({n: [one[n] for one in found] for n in names} for found in (ours, theirs))
    assert mine == those


def noting_batches(found: list[Any]) -> Any:
    """A module that notes how many batches its trainer says there are."""

    def note(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            found.append((name, self.trainer.num_training_batches))
            return getattr(Net, name)(self, *args, **kwargs)

        return hook

    names = ("setup", "configure_optimizers", "on_fit_start", "on_train_start", "on_fit_end")
    return type("Noting", (Net,), {name: note(name) for name in names})()


def test_batches_are_counted_when_lightnings_are() -> None:
    ours: list[Any] = []
    theirs: list[Any] = []
    federation, epochs, weights, _ = train(noting_batches(ours), {})
    state = {n: v.clone() for n, v in federation.module.state_dict().items()}
    fit(noting_batches(theirs), state, epochs, DATA)
    assert ours == theirs
    assert theirs[1] == ("configure_optimizers", float("inf"))
    assert theirs[-1] == ("on_fit_end", 3)


def attributes_of(trainer: LocalTrainer) -> set[str]:
    ways_in = {"attached", "begin", "hiding_optimizers"}
    return {name for name in dir(trainer) if not name.startswith("_")} - ways_in


def test_modules_that_do_something_between_batches_are_sequential() -> None:
    """Fast ways of computing know nothing of hooks."""
    hooks = ("Warmup", "Clipped", "WeightClamping", "Normalised", "ShouldStop", "OwnBackward")
    for name in (*hooks, "Manual", "compiled"):
        module = CASES[name][0]()
        assert needs_sequential(LightningClient("a", module, DATA).module), name
    for name in ("plain", "adam", "one cycle", "StepDependent", "Frozen", "Plateau"):
        assert needs_sequential(CASES[name][0]()) is None, name
