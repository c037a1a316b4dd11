"""The object that `self.trainer` is during local training."""

from __future__ import annotations

import dis
import importlib
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedrec.clients.hooks import (
    CALLED,
    CALLED_ONCE,
    MODULE_HOOKS,
    call,
    is_overridden,
    lightning_class,
    lightning_optimizer,
    package_of,
    run,
)
from fedrec.exceptions import (
    ConfigurationError,
    FedrecError,
    FedrecWarning,
    TrainerAttributeError,
)

__all__ = ["LocalTrainer", "unknown_attributes", "warn_of_unknown_attributes"]

# Hooks in which Lightning logs for the epoch unless told otherwise.
_OF_EPOCH = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end")
_REDUCTIONS: dict[str, Callable[..., Tensor]] = {"max": torch.maximum, "min": torch.minimum}


class LocalTrainer:
    """Stands in for Lightning's Trainer while a client trains.

    To the module, a round of local training is a fit of its own: of `max_epochs` epochs, with
    counters that start at 0, on one device, without loggers, callbacks and validation. This trainer
    has the attributes of Lightning's Trainer that mean something in such a fit; reading any other
    attribute raises an error that names it. Attributes may be set.

    Args:
        module: The LightningModule that trains.
        max_epochs: Passes over the data.
        num_training_batches: Batches in each pass.
        device: The device of the module.
        autocast: Makes the context manager of the precision.

    Examples:
        >>> from fedrec.models import MLP
        >>> trainer = LocalTrainer(MLP(in_features=4), max_epochs=2, num_training_batches=5)
        >>> trainer.estimated_stepping_batches, trainer.global_step
        (10, 0)
        >>> hasattr(trainer, "datamodule")
        False
    """

    def __init__(
        self,
        module: Any,
        *,
        max_epochs: int = 1,
        num_training_batches: int = 1,
        device: torch.device | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.lightning_module = self.model = module
        self.max_epochs: int = max_epochs
        self.min_epochs, self.min_steps = 0, None
        self._num_training_batches = num_training_batches
        self._loads_later = self._loaded = False
        total = max_epochs * num_training_batches
        self._estimated_stepping_batches = total
        # With manual optimization, the number of steps is up to `training_step`.
        self.max_steps = total if getattr(module, "automatic_optimization", True) else -1
        self.current_epoch = self.global_step = 0
        self.is_last_batch = False
        self.should_stop = False
        self.accumulate_grad_batches = 1
        self.gradient_clip_val = self.gradient_clip_algorithm = None
        self.training = True
        self.validating = self.testing = self.predicting = self.evaluating = False
        self.sanity_checking = self.fast_dev_run = self.barebones = False
        self.interrupted = self.received_sigterm = False
        self.enable_validation = False
        self.is_global_zero = True
        self.global_rank = self.local_rank = self.node_rank = 0
        self.world_size = self.num_devices = self.num_nodes = 1
        self.precision = "32-true" if autocast is nullcontext else "bf16-mixed"
        self.scaler = None
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.logger = self.checkpoint_callback = self.early_stopping_callback = None
        self.progress_bar_callback = self.ckpt_path = None
        self.loggers: list[Any] = []
        self.callbacks: list[Any] = []
        self.checkpoint_callbacks: list[Any] = []
        self.early_stopping_callbacks: list[Any] = []
        self.val_dataloaders = self.test_dataloaders = self.predict_dataloaders = None
        self.num_val_batches: list[int] = []
        self.num_sanity_val_batches: list[int] = []
        self.log_every_n_steps = 50
        self.precision_plugin = _Precision()
        self.strategy = _Strategy(self, device or torch.device("cpu"))
        self._logged = _Logged(module)
        # `LightningModule.log` needs these, where a module's own `log` calls it.
        self._results = SimpleNamespace(
            log=lambda fx, name, value, **how: self._logged.log(name, value, **how)
        )
        self._logger_connector = SimpleNamespace(
            should_reset_tensors=lambda fx: False, _current_fx=None
        )
        self._accelerator_connector = SimpleNamespace(is_distributed=False)

    def __getattr__(self, name: str) -> Any:
        raise TrainerAttributeError(
            f"Local training has no `trainer.{name}`. HINT: give the module what it needs when it "
            "is made, or read it with `getattr(self.trainer, ..., default)`."
        )

    @cached_property
    def state(self) -> Any:
        """Lightning's `TrainerState` of a running fit, in its training stage."""
        states = importlib.import_module(f"{package_of(self.lightning_module)}.trainer.states")
        return states.TrainerState(
            status=states.TrainerStatus.RUNNING,
            fn=states.TrainerFn.FITTING,
            stage=states.RunningStage.TRAINING,
        )

    @property
    def default_root_dir(self) -> str:
        """The current folder, as of a Trainer without `default_root_dir`."""
        return str(Path.cwd())

    @property
    def log_dir(self) -> str:
        """The current folder, as of a Trainer without a logger."""
        return self.default_root_dir

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The values that the module logged, by name, as Lightning's callbacks see them."""
        return self._logged.published()[0]

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The values that the module logged, by name, as Lightning's loggers see them."""
        return self._logged.published()[1]

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values that the module logged with `prog_bar=True`, by name."""
        return {name: float(value) for name, value in self._logged.published()[2].items()}

    @property
    def num_training_batches(self) -> int | float:
        """Batches in each epoch; infinite while Lightning's Trainer has not loaded its data."""
        return math.inf if self._loads_later else self._num_training_batches

    @property
    def estimated_stepping_batches(self) -> int:
        """Steps of the round. Reading it counts as loading the data, as in Lightning's Trainer."""
        self._loads_later, self._loaded = False, True
        return self._estimated_stepping_batches

    @contextmanager
    def _before_data(self) -> Iterator[None]:
        """Behave as Lightning's Trainer does before it has loaded its data."""
        self._loads_later = not self._loaded
        try:
            yield
        finally:
            self._loads_later = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print, as Lightning does on rank 0: there is one process."""
        print(*args, **kwargs)  # noqa: T201 - what the module asked for

    def hiding_optimizers(self) -> Self:
        """Begin a fit of many clients at once, each of which has its own optimisers.

        A module that reads the trainer's optimisers or schedulers is refused.
        """
        self.begin(0)
        for holder in (self, self.strategy):
            holder.optimizers = holder.lr_scheduler_configs = _Hidden()
        return self

    def begin(self, step: int) -> int:
        """Set the counters to local step `step`, where every local step is an optimiser's step.

        Returns:
            The index of the step's batch in its epoch.
        """
        size = self._num_training_batches
        self.global_step, self.current_epoch = step, step // size
        self.is_last_batch = (step + 1) % size == 0
        return step % size

    @contextmanager
    def attached(self) -> Iterator[dict[str, Any]]:
        """Be the trainer of the module, and of the LightningModules in it, until exit.

        Yields:
            The value that was logged last, by name.
        """
        parts = [vars(m) for m in self.lightning_module.modules() if "_trainer" in vars(m)]
        own = vars(self.lightning_module)
        parts = parts or [own]
        before = [part.get("_trainer") for part in parts]
        hook = own.get("_current_fx_name")
        # Lightning's own `log` checks a lot. It is called only where a module overrides `log`.
        takes_log = not is_overridden(self.lightning_module, "log")
        log: Any = self._logged.log
        if own.get("_compiler_ctx") is not None:
            log = torch.compiler.disable(log)
        for part in parts:
            part["_trainer"] = self
            if takes_log:
                part["log"] = log
        own["_current_fx_name"] = "training_step"
        try:
            yield self._logged.last
        finally:
            own["_current_fx_name"] = hook
            for part, trainer in zip(parts, before, strict=True):
                part["_trainer"] = trainer
                if takes_log:
                    part.pop("log", None)
            self.strategy.step = _no_step


class _Hidden(list[Any]):
    """A list of optimisers that a module must not read."""

    def _refuse(self, *args: Any) -> Any:
        raise FedrecError("it looks at its optimizers")

    __iter__ = __getitem__ = __len__ = _refuse


class _Precision:
    """The part of Lightning's precision plugin that a module uses."""

    precision = "32-true"

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, algorithm: str = "norm"
    ) -> None:
        if clip_val <= 0:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if algorithm == "value":
            nn.utils.clip_grad_value_(parameters, clip_val)
        else:
            nn.utils.clip_grad_norm_(parameters, clip_val)


