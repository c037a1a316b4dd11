"""The model a recording ends with, and what clients put into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedrec.exceptions import ConfigurationError

if TYPE_CHECKING:
    from fedrec.history.base import HistoryStore
    from fedrec.recoverers.context import RecoveryContext

__all__ = ["excluded_of", "final_weights", "require_updates", "rounds_after", "shares"]


def final_weights(history: HistoryStore, max_rounds: int) -> Tensor:
    """Return the recorded global weights after `max_rounds` rounds, shape $(d,)$."""
    if max_rounds < len(history.rounds()):
        return history.read_round(max_rounds, ()).global_weights
    last = history.read_round(max_rounds - 1, ())
    return last.global_weights - history.manifest.server_lr * last.aggregate


def rounds_after(history: HistoryStore, count: int) -> range:
    """Return the numbers of rounds that follow the recording."""
    recorded = len(history.rounds())
    return range(recorded, recorded + count)


def excluded_of(history: HistoryStore, remaining: Sequence[str], t: int) -> tuple[str, ...]:
    """Return the clients that took part in round `t` and do not remain."""
    keep = set(remaining)
    return tuple(c for c in history.present(t) if c not in keep)


def require_updates(
    history: HistoryStore, remaining: Sequence[str], rounds: Sequence[int], method: str
) -> None:
    """Raise `ConfigurationError` if a recorded update of an excluded client is not there."""
    if history.forgotten:
        raise ConfigurationError(
            f"{method} needs what the excluded clients sent, but the history has forgotten "
            f"{list(history.forgotten[:5])}. HINT: forget clients after the recovery."
        )
    for t in rounds:
        lost = set(excluded_of(history, remaining, t)).difference(history.kept(t))
        if lost:
            raise ConfigurationError(
                f"{method} needs what the excluded clients sent, but the history kept nothing of "
                f"{sorted(lost)[:5]} in round {t} (keep={dict(history.manifest.keep)}). HINT: "
                "record with all updates kept."
            )


def shares(ctx: RecoveryContext, present: Sequence[str], client_ids: Sequence[str]) -> Tensor:
    """Return the part that these clients' updates had in the aggregate of a round.

    It is what the aggregation rule multiplies them with; one by the number of clients for a rule
    that is no such sum.

    Args:
        ctx: The round of the recovery.
        present: All clients whose updates were aggregated.
        client_ids: Some of them.

    Returns:
        Shape $(c,)$.
    """
    coefficients = ctx.coefficients(present)
    if coefficients is None:
        return torch.full((len(client_ids),), 1 / len(present))
    place = {c: i for i, c in enumerate(present)}
    return coefficients[[place[c] for c in client_ids]]
