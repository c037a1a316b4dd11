"""Fake clients beside real ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedrec.clients.base import Client
from fedrec.clients.fake import FakeClient
from fedrec.executors.base import Executor
from fedrec.executors.sequential import SequentialExecutor
from fedrec.types import CohortUpdates, RoundContext

__all__ = ["compute_with_fakes"]


def compute_with_fakes(
    executor: Executor, clients: Sequence[Client], global_weights: Tensor, ctx: RoundContext
) -> CohortUpdates:
    """Compute what clients would send, fake ones apart: the executor computes real ones together.

    Args:
        executor: Computes the real ones.
        clients: The clients to ask, in row order.
        global_weights: Shape $(d,)$; not changed.
        ctx: The round.
    """
    fake = [c for c in clients if isinstance(c, FakeClient)]
    if not fake:
        return executor.compute(clients, global_weights, ctx)
    sent = SequentialExecutor().compute(fake, global_weights, ctx)
    real = [c for c in clients if not isinstance(c, FakeClient)]
    if real:
        sent = _joined(executor.compute(real, global_weights, ctx), sent)
    usable = frozenset(sent.client_ids)
    return sent.select([c.client_id for c in clients if c.client_id in usable])


def _joined(real: CohortUpdates, fake: CohortUpdates) -> CohortUpdates:
    """Join the updates of two groups of clients; metrics and costs are those of real ones."""
    buffers = None
    if real.buffers is not None and fake.buffers is not None:
        buffers = torch.cat([real.buffers, fake.buffers])
    joined = real.joined(fake, client_ids=real.client_ids + fake.client_ids)
    return joined.with_besides(
        metrics=real.metrics,
        refused={**real.refused, **fake.refused},
        buffers=buffers,
        costs=real.costs,
    )
