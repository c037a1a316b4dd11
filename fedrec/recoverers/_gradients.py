"""Whether what clients send is a gradient, as estimates from curvature take it to be."""

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
    """Warn of clients that send something else than the gradient of one mini-batch.

    One step of SGD sends it, momentum or not, since every round has an optimizer of its own. What a
    client that is no `LightningClient` sends, nobody knows.

    Args:
        federation: The clients.
        remaining: Those that take part.
        method: Name of the recovery.
    """
    optimizers: dict[int, type] = {}
    found: dict[str, int] = {}
    for client in federation.clients:
        if not isinstance(client, LightningClient) or client.client_id not in remaining:
            continue
        key, trainer = id(client.module), client.local_trainer(client.module)
        if key not in optimizers:
            state = state_of(client.module)
            with trainer.attached():
                made = LocalOptimizer(client.module, client.local_lr or 1.0).optimizer
            optimizers[key] = type(made)
            state.restore()
        steps, name = trainer.estimated_stepping_batches, optimizers[key].__name__
        if steps > 1 or optimizers[key] is not SGD:
            what = f"several steps of {name}" if steps > 1 else f"a step of {name}"
            found[what] = found.get(what, 0) + 1
    if found:
        told = ", ".join(f"{count} by {what}" for what, count in found.items())
        _log.warning(
            "%s estimates updates as if they were gradients, but those of clients are made "
            "otherwise (%s): estimates may be far off. HINT: `diagnose=True` measures how far.",
            method,
            told,
        )
