"""Warning where clients' updates are no gradients, as estimates from curvature assume."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.optim import SGD

from fedrec.clients.lightning import LightningClient
from fedrec.clients.optimizer import LocalOptimizer
from fedrec.clients.state import state_of

if TYPE_CHECKING:
    from fedrec.federation import Federation

__all__ = ["warn_unless_gradients"]

_log = logging.getLogger(__name__)


def warn_unless_gradients(federation: Federation, remaining: Sequence[str], method: str) -> None:
    """Warn of clients whose update is not the gradient of one mini-batch.

    The update of one step of SGD is the gradient, with momentum, too, since every round has a new
    optimizer. Clients that are no `LightningClient` are not checked.

    Args:
        federation: The clients.
        remaining: Ids of the clients that take part.
        method: Name of the recovery.
    """
    optimizers: dict[int, type] = {}
    counts: dict[str, int] = {}
    for client in federation.clients:
        if not isinstance(client, LightningClient) or client.client_id not in remaining:
            continue
        key, trainer = id(client.module), client.local_trainer(client.module)
        if key not in optimizers:
            state = state_of(client.module)
            with trainer.attached():
                optimizer = LocalOptimizer(client.module, client.local_lr or 1.0).optimizer
            optimizers[key] = type(optimizer)
            state.restore()
        steps, name = trainer.estimated_stepping_batches, optimizers[key].__name__
        if steps > 1 or optimizers[key] is not SGD:
            training = f"several steps of {name}" if steps > 1 else f"a step of {name}"
            counts[training] = counts.get(training, 0) + 1
    if counts:
        listed = ", ".join(f"{count} by {training}" for training, count in counts.items())
        _log.warning(
            "%s estimates updates as if they were gradients, but those of clients are made "
            "otherwise (%s): estimates may be far off. HINT: `diagnose=True` measures how far.",
            method,
            listed,
        )
