"""Calibrated updates: the direction is asked of clients, the length is that of the history."""

from __future__ import annotations

from collections.abc import Sequence

from fedrec.clients.objective import LocalWork
from fedrec.functional.recovery.calibration import calibrate
from fedrec.recoverers.context import RecoveryContext
from fedrec.types import CohortUpdates, RoundRecord

__all__ = ["calibrated"]


def calibrated(
    ctx: RecoveryContext, record: RoundRecord, client_ids: Sequence[str], ratio: float
) -> CohortUpdates:
    """Ask clients for short local training, and give each update its historical length.

    Args:
        ctx: The round.
        record: The round of the recording, with the updates of these clients.
        client_ids: The clients to ask.
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
    ids = tuple(c for group in sent for c in group.client_ids)
    exact = sent[0] if len(sent) == 1 else sent[0].joined(*sent[1:], client_ids=ids)
    pairs = zip(record.sent.select(ids).shards().values(), exact.shards().values(), strict=True)
    return exact.with_rows([calibrate(old.updates, new.updates) for old, new in pairs])