def _no_step(optimizer: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
    raise ConfigurationError("An optimizer of local training can step during local training only.")


class _Strategy:
    """The part of Lightning's strategy that a module and a `LightningOptimizer` use."""

    is_global_zero = True
    handles_gradient_accumulation = False
    global_rank = local_rank = 0
    world_size = 1

    def __init__(self, trainer: LocalTrainer, device: torch.device) -> None:
        self.lightning_module = self.model = trainer.lightning_module
        self.root_device = device
        self.precision_plugin = trainer.precision_plugin
        self.optimizers: list[Any] = trainer.optimizers
        self.lr_scheduler_configs: list[Any] = trainer.lr_scheduler_configs
        self.step: Callable[..., Any] = _no_step
        self.stepped: Callable[[], None] | None = None

    @cached_property
    def _lightning_optimizers(self) -> list[Any]:
        kind = lightning_optimizer(self.lightning_module)
        wrapped = [kind._to_lightning_optimizer(optimizer, self) for optimizer in self.optimizers]
        if self.stepped is not None:
            for optimizer in wrapped:
                optimizer._on_after_step = self.stepped
        return wrapped

    def backward(self, loss: Tensor, optimizer: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        if not loss.requires_grad:
            raise ConfigurationError(
                f"The loss of {type(module).__name__} does not depend on any parameter that is "
                "trained. HINT: look for `.detach()`, `.item()`, `torch.no_grad()` or an argmax on "
                "the way from the parameters to the loss."
            )
        call(module, "on_before_backward", loss)
        if is_overridden(module, "backward"):
            run(module, "backward", loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)
        call(module, "on_after_backward")
        return loss.detach()

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        return self.step(optimizer, closure, **kwargs)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return value

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor

    def barrier(self, name: str | None = None) -> None:
        pass


class _Logged:
    """The values that a module logs: the last ones, and those of steps and epochs.

    Attributes:
        last: The last value by name, as it was given.
        batch: The current mini-batch; means over an epoch are weighted by its size.
        in_fit: Whether a `LocalFit` trains; only then are values of steps and epochs kept.
        in_epoch: Whether a batch of the epoch has begun.
        has_unread: Whether a value was logged outside of a fit, and so not kept.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.last: dict[str, Any] = {}
        self.batch: Any = None
        self.in_fit = self.in_epoch = self.has_unread = False
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._published: tuple[dict[str, Tensor], ...] = ({}, {}, {})

    # The order of the arguments is that of `LightningModule.log`.
    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
        **kwargs: Any,
    ) -> None:
        """Take a value that the module logs."""
        check_loggable(name, value)
        self.last[name] = value
        if not self.in_fit:
            self.has_unread = True
            return
        fx = vars(self.module).get("_current_fx_name") or "training_step"
        of_epoch = fx in _OF_EPOCH
        entry = self._entries.get((fx, name))
        if entry is None:
            entry = self._entries[fx, name] = _Entry(
                name,
                prog_bar=prog_bar,
                logger=logger is not False,
                on_step=not of_epoch if on_step is None else on_step,
                on_epoch=of_epoch if on_epoch is None else on_epoch,
                reduction=getattr(reduce_fx, "__name__", reduce_fx),
            )
        entry.value = value
        if entry.on_epoch and not is_metric(value):
            size = self._batch_size() if batch_size is None else batch_size
            entry.add(as_tensor(value), size)

    def published(self) -> tuple[dict[str, Tensor], ...]:
        """Return the current metrics for callbacks, for loggers and for the progress bar.

        Raises:
            FedrecError: If a value was logged outside of a fit, as where many clients are computed
                at once: it would be missing.
        """
        if self.has_unread:
            raise FedrecError("it reads what it has logged")
        callback, logged, bar = self._published
        for entry in self._entries.values():
            value = entry.of_step() if self.in_epoch else entry.of_epoch()
            if value is None:
                continue
            name = entry.name
            if entry.on_step and entry.on_epoch:
                name = f"{entry.name}_{'step' if self.in_epoch else 'epoch'}"
            callback[entry.name] = callback[name] = value
            if entry.logger:
                logged[name] = value
            if entry.prog_bar:
                bar[name] = value
        return self._published

    def start_batch(self, batch: Any) -> None:
        """Note that a batch begins."""
        self.in_epoch, self.batch = True, batch

    def end_batches(self) -> None:
        """Note that the batches of the epoch are done: from now on, values are the epoch's."""
        self.published()
        self.in_epoch, self.batch = False, None

    def end_epoch(self) -> None:
        """Drop the values of the epoch, and compute and reset the metric objects among them."""
        self.published()
        for entry in self._entries.values():
            if is_metric(entry.value):
                self.last[entry.name] = as_number(entry.value, entry.name)
        self._entries.clear()

    def _batch_size(self) -> int:
        sizes = [
            leaf.shape[0]
            for leaf in tree_leaves(self.batch)
            if isinstance(leaf, Tensor) and leaf.ndim
        ]
        return sizes[0] if sizes else 1


class _Entry:
    """The values that a hook logs under one name, in the current epoch."""

    def __init__(
        self,
        name: str,
        *,
        prog_bar: bool,
        logger: bool,
        on_step: bool,
        on_epoch: bool,
        reduction: Any,
    ) -> None:
        if reduction not in ("mean", "sum", "max", "min", "avg"):
            raise ConfigurationError(
                f"Expected `reduce_fx` of `self.log({name!r}, ...)` to be mean, sum, max or min, "
                f"but got {reduction!r}. HINT: log a `torchmetrics.Metric` instead."
            )
        self.name, self.prog_bar, self.logger = name, prog_bar, logger
        self.on_step, self.on_epoch, self.reduction = on_step, on_epoch, reduction
        self.value: Any = None
        self._sum: Tensor | None = None
        self._weight = 0

    def add(self, value: Tensor, size: int) -> None:
        if self.reduction in ("mean", "avg"):
            value, self._weight = value * size, self._weight + size
        if self._sum is None:
            self._sum = value
        else:
            self._sum = _REDUCTIONS.get(self.reduction, torch.add)(self._sum, value)

    def of_step(self) -> Tensor | None:
        if not self.on_step or self.value is None:
            return None
        value = getattr(self.value, "_forward_cache", None) if is_metric(self.value) else self.value
        return None if value is None else as_tensor(value)

    def of_epoch(self) -> Tensor | None:
        if not self.on_epoch or self.value is None:
            return None
        if is_metric(self.value):
            return as_tensor(self.value.compute())
        return self._sum if not self._weight or self._sum is None else self._sum / self._weight


def is_metric(value: Any) -> bool:
    """Whether a value is a metric object, as of torchmetrics."""
    return hasattr(value, "compute") and hasattr(value, "reset")


def as_tensor(value: Any) -> Tensor:
    """Return one number as a float32 tensor."""
    return torch.as_tensor(value).detach().float().squeeze()


def as_number(value: Any, name: str) -> float:
    """Return a logged value (number, tensor or metric object) as a number.

    A metric object is computed, then reset.
    """
    if is_metric(value):
        result = value.compute()
        value.reset()
        check_loggable(name, result)
        value = result
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def check_loggable(name: str, value: Any) -> None:
    """Raise `ConfigurationError` unless a value is one number or a metric object."""
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return
        what = f"a tensor of shape {tuple(value.shape)}"
    elif isinstance(value, (int, float)) or is_metric(value) or hasattr(value, "__float__"):
        return
    else:
        what = type(value).__name__
    raise ConfigurationError(
        f"Expected what `self.log({name!r}, ...)` is given to be one number, but got {what}. "
        "HINT: log its mean, or each of its values under a name of its own."
    )


def warn_of_unknown_attributes(module: nn.Module) -> None:
    """Warn of attributes of `self.trainer` that the module reads and a `LocalTrainer` has not."""
    names = unknown_attributes(module)
    if names:
        listed = ", ".join(f"`self.trainer.{name}`" for name in names)
        warnings.warn(
            f"{type(module).__name__} reads {listed}, which local training does not have and "
            "refuses when it comes to that. HINT: give the module what it needs when it is made.",
            FedrecWarning,
            stacklevel=3,
        )


def unknown_attributes(module: nn.Module) -> list[str]:
    """Return the attributes of `self.trainer` that the module reads and a `LocalTrainer` has not.

    They are looked for in the methods that local training calls, and in the methods those call.
    """
    base = lightning_class(module)
    methods: dict[str, CodeType] = {}
    for cls in reversed(type(module).__mro__):
        if base is not None and issubclass(cls, base) and cls is not base:
            for name, value in vars(cls).items():
                function = value.fget if isinstance(value, property) else value
                function = getattr(function, "__func__", function)
                function = getattr(function, "__wrapped__", function)
                if isinstance(function, FunctionType):
                    methods[name] = function.__code__
    trainer = LocalTrainer(module)
    waiting = [h for h, how in MODULE_HOOKS.items() if how in (CALLED, CALLED_ONCE)]
    seen: set[str] = set()
    unknown: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in methods:
            continue
        seen.add(name)
        of_trainer, others = _attributes_read(methods[name])
        unknown.update(n for n in of_trainer if not hasattr(trainer, n))
        waiting.extend(others)
    return sorted(unknown)


def _attributes_read(code: CodeType) -> tuple[set[str], set[str]]:
    """Return the names of the attributes of a `.trainer`, and of any object, that code reads."""
    of_trainer: set[str] = set()
    others: set[str] = set()
    trainers: set[str] = set()  # names of local variables that hold a trainer
    before: tuple[str, Any] = ("", None)
    for step in dis.get_instructions(code):
        reads = step.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if reads:
            others.add(step.argval)
            held = before[0].startswith("LOAD_FAST") and before[1] in trainers
            if held or (before[0] == "LOAD_ATTR" and before[1] == "trainer"):
                of_trainer.add(step.argval)
        elif step.opname == "STORE_FAST" and before == ("LOAD_ATTR", "trainer"):
            trainers.add(step.argval)
        if step.opname not in ("CACHE", "NOP"):
            before = (step.opname, step.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = _attributes_read(constant)
            of_trainer |= inner[0]
            others |= inner[1]
    return of_trainer, others
