"""Refusing updates that are not finite."""

from __future__ import annotations

from fedrec.functional.kernels._finite import nonfinite_rows
from fedrec.types import CohortUpdates

__all__ = ["NONFINITE", "refuse_nonfinite"]

NONFINITE = "the update has NaN or infinity"


def refuse_nonfinite(sent: CohortUpdates, *, buffers: bool) -> CohortUpdates:
    """Return the updates without those that are not finite, whose clients are refused.

    Args:
        sent: What clients sent.
        buffers: Whether their buffers have to be finite, too.
    """
    refused = {sent.client_ids[i]: NONFINITE for i in nonfinite_rows(sent.updates)}
    if sent.buffers is not None and buffers:
        for i in nonfinite_rows(sent.buffers):
            refused[sent.client_ids[i]] = "the buffers has NaN or infinity"
    return sent.refusing(refused)
