"""Finding the last global model that excluded clients have influenced little."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fedrec.exceptions import ConfigurationError
from fedrec.functional.recovery.sensitivity import removal_effect
from fedrec.history.background import read_ahead

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView

__all__ = ["rollback_round"]


def rollback_round(
    history: HistoryView,
    max_rounds: int,
    max_sensitivity: float,
    method: str,
) -> tuple[int, float]:
    r"""Return the last round $n < T$ with $\Psi(n) \le \Psi^*$, and $\Psi(n)$.

    Args:
        history: The recording, and the clients that are not excluded.
        max_rounds: $T$, at least 1.
        max_sensitivity: $\Psi^*$.
        method: Name of the recoverer, for errors.

    Raises:
        ConfigurationError: If an update that is needed was not kept, or was forgotten.
    """
    rounds = range(max_rounds - 1)
    # Rounds in which no excluded client took part add nothing to the sensitivity, and are not read.
    touched = [t for t in rounds if history.excluded(t)]
    ids, sensitivity = set(history.remaining), 0.0
    for record in read_ahead(history.whole(), touched, torch.device("cpu")):
        lost = sorted(set(record.present).difference(record.client_ids))
        if lost:
            raise ConfigurationError(
                f"{method} measures what the excluded clients have changed, for which it needs "
                f"every update of round {record.round}, but the history has none of {lost[:5]} "
                f"(keep={dict(history.manifest.keep)}, forgotten: {list(history.forgotten[:5])}). "
                "HINT: record with all updates kept, and forget clients after the recovery."
            )
        removed = torch.tensor([c not in ids for c in record.client_ids])
        moved = removal_effect(record.updates, record.num_samples, removed)
        following = sensitivity + history.manifest.server_lr * moved
        if following > max_sensitivity:
            return record.round, sensitivity
        sensitivity = following
    return max_rounds - 1, sensitivity
