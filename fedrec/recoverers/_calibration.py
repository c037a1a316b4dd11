"""Asking clients for the direction of updates whose length history knows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedrec.clients.objective import LocalWork
from fedrec.functional.recovery.calibration import calibrate
from fedrec.recoverers.context import RecoveryContext
from fedrec.types import CohortUpdates, RoundRecord

__all__ = ["calibrated"]


def calibrated(
    ctx: RecoveryContext, record: RoundRecord, client_ids: Sequence[str], ratio: float
) -> CohortUpdates:
    """Ask clients for short local training, and give what they send its historical length.

    Args:
        ctx: The round.
        record: The round of the recording, with the updates of these clients.
        client_ids: Who is asked.
        ratio: Local steps as a fraction of the client's own; at least one step is taken.
    """
    groups: dict[int | None, list[str]] = {}
    for client_id, own in zip(client_ids, ctx.local_steps(client_ids), strict=True):
        steps = max(1, int(ratio * own + 0.5))
        groups.setdefault(None if steps == own else steps, []).append(client_id)
    sent = [
        ctx.exact(ids, "other", None if steps is None else LocalWork(local_steps=steps))
        for steps, ids in groups.items()
    ]
    ids = tuple(c for one in sent for c in one.client_ids)
    return CohortUpdates(
        client_ids=ids,
        updates=calibrate(record.select(ids).updates, torch.cat([one.updates for one in sent])),
        num_samples=torch.cat([one.num_samples for one in sent]),
    )
