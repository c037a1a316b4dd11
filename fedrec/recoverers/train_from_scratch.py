"""Training from scratch without the excluded clients."""

from __future__ import annotations

from torch import Tensor

from fedrec.recoverers.base import ReplayRecoverer
from fedrec.recoverers.context import RecoveryContext
from fedrec.types import CohortUpdates

__all__ = ["TrainFromScratch"]


class TrainFromScratch(ReplayRecoverer):
    """Asks every remaining client for its exact update in every round.

    The reference for accuracy, at the whole cost of training: ACP is 0.

    References:
        - Cao et al., FedRecover, IEEE S&P 2023, section V-A.

    Examples:
        >>> TrainFromScratch()
        TrainFromScratch()
    """

    def round_updates(self, t: int, global_weights: Tensor, ctx: RecoveryContext) -> CohortUpdates:
        """Ask all remaining clients of the round."""
        return ctx.exact(ctx.client_ids, "scratch")
