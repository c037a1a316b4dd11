"""The recorded update as the estimate."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.recoverers.estimators.base import Estimates, Estimator
from fedrec.recoverers.threshold import largest_magnitudes
from fedrec.types import RoundRecord

__all__ = ["HistoricalUpdate"]


class HistoricalUpdate(Estimator):
    r"""Takes the historical update unchanged, as a control.

    $\hat g_t^i = \bar g_t^i$ is what is left of FedRecover without Hessians.

    Examples:
        >>> HistoricalUpdate()
        HistoricalUpdate()
    """

    raises_threshold = False

    def estimate(self, record: RoundRecord, global_weights: Tensor) -> Estimates:
        """Return the recorded updates."""
        usable = torch.ones(len(record.client_ids), dtype=torch.bool)
        return Estimates(record.updates, largest_magnitudes(record.updates), usable)
