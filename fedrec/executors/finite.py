"""Refusing updates that are not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.functional.kernels._finite import nonfinite_rows
from fedrec.types import CohortUpdates

__all__ = ["NONFINITE", "nonfinite_clients", "refuse_nonfinite"]

NONFINITE = "the update has NaN or infinity"


def nonfinite_clients(sent: CohortUpdates) -> list[str]:
    """Return the clients whose updates are not finite, in all processes."""

    def is_bad(part: CohortUpdates) -> Tensor:
        rows = nonfinite_rows(part.updates)
        bad = [row in rows for row in range(len(part.client_ids))]
        return torch.tensor(bad, dtype=torch.bool)

    bad = sent.measured(is_bad).tolist() if sent.client_ids else []
    return [c for c, flag in zip(sent.client_ids, bad, strict=True) if flag]


def refuse_nonfinite(sent: CohortUpdates, *, buffers: bool) -> CohortUpdates:
    """Return the updates without those that are not finite, whose clients are refused.

    Args:
        sent: What clients sent.
        buffers: Whether their buffers have to be finite, too.
    """
    refused = dict.fromkeys(nonfinite_clients(sent), NONFINITE)
    if sent.buffers is not None and buffers:
        for i in nonfinite_rows(sent.buffers):
            refused[sent.client_ids[i]] = "its buffers have NaN or infinity"
    return sent.refusing(refused)
