"""One client after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedrec.clients.base import Client
from fedrec.clients.local import mean_logs
from fedrec.exceptions import UpdateError
from fedrec.executors.base import Executor
from fedrec.types import ClientUpdate, CohortUpdates, RoundContext

__all__ = ["SequentialExecutor"]


class SequentialExecutor(Executor):
    """Asks one client after another. Works with any `Client`.

    Examples:
        >>> SequentialExecutor()
        SequentialExecutor()
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def compute(
        self, clients: Sequence[Client], global_weights: Tensor, ctx: RoundContext
    ) -> CohortUpdates:
        """Call `local_update` of each client, in order."""
        updates = torch.empty(len(clients), global_weights.numel(), device=ctx.device)
        ids: list[str] = []
        sizes: list[int] = []
        logs: list[dict[str, float]] = []
        buffers: list[Tensor] = []
        refused: dict[str, str] = {}
        weights = global_weights.clone()
        for client in clients:
            try:
                sent = client.local_update(global_weights, ctx)
            except Exception as error:
                error.add_note(f"while client {client.client_id!r} trained in round {ctx.round}")
                raise
            # A view of a parameter's data changes them without leaving a trace.
            if not torch.equal(global_weights, weights):
                raise UpdateError(
                    f"Expected {type(client).__name__}.local_update to leave `global_weights` as "
                    f"they were given, but client {client.client_id!r} changed them in place. "
                    "HINT: train on `global_weights.clone()`; `vector_to_parameters` shares the "
                    "memory of the vector."
                )
            reason = _objection(sent, client, global_weights.shape)
            if reason is not None:
                refused[client.client_id] = reason
                continue
            updates[len(ids)].copy_(sent.update.detach())
            ids.append(client.client_id)
            sizes.append(sent.num_samples)
            logs.append(dict(sent.metrics))
            if sent.buffers is not None:
                buffers.append(sent.buffers)
        return CohortUpdates(
            client_ids=tuple(ids),
            updates=updates[: len(ids)],
            num_samples=torch.tensor(sizes, dtype=torch.int64),
            metrics=mean_logs(logs),
            refused=refused,
            buffers=torch.stack(buffers) if buffers else None,
        )


def _objection(sent: object, client: Client, shape: torch.Size) -> str | None:
    """Say why what a client sent cannot be a row of the updates, or `None`."""
    if not isinstance(sent, ClientUpdate):
        return f"expected a ClientUpdate, but got {type(sent).__name__}"
    update = sent.update
    if not isinstance(update, Tensor) or not update.is_floating_point():
        return "expected a floating-point tensor"
    if update.shape != shape:
        return f"expected an update of shape {tuple(shape)}, but got {tuple(update.shape)}"
    # Its weight in the aggregate is what it joined with, not what it says in a round.
    if sent.num_samples != client.num_samples:
        return f"expected num_samples={client.num_samples}, but got {sent.num_samples}"
    return None
