"""The loss of a model on the server's clean data."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedrec.clients.local import batch_of, generators_restored, training_step
from fedrec.clients.state import state_of
from fedrec.clients.trainer import LocalTrainer
from fedrec.exceptions import ConfigurationError
from fedrec.federation import Federation
from fedrec.server_training import server_client

__all__ = ["server_loss"]

_BATCH = 256


def server_loss(
    federation: Federation,
    global_weights: Tensor,
    buffers: Tensor | None,
    device: torch.device,
    method: str,
) -> float:
    """Return the mean loss of these weights, without training.

    Args:
        federation: The loss is that of its module's `training_step`, in evaluation mode.
        global_weights: Shape $(d,)$.
        buffers: Averaged buffers, shape $(b,)$, or `None`.
        device: Where to compute.
        method: Names who needs it, in an error.

    Raises:
        ConfigurationError: If the server has no data, or the module gives no loss.
    """
    server = server_client(federation, method)
    module, layout = server.module, federation.layout
    module.to(device)
    layout.load(module, global_weights)
    if buffers is not None:
        layout.load_buffers(module, buffers)
    state = state_of(module)
    total = 0.0
    try:
        module.eval()
        trainer = LocalTrainer(module, device=device)
        with torch.no_grad(), generators_restored(device), trainer.attached():
            for start in range(0, server.num_samples, _BATCH):
                index = np.arange(start, min(start + _BATCH, server.num_samples))
                loss = training_step(module, batch_of(server, module, index, device), 0)
                if loss is None:
                    raise ConfigurationError(
                        f"{method} needs the loss of the model, but the `training_step` of "
                        f"{type(module).__name__} skips a batch of the server's data."
                    )
                total += float(loss) * len(index)
    finally:
        state.restore()
    return total / server.num_samples
