"""A round of local training, in the order of Lightning's fit loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from fedrec.clients.batches import failures_explained
from fedrec.clients.hooks import call, is_overridden, run
from fedrec.clients.local import clear_gradients, gradients_in, scaled
from fedrec.clients.objective import LocalObjective
from fedrec.clients.optimizer import LocalOptimizer
from fedrec.clients.step import loss_of, output_of
from fedrec.clients.trainer import LocalTrainer
from fedrec.exceptions import ConfigurationError
from fedrec.types import RoundContext

__all__ = ["LocalFit"]

# Hooks that run after or around an optimiser's step, and can see the changed parameters.
_SEES_THE_STEP = (
    "optimizer_step",
    "lr_scheduler_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
)


class LocalFit:
    """One client's local training in one round: does what `Trainer.fit` does.

    Args:
        client_id: The client that trains.
        batch: Makes a batch from a module, sample indices and a device.
        trainer: The module's trainer, attached to it.
        optimizer: The module's optimisers.
        ctx: The round.
        objective: Objective in place of the module's own loss, or `None`.
    """

    def __init__(
        self,
        client_id: str,
        batch: Callable[[Any, np.ndarray, torch.device], Any],
        trainer: LocalTrainer,
        optimizer: LocalOptimizer,
        ctx: RoundContext,
        objective: LocalObjective | None,
    ) -> None:
        self.client_id, self.make_batch = client_id, batch
        self.trainer, self.optimizer = trainer, optimizer
        self.ctx, self.objective = ctx, objective
        self.module: Any = trainer.lightning_module
        self.automatic = bool(getattr(self.module, "automatic_optimization", True))
        if objective is not None and not self.automatic:
            raise ConfigurationError(
                f"{type(self.module).__name__} uses manual optimization, so it can strive for "
                "nothing else than what its `training_step` does. HINT: leave "
                "`automatic_optimization` on and return the loss."
            )
        trainer.optimizers[:] = optimizer.optimizers
        trainer.lr_scheduler_configs[:] = optimizer.schedulers
        trainer.strategy.step = self._step
        if not self.automatic:
            trainer.strategy.stepped = self._stepped
        trainer._logged.in_fit = True
        names = set(ctx.layout.names)
        self.parameters = {n: p for n, p in optimizer.named.items() if n in names}
        # The update of a single step of plain SGD is the gradient. The step itself is left out
        # where no hook would see what it does.
        self.direct = (
            trainer._estimated_stepping_batches == 1
            and self.automatic
            and optimizer.is_plain_sgd
            and objective is None
            and not any(config.reduce_on_plateau for config in optimizer.schedulers)
            and not any(is_overridden(self.module, hook) for hook in _SEES_THE_STEP)
        )
        self.gradients: Mapping[str, Tensor] = {}

    def run(self, batches: Sequence[np.ndarray], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train on the batches of all epochs.

        Args:
            batches: Sample indices for each local step.
            start: The parameters before training, by name; these tensors are not changed.

        Returns:
            What training subtracted from each parameter, divided by the local learning rate.
        """
        trainer, module, size = self.trainer, self.module, self.trainer._num_training_batches
        clear_gradients(self.optimizer.named.values())
        if not self.direct:
            self.optimizer.adopt(self.parameters)
        with trainer._before_data():
            call(module, "on_fit_start")
        call(module, "on_train_start")
        for epoch in range(trainer.max_epochs):
            if trainer.should_stop:
                break
            self._epoch(batches[epoch * size : (epoch + 1) * size])
            trainer.current_epoch += 1
        call(module, "on_train_end")
        call(module, "on_fit_end")
        self._check_parameters()
        if self.direct:
            return self._direct_update(start)
        self.optimizer.take_over()
        return self.optimizer.total

    def _check_parameters(self) -> None:
        """Refuse a module whose parameters are other objects than before training."""
        now = dict(self.module.named_parameters())
        replaced = [name for name, p in self.parameters.items() if now.get(name) is not p]
        if replaced:
            raise ConfigurationError(
                "Local training put other parameters in the place of "
                f"{', '.join(f'`{n}`' for n in replaced[:3])} of {type(self.module).__name__}, "
                "which cannot be sent. HINT: change them in place (`reset_parameters`), or make "
                "layers in `__init__` or `configure_model`."
            )

    def _direct_update(self, start: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of the step that was left out, plus the module's own changes."""
        update = dict(self.gradients) or {n: torch.zeros_like(p) for n, p in start.items()}
        for name, parameter in self.parameters.items():
            now = parameter.detach()
            if not torch.equal(now, start[name]):  # a hook of the module changed the parameter
                moved = (start[name].double() - now.double()) / self.optimizer.local_lr
                update[name] = update[name].double() + moved
        return update

    def _epoch(self, batches: Sequence[np.ndarray]) -> None:
        trainer, module = self.trainer, self.module
        call(module, "on_train_epoch_start")
        trainer.is_last_batch = False
        for step, indices in enumerate(batches):
            if trainer.should_stop:
                break
            trainer.is_last_batch = step + 1 == len(batches)
            if not self._batch(step, indices):
                trainer.is_last_batch = True
                break
        trainer._logged.end_batches()
        call(module, "on_train_epoch_end")
        if trainer.is_last_batch:
            self._step_schedulers("epoch", trainer.current_epoch, plateau=True)
        trainer._logged.end_epoch()

    def _batch(self, step: int, indices: np.ndarray) -> bool:
        """Train on one batch; `False` skips the rest of the epoch."""
        trainer, module = self.trainer, self.module
        batch = self.make_batch(module, indices, self.ctx.device)
        trainer._logged.start_batch(batch)
        goes_on = call(module, "on_train_batch_start", batch, step) != -1
        if bool(getattr(module, "automatic_optimization", True)) is not self.automatic:
            raise ConfigurationError(
                f"{type(module).__name__} changes `automatic_optimization` in the middle of "
                "training. HINT: set it in `__init__`."
            )
        outputs: Any = {}
        if goes_on:
            train = self._automatic if self.automatic else self._manual
            with failures_explained(f"client {self.client_id!r}", module, batch, indices):
                outputs = train(batch, step)
        self._step_schedulers("step", step, plateau=False)
        if trainer.is_last_batch or not goes_on:
            self._step_schedulers("epoch", trainer.current_epoch, plateau=False)
        if not goes_on:
            return False
        call(module, "on_train_batch_end", outputs, batch, step)
        self._step_schedulers("step", step, plateau=True)
        if self.objective is not None and self.objective.is_done(module, batch):
            trainer.should_stop = True
        return True

    def _manual(self, batch: Any, step: int) -> Any:
        output = self._forward(batch, step)
        if isinstance(output, Tensor):
            output = {"loss": output}
        outputs = dict(output or {})
        if isinstance(outputs.get("loss"), Tensor):
            outputs["loss"] = outputs["loss"].detach()
        return outputs

    def _forward(self, batch: Any, step: int) -> Any:
        with self.ctx.autocast():
            if self.objective is not None:
                return self.objective.loss(self.module, batch, step)
            return output_of(self.module, batch, step)

    def _automatic(self, batch: Any, step: int) -> Any:
        trainer, module = self.trainer, self.module
        optimizer = self.optimizer.optimizer
        outputs: dict[str, Any] | None = None

        def closure() -> Tensor | None:
            nonlocal outputs
            with torch.enable_grad():
                output = self._forward(batch, step)
                loss = loss_of(output, module)
                outputs = {} if loss is None else {"loss": loss.detach().clone()}
                if isinstance(output, Mapping):
                    outputs.update((k, v) for k, v in output.items() if k != "loss")
                call(module, "on_before_zero_grad", optimizer)
                if is_overridden(module, "optimizer_zero_grad"):
                    run(module, "optimizer_zero_grad", trainer.current_epoch, step, optimizer)
                else:
                    _zero_grad(optimizer)
                if loss is not None:
                    trainer.strategy.backward(loss, optimizer)
                return outputs.get("loss")

        if is_overridden(module, "optimizer_step"):
            wrapped = trainer.strategy._lightning_optimizers[0]
            run(module, "optimizer_step", trainer.current_epoch, step, wrapped, closure)
        else:
            self._step(optimizer, closure)
        if outputs is None:
            raise ConfigurationError(
                f"{type(module).__name__}.optimizer_step did not call the closure it was given, "
                "which computes the loss. HINT: pass it to `optimizer.step(closure=...)`, or call "
                "it."
            )
        self._stepped()
        return outputs

    def _stepped(self) -> None:
        self.trainer.global_step += 1

    def _step(self, optimizer: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Do an optimiser's step; without moving the parameters if the gradient is the update."""

        def with_hooks() -> Any:
            result = closure()
            self._after_backward(optimizer)
            return result

        if self.direct:
            result = with_hooks()
            scale = self.optimizer.gradient_scale()
            self.gradients = scaled(gradients_in(self.parameters), scale)
            return result
        project = None if self.objective is None else self.objective.project
        return self.optimizer.run(optimizer, with_hooks, project, **kwargs)

    def _after_backward(self, optimizer: Any) -> None:
        module = self.module
        call(module, "on_before_optimizer_step", optimizer)
        if self.automatic and is_overridden(module, "configure_gradient_clipping"):
            none = {"gradient_clip_val": None, "gradient_clip_algorithm": None}
            run(module, "configure_gradient_clipping", optimizer, **none)
        if self.objective is not None:
            changed = self.objective.gradients(gradients_in(self.parameters))
            for name, parameter in self.parameters.items():
                parameter.grad = changed[name]

    def _step_schedulers(self, interval: str, index: int, *, plateau: bool) -> None:
        """Step the schedulers that are due after the step, or the epoch, of this index.

        `plateau` says which schedulers: those that are given a metric, or the others.
        """
        if not self.automatic or self.direct:
            return
        for config in self.optimizer.schedulers:
            if config.reduce_on_plateau != plateau or not config.is_due(interval, index + 1):
                continue
            metric = None
            if plateau:
                metrics = self.trainer.callback_metrics
                metric = metrics.get(config.monitor or "")
                if metric is None and not config.strict:
                    continue
                if metric is None:
                    raise ConfigurationError(
                        f"The scheduler of {type(self.module).__name__} watches "
                        f"{config.monitor!r}, but local training logged {sorted(metrics)}. HINT: "
                        "log it in `training_step`, or watch what is logged."
                    )
            if is_overridden(self.module, "lr_scheduler_step"):
                run(self.module, "lr_scheduler_step", config.scheduler, metric)
            elif metric is None:
                config.scheduler.step()
            else:
                config.scheduler.step(metric)


def _zero_grad(optimizer: Any) -> None:
    """Clear the gradients of an optimiser's parameters, by its own `zero_grad` if it has one."""
    own = type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer)
    if own:
        optimizer.zero_grad()
        return
    # torch's `zero_grad` also notifies a profiler, which takes as long as a layer of a small model.
    clear_gradients(p for group in optimizer.param_groups for p in group["params"])
