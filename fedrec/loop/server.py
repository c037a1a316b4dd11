"""Training, and computing a loss, on the server's own clean data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrec.clients.base import Client
from fedrec.clients.generators import generators_restored
from fedrec.clients.lightning import LightningClient
from fedrec.clients.objective import LocalWork
from fedrec.clients.state import state_of
from fedrec.clients.step import training_step
from fedrec.clients.trainer import LocalTrainer
from fedrec.exceptions import AggregationError, ConfigurationError
from fedrec.executors.sequential import SequentialExecutor
from fedrec.federation import Federation
from fedrec.types import CohortUpdates, RoundContext

__all__ = [
    "no_server_data",
    "require_lightning",
    "server_client",
    "server_loss",
    "server_outputs",
    "trained",
]

_BATCH = 256


def no_server_data(method: str) -> str:
    """Return the error text for a method that needs clean data at the server."""
    return (
        f"{method} needs clean data at the server, but there are none. HINT: set "
        "`server_samples=` of the data module, or, in Python, `server_data=` of the federation."
    )


def server_client(federation: Federation, method: str) -> LightningClient:
    """Return a client with the server's data that trains like the first `LightningClient`.

    Args:
        federation: Clients and the server's data.
        method: Name of the method that needs the data, for errors.

    Raises:
        ConfigurationError: If the server has no data, or no client is a `LightningClient`.
    """
    data = federation.server_data
    num_samples = 0 if data is None else len(data)  # type: ignore[arg-type]
    if data is None or num_samples == 0:
        raise ConfigurationError(no_server_data(method))
    for client in federation.clients:
        if isinstance(client, LightningClient):
            server = client.with_dataset(data)
            server.client_id, server.num_samples = "server", num_samples
            return server
    raise ConfigurationError(
        f"{method} lets the server train as its clients do, but none of them is a LightningClient, "
        "which fedrec could train with other data. HINT: make one of them a LightningClient."
    )


def trained(server: Client, global_weights: Tensor, ctx: RoundContext) -> CohortUpdates:
    """Return what the server's client sends after training from the weights.

    Raises:
        AggregationError: If its update is not finite.
    """
    sent = SequentialExecutor().compute([server], global_weights, ctx)
    if not bool(sent.updates.isfinite().all()):
        raise AggregationError(
            f"The server's own update of round {ctx.round} has NaN or infinity. Nothing of "
            "this round was stored. HINT: training diverges; lower the learning rate."
        )
    return sent


def require_lightning(work: LocalWork, clients: Sequence[Client]) -> None:
    """Raise `ConfigurationError` if `work` needs a `LightningClient` and a client is none."""
    other = next((c for c in clients if not isinstance(c, LightningClient)), None)
    if other is not None and not work.is_as_usual:
        raise ConfigurationError(
            f"Client {other.client_id!r} is a {type(other).__name__}, which fedrec cannot train "
            "with another objective or learning rate. HINT: make it a LightningClient."
        )


def server_loss(
    federation: Federation,
    global_weights: Tensor,
    buffers: Tensor | None,
    device: torch.device,
    method: str,
) -> float:
    """Return the mean loss of global weights on the server's data, without training.

    It is the loss of the module's `training_step`, in evaluation mode.

    Args:
        federation: Clients and the server's data.
        global_weights: Shape $(d,)$.
        buffers: Averaged buffers, shape $(b,)$, or `None`.
        device: The device to compute on.
        method: Name of the method that needs the loss, for errors.

    Raises:
        ConfigurationError: If the server has no data, or the module gives no loss.
    """
    server = server_client(federation, method)
    module = server.module.to(device)
    total = 0.0
    with _evaluating(federation, module, global_weights, buffers, device):
        trainer = LocalTrainer(module, device=device)
        with trainer.attached():
            for start in range(0, server.num_samples, _BATCH):
                index = np.arange(start, min(start + _BATCH, server.num_samples))
                loss = training_step(module, server.batch(module, index, device), 0)
                if loss is None:
                    raise ConfigurationError(
                        f"{method} needs the loss of the model, but the `training_step` of "
                        f"{type(module).__name__} skips a batch of the server's data."
                    )
                total += float(loss) * len(index)
    return total / server.num_samples


def server_outputs(
    federation: Federation,
    buffers: Tensor | None,
    weights: Tensor,
    inputs: Tensor,
) -> Tensor:
    """Return what the model with some weights says to a batch of inputs, in evaluation mode.

    Args:
        federation: Has the model.
        buffers: Averaged buffers, shape $(b,)$, or `None`.
        weights: Shape $(d,)$.
        inputs: Shape $(N, ...)$, on the device of the model.
    """
    module = federation.module
    with _evaluating(federation, module, weights, buffers, inputs.device):
        found: Tensor = module(inputs)
    return found


@contextmanager
def _evaluating(
    federation: Federation,
    module: Any,
    weights: Tensor,
    buffers: Tensor | None,
    device: torch.device,
) -> Iterator[None]:
    """Load weights into the module, and put it into evaluation mode until exit, without gradients.

    What a pass changes besides, generators among it, is as before on exit.
    """
    layout = federation.layout
    layout.load(module, weights)
    if buffers is not None:
        layout.load_buffers(module, buffers)
    state = state_of(module)
    try:
        module.eval()
        with torch.no_grad(), generators_restored(device):
            yield
    finally:
        state.restore()
