"""The final model of a recording, the rounds after it, and clients' shares in its aggregates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView
    from fedrec.recoverers.context import RecoveryContext

__all__ = ["final_weights", "rounds_after", "shares"]


def final_weights(history: HistoryView, max_rounds: int) -> Tensor:
    """Return the recorded global weights after `max_rounds` rounds, shape $(d,)$."""
    if max_rounds < len(history.rounds()):
        return history.read(max_rounds, ()).global_weights
    last = history.read(max_rounds - 1, ())
    return last.global_weights - history.manifest.server_lr * last.aggregate


def rounds_after(history: HistoryView, count: int) -> range:
    """Return the numbers of the first `count` rounds after the recording."""
    recorded = len(history.rounds())
    return range(recorded, recorded + count)


def shares(ctx: RecoveryContext, present: Sequence[str], client_ids: Sequence[str]) -> Tensor:
    """Return the shares that clients' updates had in the aggregate of a round.

    A share is the factor of the client's update in the aggregation rule. For a rule that is no
    weighted sum, it is one by the number of clients.

    Args:
        ctx: The round of the recovery.
        present: All clients whose updates were aggregated.
        client_ids: The clients whose shares are returned, some of `present`.

    Returns:
        Shape $(c,)$.
    """
    coefficients = ctx.coefficients(present)
    if coefficients is None:
        return torch.full((len(client_ids),), 1 / len(present))
    place = {c: i for i, c in enumerate(present)}
    return coefficients[[place[c] for c in client_ids]]
