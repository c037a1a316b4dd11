"""One client after another, with everything that they share done once."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.clients.batches import failures_explained
from fedrec.clients.generators import generators_restored, held_restored, seed_generators
from fedrec.clients.local import LogMeans, clear_gradients, gradients_of, scaled
from fedrec.executors.cohort import Cohort

__all__ = ["train_in_a_loop"]


def train_in_a_loop(cohort: Cohort, updates: Tensor, logs: LogMeans) -> None:
    """Compute one step of plain SGD for each client, bit for bit as `LightningClient` does.

    Args:
        cohort: The clients.
        updates: Shape $(c, d)$, written in place.
        logs: Gets what was logged.
    """
    cohort.load()
    module, ctx = cohort.module, cohort.ctx
    clear_gradients(module.parameters())
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    with (
        generators_restored(ctx.device),
        cohort.clients[0].local_trainer(module, ctx).hiding_optimizers().attached() as logged,
        torch.enable_grad(),
    ):
        for client, steps, row in zip(cohort.clients, cohort.batches, updates, strict=True):
            logged.clear()
            held = client.generators()
            try:
                with held_restored(held):
                    seed_generators(ctx, client.client_id, held)
                    batch = client.read(steps[0], ctx.device)
                with failures_explained(f"client {client.client_id!r}", module, batch, steps[0]):
                    gradients = gradients_of(module, parameters, batch, 0, ctx)
            except Exception as error:
                error.add_note(f"while client {client.client_id!r} trained in round {ctx.round}")
                raise
            logs.add(logged)
            if gradients is None:
                row.zero_()
            else:
                ctx.layout.flatten_dict(scaled(gradients, cohort.scale), row)
    cohort.refuse_other_weights()
