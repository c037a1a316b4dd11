"""The parts of local training that every executor shares: batches, optimiser, logging."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset, TensorDataset, default_collate

from fedrec.exceptions import ConfigurationError, FedrecError
from fedrec.random import key, numpy_generator
from fedrec.types import RoundContext

__all__ = [
    "LocalOptimizer",
    "as_number",
    "batch_indices",
    "capture_logs",
    "loss_of",
    "mean_logs",
    "random_numbers",
    "take",
    "training_step",
]


def batch_indices(
    *,
    seed: int,
    round: int,
    client_id: str,
    num_samples: int,
    batch_size: int | None,
    local_steps: int | None,
    local_epochs: int | None,
    purpose: str = "batch",
) -> list[np.ndarray]:
    """Draw the mini-batches of one client in one round, without replacement within an epoch.

    Args:
        seed: Seed of the recording.
        round: Round $t$.
        client_id: Name of the client.
        num_samples: Size of the data set that batches are drawn from.
        batch_size: Samples per batch; `None`, or at least `num_samples`, for the full batch, which
            needs no randomness.
        local_steps: Batches to draw; exactly one of this and `local_epochs` is not `None`.
        local_epochs: Passes over the data; the last batch of a pass may be smaller.
        purpose: Name of the random stream; another name gives other batches.

    Returns:
        One array of indices per local step.
    """
    size = num_samples if batch_size is None else min(batch_size, num_samples)
    if size == num_samples:
        steps = local_steps if local_steps is not None else local_epochs
        return [np.arange(num_samples)] * (steps or 0)
    generator = numpy_generator(seed, purpose, round, client_id)
    if local_epochs is not None:
        return [
            order[i : i + size]
            for order in (generator.permutation(num_samples) for _ in range(local_epochs))
            for i in range(0, num_samples, size)
        ]
    batches: list[np.ndarray] = []
    order = generator.permutation(num_samples)
    start = 0
    for _ in range(local_steps or 0):
        if start + size > num_samples:
            order, start = generator.permutation(num_samples), 0
        batches.append(order[start : start + size])
        start += size
    return batches


def take(dataset: Dataset[Any], indices: np.ndarray, device: torch.device) -> Any:
    """Return the collated samples at these indices, on the device."""
    if type(dataset) is TensorDataset:  # a subclass may transform in __getitem__
        index = torch.from_numpy(indices)
        return tuple(t[index.to(t.device)].to(device) for t in dataset.tensors)
    batch = default_collate([dataset[int(i)] for i in indices])
    return _to(batch, device)


def _to(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {k: _to(v, device) for k, v in batch.items()}
    if isinstance(batch, (list, tuple)):
        return tuple(_to(v, device) for v in batch)
    return batch


def training_step(module: Any, batch: Any, step: int) -> Tensor | None:
    """Call the module's `training_step`, with or without a batch index, and return its loss."""
    positional = _number_of_arguments(type(module).training_step)
    output = module.training_step(batch, step) if positional > 1 else module.training_step(batch)
    return loss_of(output, module)


@lru_cache
def _number_of_arguments(method: Any) -> float:
    """Count the positional arguments of a method after `self`."""
    kinds = [p.kind for p in inspect.signature(method).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return math.inf
    keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return sum(kind not in keyword for kind in kinds) - 1


@contextmanager
def random_numbers(ctx: RoundContext, client_id: str) -> Iterator[None]:
    """Make what local training draws from torch (dropout, augmentation) a function of the round.

    The generators are left as they were found.
    """
    purpose = "training" if ctx.batch_policy == "replay" else "training-fresh"
    devices = [] if ctx.device.type == "cpu" else [ctx.device]
    with torch.random.fork_rng(devices=devices, device_type=ctx.device.type if devices else "cuda"):
        torch.manual_seed(key(ctx.seed, purpose, ctx.round, client_id) & (2**63 - 1))
        yield


def loss_of(output: Any, module: nn.Module) -> Tensor | None:
    """Return the loss in what a `training_step` returned; `None` means to skip the step."""
    loss = output.get("loss") if isinstance(output, dict) else output
    if loss is None:
        return None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigurationError(
            f"Expected {type(module).__name__}.training_step to return a scalar loss tensor, a "
            f"dict with one under 'loss', or None, but got {type(output).__name__}."
        )
    return loss.reshape(())


@contextmanager
def capture_logs(module: nn.Module, num_steps: int) -> Iterator[dict[str, Any]]:
    """Make `self.log` and `self.trainer` work inside a `training_step` without a Trainer.

    Yields:
        What was logged last, by name.
    """
    logs: dict[str, Any] = {}

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        logs[name] = value

    state = vars(module)
    before = state.get("_trainer")
    state["log"] = log
    state["_trainer"] = SimpleNamespace(
        max_epochs=1,
        max_steps=num_steps,
        current_epoch=0,
        global_step=0,
        num_training_batches=num_steps,
        training=True,
        sanity_checking=False,
        is_global_zero=True,
        world_size=1,
        logger=None,
        loggers=[],
        callback_metrics={},
        logged_metrics={},
    )
    try:
        yield logs
    finally:
        state.pop("log", None)
        state["_trainer"] = before


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

    Raises:
        ConfigurationError: If the optimiser cannot be used, or `local_lr` cannot be found.
    """

    def __init__(self, module: nn.Module, local_lr: float | None) -> None:
        self.name = type(module).__name__
        if not getattr(module, "automatic_optimization", True):
            raise ConfigurationError(
                f"{self.name} uses manual optimization, which local training does not support. "
                "HINT: leave `automatic_optimization` on and return the loss, or write a Client."
            )
        self.optimizer, self.schedulers = self._configure(module)
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

    def step(self, gradients: dict[str, Tensor], end_of_epoch: bool) -> dict[str, Tensor]:
        """Do one step on the twins and return the new parameters in float32, by name."""
        before = {n: t.clone() for n, t in self.twins.items()}
        for name, twin in self.twins.items():
            twin.grad = gradients[name].to(twin.dtype)
        self.optimizer.step()
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


def mean_logs(logs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Average what several clients logged; metric objects are computed first."""
    values: dict[str, list[float]] = {}
    for one in logs:
        for name, value in one.items():
            values.setdefault(name, []).append(as_number(value))
    return {name: float(np.mean(v)) for name, v in values.items()}


def as_number(value: Any) -> float:
    """Turn what `self.log` was given (number, tensor or metric object) into a number."""
    if hasattr(value, "compute") and hasattr(value, "reset"):
        result = value.compute()
        value.reset()
        value = result
    return float(value.detach()) if isinstance(value, Tensor) else float(value)
