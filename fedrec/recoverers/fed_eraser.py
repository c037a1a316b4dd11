"""FedEraser: train again in every few rounds, with calibrated updates."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fedrec._checks import check_float, check_int
from fedrec.exceptions import ConfigurationError
from fedrec.recoverers._calibration import calibrated
from fedrec.recoverers.base import ReplayRecoverer
from fedrec.recoverers.context import RecoveryContext
from fedrec.types import CohortUpdates

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView

__all__ = ["FedEraser"]

_log = logging.getLogger(__name__)


class FedEraser(ReplayRecoverer):
    r"""Trains again in some rounds, with short training and updates of old length.

    In rounds 0, $\Delta t$, $2 \Delta t$, ... the remaining clients train for a fraction $r$ of
    their local steps. That gives the direction of an update. Its length is that of the client's
    historical update of the round: $\lVert \bar g^i \rVert \, g^i / \lVert g^i \rVert$. The first
    round starts from the recorded weights, so its historical updates are used as they are and no
    client is asked. All other rounds are left out. Updates are aggregated by the recorded rule;
    the paper's is a weighted mean whose weights sum to 1.

    The method needs the updates of the remaining clients in these rounds, so a history with
    `keep={"every": interval}` is enough. A client whose update of a round was not kept, or who did
    not take part, is left out of the round.

    The ledger counts a round with fewer local steps as a round. The saving by $r$ shows in its
    column of local steps.

    Args:
        interval: $\Delta t$, at least 1.
        calibration_ratio: $r$ in (0, 1]; at least one local step is taken.

    Raises:
        ConfigurationError: If an argument is out of range; or at the start of a recovery, if the
            history kept no update of the remaining clients in one of those rounds.

    References:
        - Liu et al., FedEraser: Enabling Efficient Client-Level Data Removal from Federated
          Learning Models, IWQoS 2021.

    Examples:
        >>> list(FedEraser(interval=3).rounds(None, max_rounds=10))
        [0, 3, 6, 9]
    """

    def __init__(self, *, interval: int = 2, calibration_ratio: float = 0.5) -> None:
        self.interval = check_int("interval", interval, minimum=1)
        self.calibration_ratio = check_float(
            "calibration_ratio", calibration_ratio, minimum=0, maximum=1, open_minimum=True
        )

    def rounds(self, history: HistoryView | None, max_rounds: int) -> range:
        """Return every `interval`-th round."""
        return range(0, max_rounds, self.interval)

    def start(self, history: HistoryView, max_rounds: int) -> None:
        """Check that the history has updates of every round that is trained in."""
        if not history.manifest.keep:
            return
        keep, missing = dict(history.manifest.keep), 0
        for t in self.rounds(history, max_rounds):
            kept, sent = history.count([t])
            if kept == 0 < sent:
                first = f"0, {self.interval}, {2 * self.interval}"
                raise ConfigurationError(
                    f"FedEraser needs updates of the remaining clients in rounds {first}, ..., but "
                    f"the history keeps none of round {t} ({keep=}). HINT: let `interval` be a "
                    "multiple of `keep.every`, and keep the first rounds."
                )
            missing += sent - kept
        if missing:
            _log.warning(
                "FedEraser does without %d updates that the history did not keep.", missing
            )

    def round_updates(self, t: int, global_weights: object, ctx: RecoveryContext) -> CohortUpdates:
        """Return historical updates in the first round, calibrated ones in all others."""
        record = ctx.history(t)
        if t > 0:
            return calibrated(ctx, record, record.client_ids, self.calibration_ratio)
        return record.sent
