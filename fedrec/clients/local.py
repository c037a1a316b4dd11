"""The parts of local training that every executor shares: batches, gradients, buffers, logging."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedrec.clients.hooks import is_overridden, run
from fedrec.clients.step import training_step
from fedrec.clients.trainer import as_number
from fedrec.exceptions import ConfigurationError
from fedrec.parameters import averageable_buffers
from fedrec.types import RoundContext

__all__ = [
    "LogMeans",
    "buffers_after",
    "changes_batches",
    "clear_gradients",
    "gradients_in",
    "gradients_of",
    "mean_logs",
    "scaled",
    "transferred",
]

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def changes_batches(module: Any) -> bool:
    """Whether the module overrides a hook of Lightning's that may change a batch."""
    return any(is_overridden(module, hook) for hook in _TRANSFERS)


def transferred(module: Any, batch: Any, device: torch.device) -> Any:
    """Move a batch to the device by the module's hooks, in Lightning's order."""
    if is_overridden(module, "on_before_batch_transfer"):
        batch = run(module, "on_before_batch_transfer", batch, 0)
    batch = run(module, "transfer_batch_to_device", batch, device, 0)
    if is_overridden(module, "on_after_batch_transfer"):
        batch = run(module, "on_after_batch_transfer", batch, 0)
    return batch


def gradients_of(
    module: Any,
    parameters: Mapping[str, nn.Parameter],
    batch: Any,
    step: int,
    ctx: RoundContext,
) -> dict[str, Tensor] | None:
    """Return the gradients of one training step by parameter name, or `None` if it has no loss."""
    clear_gradients(parameters.values())
    with ctx.autocast():
        loss = training_step(module, batch, step)
    if loss is None:
        return None
    loss.backward()
    gradients = gradients_in(parameters)
    clear_gradients(parameters.values())
    return gradients


def gradients_in(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the `grad` of each parameter by name, dense; zeros where a parameter has none."""
    gradients = {}
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        gradients[name] = gradient if gradient.layout == torch.strided else gradient.to_dense()
    return gradients


def clear_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Set the `grad` of each parameter to `None`."""
    for parameter in parameters:
        parameter.grad = None


def scaled(gradients: Mapping[str, Tensor], scale: Mapping[str, float]) -> dict[str, Tensor]:
    """Multiply each gradient by its factor; without a factor, the parameter is frozen: by 0."""
    factors = {n: scale.get(n, 0.0) for n in gradients}
    return {n: g if factors[n] == 1.0 else g * factors[n] for n, g in gradients.items()}


def buffers_after(module: nn.Module, ctx: RoundContext, changes: Collection[str]) -> Tensor | None:
    """Return the averaged buffers after local training.

    Args:
        module: The module after training, before its state is put back.
        ctx: The round.
        changes: Dotted names of the state that training changed, see `ModuleState.changes`.

    Returns:
        Shape $(b,)$, or `None` if no buffers are averaged.

    Raises:
        ConfigurationError: If training changed a floating-point buffer that is not averaged: its
            change would be lost.
    """
    layout = ctx.layout
    if changes:
        others = set(averageable_buffers(module)).difference(layout.buffer_names)
        changed = [name for name in changes if name in others]
        if changed:
            raise ConfigurationError(
                f"Training changed buffers of {type(module).__name__} in round {ctx.round} which "
                "are not averaged, so that it would be lost: "
                f"{', '.join(f'`{n}`' for n in changed)}. "
                "Those that one client changes in its first local trainings are found before the "
                "first round. HINT: change them in every local training and pass "
                '`buffers="average"`, or in none.'
            )
    return layout.buffers(module) if ctx.buffers is not None else None


class LogMeans:
    """Means over clients of the values their modules log, fetched from the device all at once.

    For clients that are computed together, whose values stay on the device until then.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Any]] = {}
        self._counts: dict[str, list[int]] = {}

    def add(self, logs: Mapping[str, Any], num_clients: int = 1) -> None:
        """Add the values that one client logged, or means over several clients."""
        for name, value in logs.items():
            if isinstance(value, Tensor):
                value = value.detach().reshape(()).float()
            else:
                value = as_number(value, name)
            self._values.setdefault(name, []).append(value)
            self._counts.setdefault(name, []).append(num_clients)

    def result(self) -> dict[str, float]:
        """Return the means by name."""
        means = {}
        for name, values in self._values.items():
            if all(isinstance(v, Tensor) for v in values):
                values = torch.stack(values).tolist()
            counts = self._counts[name]
            total = sum(float(v) * n for v, n in zip(values, counts, strict=True))
            means[name] = total / sum(counts)
        return means


def mean_logs(logs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means over clients, by name, of the numbers that each client logged."""
    values: dict[str, list[float]] = {}
    for client_logs in logs:
        for name, value in client_logs.items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(v)) for name, v in values.items()}
