"""The parts of local training that every executor shares: gradients, randomness, logging."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedrec.exceptions import ConfigurationError
from fedrec.random import key
from fedrec.types import RoundContext

if TYPE_CHECKING:
    from fedrec.clients.objective import LocalObjective

__all__ = [
    "LogMeans",
    "as_number",
    "capture_logs",
    "generators_restored",
    "gradients_of",
    "loss_of",
    "mean_logs",
    "random_numbers",
    "scaled",
    "seed_torch",
    "training_step",
]


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
    with generators_restored(ctx.device):
        seed_torch(ctx, client_id)
        yield


@contextmanager
def generators_restored(device: torch.device) -> Iterator[None]:
    """Leave the generators that torch draws from on this device as they were found."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        yield


def seed_torch(ctx: RoundContext, client_id: str) -> None:
    """Seed the generators that torch draws from in this client's training in this round."""
    purpose = "training" if ctx.batch_policy == "replay" else "training-fresh"
    seed = key(ctx.seed, purpose, ctx.round, client_id) & (2**63 - 1)
    # `torch.manual_seed` would seed every device there could be, in half a millisecond.
    torch.default_generator.manual_seed(seed)
    if ctx.device.type == "cuda":
        torch.cuda.manual_seed(seed)


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


def gradients_of(
    module: Any,
    parameters: Mapping[str, nn.Parameter],
    batch: Any,
    step: int,
    ctx: RoundContext,
    objective: LocalObjective | None = None,
) -> dict[str, Tensor] | None:
    """Return the gradient of one training step by parameter name; `None` if there is no loss."""
    with ctx.autocast():
        if objective is None:
            loss = training_step(module, batch, step)
        else:
            loss = objective.loss(module, batch, step)
    if loss is None:
        return None
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    gradients = {
        n: torch.zeros_like(p) if g is None else g
        for (n, p), g in zip(parameters.items(), found, strict=True)
    }
    return gradients if objective is None else objective.gradients(gradients)


def scaled(gradients: Mapping[str, Tensor], scale: Mapping[str, float]) -> dict[str, Tensor]:
    """Multiply gradients by factors; a parameter without one does not change in training."""
    factors = {n: scale.get(n, 0.0) for n in gradients}
    return {n: g if factors[n] == 1.0 else g * factors[n] for n, g in gradients.items()}


class LogMeans:
    """Means over clients of what their modules log, fetched from the device all at once."""

    def __init__(self) -> None:
        self._values: dict[str, list[Any]] = {}
        self._counts: dict[str, list[int]] = {}

    def add(self, logs: Mapping[str, Any], num_clients: int = 1) -> None:
        """Add what was logged by one client, or as a mean over several."""
        for name, value in logs.items():
            if isinstance(value, Tensor):
                value = value.detach().reshape(()).float()
            else:
                value = as_number(value)
            self._values.setdefault(name, []).append(value)
            self._counts.setdefault(name, []).append(num_clients)

    def result(self) -> dict[str, float]:
        """Return the means by name."""
        found = {}
        for name, values in self._values.items():
            if all(isinstance(v, Tensor) for v in values):
                values = torch.stack(values).tolist()
            counts = self._counts[name]
            total = sum(float(v) * n for v, n in zip(values, counts, strict=True))
            found[name] = total / sum(counts)
        return found


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
