"""The optimiser of local training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fedrec.exceptions import ConfigurationError, FedrecError

if TYPE_CHECKING:
    from fedrec.clients.objective import LocalObjective

__all__ = ["LocalOptimizer"]


class LocalOptimizer:
    r"""The optimiser of one round of local training, and what it subtracted.

    One step of plain SGD subtracts a multiple of the gradient, so the gradient itself is the
    update. Otherwise the optimiser works on float64 twins of the parameters, and what it subtracts
    is accumulated there: a difference of float32 weights would lose three digits.

    The parameters may carry a leading client dimension (see `VectorizedExecutor`).

    Args:
        module: LightningModule whose `configure_optimizers` is called.
        local_lr: What to divide the accumulated steps by; `None` for the optimiser's one learning
            rate.
        lr: Learning rate to set, kept constant; `None` for the optimiser's own.

    Raises:
        ConfigurationError: If the optimiser cannot be used, or `local_lr` cannot be found.
    """

    def __init__(self, module: nn.Module, local_lr: float | None, lr: float | None = None) -> None:
        self.name = type(module).__name__
        if not getattr(module, "automatic_optimization", True):
            raise ConfigurationError(
                f"{self.name} uses manual optimization, which local training does not support. "
                "HINT: leave `automatic_optimization` on and return the loss, or write a Client."
            )
        self.optimizer, self.schedulers = self._configure(module)
        if lr is not None:
            self.schedulers, local_lr = [], lr
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        rates = {float(group["lr"]) for group in self.optimizer.param_groups}
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
        by_identity = {id(p): n for n, p in module.named_parameters()}
        foreign = [
            tuple(p.shape)
            for group in self.optimizer.param_groups
            for p in group["params"]
            if id(p) not in by_identity
        ]
        if foreign:
            raise ConfigurationError(
                f"The optimizer of {self.name} has parameters of shapes {foreign} that are not the "
                "module's. HINT: pass it `self.parameters()`, or make them attributes of it."
            )
        self.groups = [
            [by_identity[id(p)] for p in group["params"] if p.requires_grad]
            for group in self.optimizer.param_groups
        ]

    def _configure(self, module: nn.Module) -> tuple[Optimizer, list[tuple[Any, str]]]:
        made: Any = module.configure_optimizers()  # type: ignore[operator]
        schedulers: list[Any] = []
        if isinstance(made, dict):
            schedulers = [made["lr_scheduler"]] if "lr_scheduler" in made else []
            made = made["optimizer"]
        elif isinstance(made, (list, tuple)):
            if len(made) == 2 and all(isinstance(part, (list, tuple)) for part in made):
                made, schedulers = list(made[0]), list(made[1])
            if len(made) != 1:
                raise ConfigurationError(
                    f"{self.name} configures {len(made)} optimizers, but local training uses one. "
                    "HINT: return a single optimizer with several parameter groups."
                )
            made = made[0]
        if not isinstance(made, Optimizer) or isinstance(made, torch.optim.LBFGS):
            raise ConfigurationError(
                f"Expected {self.name}.configure_optimizers to return a first-order optimizer, "
                f"but got {type(made).__name__}."
            )
        pairs = [
            (s["scheduler"], s.get("interval", "epoch")) if isinstance(s, dict) else (s, "epoch")
            for s in schedulers
        ]
        return made, pairs

    @property
    def is_plain_sgd(self) -> bool:
        """Whether a step subtracts exactly learning rate times gradient."""
        return type(self.optimizer) is SGD and not any(
            g["momentum"] or g["weight_decay"] or g["maximize"] for g in self.optimizer.param_groups
        )

    @property
    def is_elementwise(self) -> bool:
        """Whether parameters of several clients can be stepped as one stacked tensor."""
        return isinstance(
            self.optimizer,
            (
                SGD,
                torch.optim.Adam,
                torch.optim.AdamW,
                torch.optim.Adamax,
                torch.optim.NAdam,
                torch.optim.RAdam,
                torch.optim.RMSprop,
                torch.optim.Adagrad,
                torch.optim.Adadelta,
            ),
        )

    def gradient_scale(self) -> dict[str, float]:
        """Return learning rate over `local_lr` by parameter name, for one step of plain SGD."""
        return {
            name: float(group["lr"]) / self.local_lr
            for names, group in zip(self.groups, self.optimizer.param_groups, strict=True)
            for name in names
        }

    def adopt(self, parameters: Mapping[str, Tensor]) -> None:
        """Make the optimiser work on float64 twins of these parameters, by name."""
        self.twins = {n: p.detach().double() for n, p in parameters.items()}
        self.total = {n: torch.zeros_like(t) for n, t in self.twins.items()}
        for names, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            group["params"] = [self.twins[n] for n in names]

    def step(
        self,
        gradients: dict[str, Tensor],
        end_of_epoch: bool,
        objective: LocalObjective | None = None,
    ) -> dict[str, Tensor]:
        """Do one step on the twins and return the new parameters in float32, by name."""
        before = {n: t.clone() for n, t in self.twins.items()}
        for name, twin in self.twins.items():
            twin.grad = gradients[name].to(twin.dtype)
        self.optimizer.step()
        if objective is not None:
            objective.project(self.twins)
        for name, twin in self.twins.items():
            self.total[name] += (before[name] - twin) / self.local_lr
        for scheduler, interval in self.schedulers:
            if interval == "step" or end_of_epoch:
                try:
                    scheduler.step()
                except TypeError as error:
                    raise FedrecError(
                        f"The learning-rate scheduler of {self.name} needs a metric, which local "
                        "training does not have. HINT: use one that steps by count."
                    ) from error
        return {n: t.float() for n, t in self.twins.items()}
