"""Historical updates only: aggregate what the remaining clients once sent."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch import Tensor

from fedrec.exceptions import ConfigurationError
from fedrec.recoverers.base import ReplayRecoverer
from fedrec.recoverers.context import RecoveryContext
from fedrec.types import CohortUpdates

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView

__all__ = ["HistoricalOnly"]

_log = logging.getLogger(__name__)


class HistoricalOnly(ReplayRecoverer):
    """Aggregates the remaining clients' historical updates and asks no client: ACP is 100 %.

    If the history keeps some updates only (`keep`), these are aggregated, and a round without any
    makes no step.

    Raises:
        ConfigurationError: If the history keeps no update of the remaining clients.

    References:
        - Cao et al., FedRecover, IEEE S&P 2023, section V-A ("historical-information-only").

    Examples:
        >>> HistoricalOnly()
        HistoricalOnly()
    """

    def start(self, history: HistoryView, max_rounds: int) -> None:
        """Warn, or raise an error, about updates that the history did not keep."""
        if not history.manifest.keep:
            return
        kept, sent = history.count(range(max_rounds))
        if kept == 0:
            raise ConfigurationError(
                "HistoricalOnly needs updates of the remaining clients, but the history keeps none "
                f"of them (keep={dict(history.manifest.keep)}). HINT: TrainFromScratch needs none."
            )
        if kept < sent:
            _log.warning(
                "HistoricalOnly does without %d of %d updates, which the history did not keep.",
                sent - kept,
                sent,
            )

    def round_updates(self, t: int, global_weights: Tensor, ctx: RecoveryContext) -> CohortUpdates:
        """Return the historical updates of the round."""
        return ctx.history(t).sent
