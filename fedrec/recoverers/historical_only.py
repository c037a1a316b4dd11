"""Replay what the remaining clients once sent."""

from __future__ import annotations

from torch import Tensor

from fedrec.recoverers.base import ReplayRecoverer
from fedrec.types import RecoveryContext

__all__ = ["HistoricalOnly"]


class HistoricalOnly(ReplayRecoverer):
    """Aggregates the remaining clients' historical updates and asks nobody: ACP is 100.

    References:
        - Cao et al., FedRecover, IEEE S&P 2023, section V-A ("historical-information-only").

    Examples:
        >>> HistoricalOnly()
        HistoricalOnly()
    """

    def round_updates(self, t: int, global_weights: Tensor, ctx: RecoveryContext) -> Tensor:
        """Read the round's updates from history."""
        return ctx.history(t).updates
