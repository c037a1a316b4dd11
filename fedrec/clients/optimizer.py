"""The optimisers of local training, and their schedulers."""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as hooks_of_all
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fedrec.clients.hooks import is_overridden, run
from fedrec.exceptions import ConfigurationError

__all__ = ["LocalOptimizer", "SchedulerConfig"]

# Subclasses are left out: what they do to a tensor need not be what they do to each of its rows.
_ELEMENTWISE = (
    SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
)


@dataclass
class SchedulerConfig:
    """A learning-rate scheduler and when it steps, as in Lightning's `lr_scheduler_config`.

    Args:
        scheduler: The scheduler.
        name: Name of the learning rate, for a callback that logs it.
        interval: Whether the scheduler counts epochs (`"epoch"`) or steps (`"step"`).
        frequency: It steps after every so many epochs or steps.
        reduce_on_plateau: Whether the scheduler is given a metric.
        monitor: Name of that metric, as logged.
        strict: Whether a missing metric is an error.
    """

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True

    def is_due(self, interval: str, done: int) -> bool:
        """Whether the scheduler steps after so many epochs, or steps of an epoch.

        Args:
            interval: What has been counted: `"epoch"` or `"step"`.
            done: How many of them are done, at least 1.
        """
        return self.interval == interval and done % self.frequency == 0


