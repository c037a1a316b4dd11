"""The parts of local training that every executor shares: gradients, randomness, logging."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedrec.clients.generators import global_state, put_global_state
from fedrec.clients.held_generators import held_restored, seed_held
from fedrec.clients.hooks import is_overridden, run
from fedrec.clients.step import training_step
from fedrec.clients.trainer import as_number
from fedrec.random import key
from fedrec.types import RoundContext

__all__ = [
    "LogMeans",
    "changes_batches",
    "clear_gradients",
    "generators_restored",
    "gradients_in",
    "gradients_of",
    "mean_logs",
    "random_numbers",
    "scaled",
    "seed_generators",
    "transferred",
]

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def changes_batches(module: Any) -> bool:
    """Whether hooks of the module make something of batches before it gets them."""
    return any(is_overridden(module, hook) for hook in _TRANSFERS)


def transferred(module: Any, batch: Any, device: torch.device) -> Any:
    """Move a batch to the device as Lightning does, with the module's hooks."""
    if is_overridden(module, "on_before_batch_transfer"):
        batch = run(module, "on_before_batch_transfer", batch, 0)
    batch = run(module, "transfer_batch_to_device", batch, device, 0)
    if is_overridden(module, "on_after_batch_transfer"):
        batch = run(module, "on_after_batch_transfer", batch, 0)
    return batch


@contextmanager
def random_numbers(ctx: RoundContext, client_id: str, held: Sequence[Any] = ()) -> Iterator[None]:
    """Make what local training draws (dropout, augmentation) a function of the round.

    That goes for torch, NumPy's global generator and Python's `random`, which are left as they were
    found, and for generators that the data set holds.

    Args:
        ctx: The round.
        client_id: Who trains.
        held: Those of the data set, see `held_generators`.
    """
    with generators_restored(ctx.device, held):
        seed_generators(ctx, client_id, held)
        yield


@contextmanager
def generators_restored(device: torch.device, held: Sequence[Any] = ()) -> Iterator[None]:
    """Leave the global generators (torch's those of this device), and these, as they were found."""
    devices = [] if device.type == "cpu" else [device]
    state = global_state()
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        try:
            with held_restored(held):
                yield
        finally:
            put_global_state(state)


def seed_generators(ctx: RoundContext, client_id: str, held: Sequence[Any] = ()) -> None:
    """Seed the global generators, and these, for this client's training in this round."""
    purpose = "training" if ctx.batch_policy == "replay" else "training-fresh"
    whole = key(ctx.seed, purpose, ctx.round, client_id)
    seed = whole & (2**63 - 1)
    # `torch.manual_seed` would seed every device there could be, in half a millisecond.
    torch.default_generator.manual_seed(seed)
    if ctx.device.type == "cuda":
        torch.cuda.manual_seed(seed)
    random.seed(whole)
    words = np.frombuffer(whole.to_bytes(16, "little"), dtype="<u4")
    np.random.seed(words)  # noqa: NPY002 - what the user's code may draw from
    seed_held(held, ctx.seed, f"{purpose}-held", ctx.round, client_id)


def gradients_of(
    module: Any,
    parameters: Mapping[str, nn.Parameter],
    batch: Any,
    step: int,
    ctx: RoundContext,
) -> dict[str, Tensor] | None:
    """Return the gradient of one training step by parameter name; `None` if there is no loss."""
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
    """Return the gradients that these parameters hold, dense, zeros where there is none."""
    found = {}
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        found[name] = gradient if gradient.layout == torch.strided else gradient.to_dense()
    return found


def clear_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Leave no gradient in these parameters."""
    for parameter in parameters:
        parameter.grad = None


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
                value = as_number(value, name)
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


def mean_logs(logs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average what several clients logged."""
    values: dict[str, list[float]] = {}
    for one in logs:
        for name, value in one.items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(v)) for name, v in values.items()}