class LocalOptimizer:
    r"""The optimisers of one round of local training, which measure what they subtract.

    One step of plain SGD subtracts a multiple of the gradient, so the gradient itself is the
    update. Otherwise an optimiser steps float64 twins of the parameters, and the update is the
    difference of the twins: a difference of float32 weights would lose three digits.

    The parameters may carry a leading client dimension (see `VectorizedExecutor`).

    Args:
        module: LightningModule whose `configure_optimizers` is called.
        local_lr: What the sum of all steps is divided by; `None` for the optimisers' learning rate,
            which must be the same in all parameter groups.
        lr: Constant learning rate to set, without schedulers; `None` for the optimiser's own.

    Attributes:
        optimizers: The optimisers, in the module's order; several only in manual optimisation.
        schedulers: The schedulers, with when each steps.
        named: The module's parameters by name, as they were when this object was made.

    Raises:
        ConfigurationError: If an optimiser cannot be used, or `local_lr` cannot be found.
    """

    def __init__(self, module: nn.Module, local_lr: float | None, lr: float | None = None) -> None:
        self.name = type(module).__name__
        self.module = module
        automatic = bool(getattr(module, "automatic_optimization", True))
        self.optimizers, self.schedulers = self._configure(module, automatic)
        if lr is not None:
            self.schedulers, local_lr = [], lr
            for group in self.param_groups:
                group["lr"] = lr
        rates = {float(group["lr"]) for group in self.param_groups}
        if local_lr is None:
            if len(rates) != 1:
                raise ConfigurationError(
                    f"The optimizer of {self.name} has learning rates {sorted(rates)}, so the "
                    "scale of an update is not defined. HINT: pass `local_lr=`."
                )
            local_lr = rates.pop()
        if not local_lr > 0 or not math.isfinite(local_lr):
            raise ConfigurationError(
                f"Expected the local learning rate of {self.name} to be positive, but got "
                f"{local_lr!r}: an update is what was subtracted, divided by it. "
                "HINT: set the optimizer's `lr` or pass `local_lr=`."
            )
        self.local_lr = local_lr
        self.named = dict(module.named_parameters())
        self._names = {id(p): n for n, p in self.named.items()}
        for group in self.param_groups:
            self._names_of(group["params"])
        self.twins: dict[str, Tensor] = {}
        self._steps_in_epoch = self._epochs = 0

    @property
    def optimizer(self) -> Optimizer:
        """The first optimiser."""
        return self.optimizers[0]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimisers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def _names_of(self, parameters: list[Any]) -> list[str]:
        foreign = [tuple(p.shape) for p in parameters if id(p) not in self._names]
        if foreign:
            raise ConfigurationError(
                f"The optimizer of {self.name} has parameters of shapes {foreign} that are not the "
                "module's. HINT: pass it `self.parameters()`, or make them attributes of it."
            )
        return [self._names[id(p)] for p in parameters]

    def _configure(
        self, module: nn.Module, automatic: bool
    ) -> tuple[list[Optimizer], list[SchedulerConfig]]:
        trainer: Any = vars(module).get("_trainer")
        # The trainer may be Lightning's own, which has no `_before_data`.
        with getattr(trainer, "_before_data", nullcontext)():
            returned: Any = run(module, "configure_optimizers")
        monitor = None
        schedulers: list[Any] = []
        if isinstance(returned, dict):
            monitor, returned = returned.get("monitor"), [returned]
        elif (
            isinstance(returned, (list, tuple))
            and len(returned) == 2
            and isinstance(returned[0], (list, tuple))
        ):
            second = returned[1]
            schedulers = list(second) if isinstance(second, (list, tuple)) else [second]
            returned = list(returned[0])
        elif not isinstance(returned, (list, tuple)):
            returned = [returned]
        optimizers: list[Any] = []
        for optimizer in returned:
            if isinstance(optimizer, dict):
                if optimizer.get("lr_scheduler") is not None:
                    schedulers.append(optimizer["lr_scheduler"])
                optimizer = optimizer.get("optimizer")
            # A `LightningOptimizer` has the optimiser that it wraps.
            optimizers.append(getattr(optimizer, "optimizer", optimizer))
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
                raise ConfigurationError(
                    f"Expected {self.name}.configure_optimizers to return a first-order optimizer, "
                    f"but got {type(optimizer).__name__}. HINT: return SGD or Adam, for instance."
                )
        if not optimizers or (automatic and len(optimizers) > 1):
            raise ConfigurationError(
                f"{self.name} configures {len(optimizers)} optimizers, but automatic optimization "
                "uses one. HINT: return a single optimizer with several parameter groups, or set "
                "`self.automatic_optimization = False` and step each in `training_step`."
            )
        configs = [self._scheduler(scheduler, monitor, automatic) for scheduler in schedulers]
        return optimizers, configs

    def _scheduler(self, given: Any, monitor: str | None, automatic: bool) -> SchedulerConfig:
        fields = set(SchedulerConfig.__dataclass_fields__)
        values = given if isinstance(given, dict) else {"scheduler": given, "monitor": monitor}
        if "scheduler" not in values or not set(values) <= fields:
            raise ConfigurationError(
                f"Expected the lr_scheduler of {self.name} to be a scheduler, or a dict with "
                f"`scheduler` and no others than {sorted(fields)}, but got the keys "
                f"{sorted(values)}. HINT: correct `configure_optimizers`."
            )
        config = SchedulerConfig(**values)
        if "reduce_on_plateau" not in values:
            config.reduce_on_plateau = isinstance(config.scheduler, ReduceLROnPlateau)
        if config.interval not in ("step", "epoch"):
            raise ConfigurationError(
                f"Expected the `interval` of the lr_scheduler of {self.name} to be 'step' or "
                f"'epoch', but got {config.interval!r}. HINT: correct `configure_optimizers`."
            )
        if automatic and config.reduce_on_plateau and config.monitor is None:
            raise ConfigurationError(
                f"The learning-rate scheduler of {self.name} needs a metric. HINT: return it in a "
                "dict with `monitor`, the name of what `training_step` logs."
            )
        known = isinstance(config.scheduler, (LRScheduler, ReduceLROnPlateau))
        if automatic and not known and not is_overridden(self.module, "lr_scheduler_step"):
            raise ConfigurationError(
                f"The {type(config.scheduler).__name__} of {self.name} is no scheduler of torch. "
                "HINT: override `lr_scheduler_step` to step it."
            )
        return config

    @property
    def is_plain_sgd(self) -> bool:
        """Whether a step subtracts exactly the learning rate times the gradient."""
        optimizer = self.optimizer
        return (
            len(self.optimizers) == 1
            and type(optimizer) is SGD
            and self._steps_as_its_class
            and not any(
                g["momentum"] or g["weight_decay"] or g["maximize"] for g in optimizer.param_groups
            )
        )

    @property
    def is_elementwise(self) -> bool:
        """Whether one step on stacked parameters of several clients is a step for each client."""
        return type(self.optimizer) in _ELEMENTWISE and self._steps_as_its_class

    @property
    def _steps_as_its_class(self) -> bool:
        """Whether a step does what its class says: there are no hooks, and no `step` of its own."""
        optimizer = self.optimizer
        hooks = (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            hooks_of_all._global_optimizer_pre_hooks,
            hooks_of_all._global_optimizer_post_hooks,
        )
        # Schedulers of torch wrap the `step` of an optimiser.
        return not any(hooks) and (
            "step" not in vars(optimizer)
            or inspect.unwrap(optimizer.step) is inspect.unwrap(type(optimizer).step)
        )

    def gradient_scale(self) -> dict[str, float]:
        """Return, by parameter name, the factor from a gradient to an update of plain SGD.

        It is the learning rate of the parameter's group over `local_lr`.
        """
        return {
            name: float(group["lr"]) / self.local_lr
            for group in self.optimizer.param_groups
            for name, p in zip(self._names_of(group["params"]), group["params"], strict=True)
            if p.requires_grad
        }

    def adopt(self, parameters: Mapping[str, Tensor]) -> None:
        """Make a float64 twin of each parameter, by name, for the optimisers to step."""
        self.parameters = parameters
        self.twins = {n: p.detach().double() for n, p in parameters.items()}
        self._start = {n: t.clone() for n, t in self.twins.items()}

    @property
    def total(self) -> dict[str, Tensor]:
        """What was subtracted since `adopt`, divided by `local_lr`, float64, by name."""
        return {n: (self._start[n] - t) / self.local_lr for n, t in self.twins.items()}

    def run(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        project: Callable[[Mapping[str, Tensor]], None] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Do one step of an optimiser on the twins in place of the parameters.

        Args:
            optimizer: One of `optimizers`.
            closure: Computes the gradients of the parameters.
            project: Changes the twins in place after the step.
            **kwargs: For the optimiser's `step`.

        Returns:
            What the optimiser's `step` returns.

        Raises:
            ConfigurationError: If the optimiser changes parameters of the module itself: there are
                twins in its groups.
        """
        held: list[list[Any]] = []
        versions: dict[str, int] = {}
        changed = False

        def enter() -> None:
            self.take_over()
            versions.update((n, p._version) for n, p in self.parameters.items())
            held[:] = [list(group["params"]) for group in optimizer.param_groups]
            for group, real in zip(optimizer.param_groups, held, strict=True):
                group["params"][:] = self._twins_of(real)

        def leave() -> None:
            for group, real in zip(optimizer.param_groups, held, strict=True):
                group["params"][:] = real
            for real in held if project is None else [list(self.parameters.values())]:
                self._publish(real)

        def evaluate() -> Any:
            nonlocal changed
            for group, real in zip(optimizer.param_groups, held, strict=True):
                group["params"][:] = real
            if changed:  # an optimiser may call its closure again after it has moved the twins
                for real in held:
                    self._publish(real)
            changed = True
            with torch.enable_grad():
                result = closure()
            enter()
            return result

        with _hooks_outside(optimizer, {"closure": evaluate, **kwargs}) as arguments:
            enter()
            try:
                result = optimizer.step(**arguments)
                self._check_untouched(optimizer, versions)
                if project is not None:
                    project(self.twins)
            finally:
                leave()
        return result

    def _check_untouched(self, optimizer: Optimizer, versions: Mapping[str, int]) -> None:
        touched = [n for n, p in self.parameters.items() if p._version != versions[n]]
        if touched:
            raise ConfigurationError(
                f"`{type(optimizer).__name__}.step` changes `{touched[0]}` of {self.name}, but "
                "local training lets an optimizer step copies of the parameters. HINT: change what "
                "is in `self.param_groups`, or do it in a hook (`register_step_post_hook`)."
            )

    def take_over(self) -> None:
        """Copy into the twins the changes of parameters that no optimiser has made."""
        with torch.no_grad():
            for name, twin in self.twins.items():
                parameter, image = self.parameters[name], twin.float()
                if not torch.equal(parameter, image):
                    twin.copy_(torch.where(parameter == image, twin, parameter.double()))

    def _twins_of(self, parameters: list[Any]) -> list[Any]:
        """Return the twin of each parameter, with its gradient; the parameter if it has no twin."""
        twins = []
        for name, parameter in zip(self._names_of(parameters), parameters, strict=True):
            twin = self.twins.get(name)
            gradient = parameter.grad
            if twin is not None:
                twin.grad = None if gradient is None else gradient.double()
            elif gradient is not None:
                raise ConfigurationError(
                    f"`{name}` of {self.name} is trained now, but was frozen when the federation "
                    "was made. HINT: leave its `requires_grad` on from the start."
                )
            twins.append(parameter if twin is None else twin)
        return twins

    def _publish(self, parameters: list[Any]) -> None:
        """Give the parameters the values of their twins, where those have changed."""
        with torch.no_grad():
            for name, parameter in zip(self._names_of(parameters), parameters, strict=True):
                if name in self.twins:
                    image = self.twins[name].float()
                    # Copying equal values, too, would make autograd refuse graphs made before.
                    if not torch.equal(parameter, image):
                        parameter.copy_(image)

    def step(self, gradients: Mapping[str, Tensor], end_of_epoch: bool) -> dict[str, Tensor]:
        """Step the twins of a single optimiser by given gradients, and its schedulers if due.

        Args:
            gradients: Gradients by parameter name.
            end_of_epoch: Whether this is the last step of an epoch.

        Returns:
            The new parameters in float32, by name.
        """
        if not self._steps_in_epoch and not self._epochs:
            for group in self.param_groups:
                names = self._names_of(group["params"])
                group["params"] = [self.twins[n] for n in names if n in self.twins]
        for name, twin in self.twins.items():
            twin.grad = gradients[name].to(twin.dtype)
        self.optimizer.step()
        self._steps_in_epoch += 1
        for config in self.schedulers:
            if config.is_due("step", self._steps_in_epoch):
                config.scheduler.step()
        if end_of_epoch:
            self._steps_in_epoch = 0
            self._epochs += 1
            for config in self.schedulers:
                if config.is_due("epoch", self._epochs):
                    config.scheduler.step()
        return {n: t.float() for n, t in self.twins.items()}


@contextmanager
def _hooks_outside(optimizer: Optimizer, kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Call the hooks of an optimiser's step before and after the block, and not in it.

    There, the parameters in its groups are those of the module.

    Args:
        optimizer: The optimiser.
        kwargs: Arguments of its `step`.

    Yields:
        The arguments, which hooks may have changed.
    """
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    given: Any = ((optimizer,), kwargs)
    for hook in list(before.values()):
        given = hook(optimizer, *given) or given
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()
    try:
        yield given[1]
    finally:
        optimizer._optimizer_step_pre_hooks = before
        optimizer._optimizer_step_post_hooks = after
    for hook in list(after.values()):
        hook(optimizer, *given)
