"""Crab: roll back, then train again in selected rounds with selected clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedrec._checks import check_float
from fedrec.aggregators.byzantine import count_of
from fedrec.functional.consistency import row_cosines
from fedrec.functional.recovery.crab import loss_windows, softmax_divergence
from fedrec.recoverers._calibration import calibrated
from fedrec.recoverers._final import final_weights
from fedrec.recoverers._rollback import rollback_round
from fedrec.recoverers.base import Recoverer
from fedrec.recoverers.context import RecoveryContext

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView

__all__ = ["Crab"]


class Crab(Recoverer):
    r"""Goes back a little, and trains again in selected rounds with selected clients.

    1. *Rollback.* Recovery starts from the last recorded model with $\Psi(n) \le \Psi^*$, where
       $\Psi$ is the influence of the excluded clients as in `RollbackRetrain`.
    2. *Rounds.* The following rounds are cut into windows. A window ends when the loss has dropped
       by the fraction `loss_drop`. In each window, the fraction `round_ratio` of rounds that moved
       the model most is selected: the rounds with the largest divergence between the softmax of
       the model's parameters before and after the round.
    3. *Clients.* In a selected round, the fraction `client_ratio` of clients is asked whose
       historical updates have the largest cosine with the historical aggregate.
    4. *Calibration.* The asked clients train as in `FedEraser`: new direction, historical length.
       In the first round the model is the recorded one, so historical updates are used as they
       are.

    Fractions are rounded down, but at least one round of a window and one client of a round are
    selected. The paper selects while recording. Here the history has all rounds, so selection is
    done in the recovery, among the remaining clients. The loss is that of the recorded models on
    the server's clean data, since a history has no losses of its clients.

    The method needs server data, and every update of the rounds up to the rollback.

    Args:
        max_sensitivity: $\Psi^*$, at least 0, in units of the weights.
        loss_drop: Fraction in (0, 1) by which the loss drops in a window.
        round_ratio: Fraction in (0, 1] of the rounds of a window that are selected.
        client_ratio: Fraction in (0, 1] of the clients of a round that are asked.
        calibration_ratio: Local steps as a fraction of the clients' own, in (0, 1].

    Raises:
        ConfigurationError: If an argument is out of range, the server has no data, or the history
            lacks an update that is needed.

    References:
        - Jiang et al., Towards Efficient and Certified Recovery from Poisoning Attacks in
          Federated Learning, IEEE TIFS 2025 (arXiv 2401.08216).

    Examples:
        >>> Crab(max_sensitivity=0.5).needs_server_data
        True
    """

    needs_server_data = True

    def __init__(
        self,
        *,
        max_sensitivity: float = 0.0,
        loss_drop: float = 0.1,
        round_ratio: float = 0.6,
        client_ratio: float = 0.7,
        calibration_ratio: float = 0.5,
    ) -> None:
        self.max_sensitivity = check_float("max_sensitivity", max_sensitivity, minimum=0)
        self.loss_drop = check_float(
            "loss_drop", loss_drop, minimum=0, maximum=1, open_minimum=True, open_maximum=True
        )
        self.round_ratio = _ratio("round_ratio", round_ratio)
        self.client_ratio = _ratio("client_ratio", client_ratio)
        self.calibration_ratio = _ratio("calibration_ratio", calibration_ratio)
        self._first = 0
        self._sensitivity = 0.0
        self._selected: list[int] | None = None
        self._final: Tensor | None = None

    def start(self, history: HistoryView, max_rounds: int) -> None:
        """Find the round to go back to."""
        self._selected = None
        self._final = final_weights(history, max_rounds)
        self._first, self._sensitivity = rollback_round(
            history, max_rounds, self.max_sensitivity, "Crab"
        )

    def initial_weights(self, history: HistoryView) -> Tensor:
        """Return the recorded weights of the round to go back to."""
        return history.read(self._first, ()).global_weights

    def rounds(self, history: HistoryView, max_rounds: int) -> range:
        """Return the rounds from the rollback on; rounds that are not selected make no step."""
        return range(self._first, max_rounds)

    def step(self, t: int, global_weights: Tensor, ctx: RecoveryContext) -> Tensor:
        """Do a round, if it is selected."""
        if self._selected is None:
            self._selected = self._select(ctx)
        record = ctx.history(t)
        if t not in self._selected or not record.client_ids:
            return global_weights
        cosines = record.sent.measured(lambda sent: row_cosines(sent.updates, record.aggregate))
        count = max(1, count_of(self.client_ratio, len(cosines)))
        best = cosines.argsort(descending=True, stable=True)[:count].sort().values
        ids = [record.client_ids[i] for i in best.tolist()]
        if t == self._first:
            return ctx.server_step(record.select(ids).sent)
        sent = calibrated(ctx, record, ids, self.calibration_ratio)
        return ctx.server_step(sent)

    def _select(self, ctx: RecoveryContext) -> list[int]:
        """Return the rounds to train in."""
        losses, moves = [], []
        weights = ctx.history(self._first, ()).global_weights
        for t in range(self._first, ctx.max_rounds):
            losses.append(ctx.server_loss(weights))
            if t + 1 < ctx.max_rounds:
                following = ctx.history(t + 1, ()).global_weights
            elif self._final is not None:
                following = self._final.to(weights)
            before, after = (ctx.layout.unflatten(w).values() for w in (weights, following))
            moves.append(softmax_divergence(before, after))
            weights = following
        selected = []
        for window in loss_windows(losses, self.loss_drop):
            count = max(1, count_of(self.round_ratio, len(window)))
            selected += sorted(window, key=lambda i: -moves[i])[:count]
        return sorted(self._first + i for i in selected)

    def state_dict(self) -> dict[str, Any]:
        """Return the round of the rollback, its sensitivity, and the selected rounds."""
        return {
            "first": self._first,
            "sensitivity": self._sensitivity,
            "selected": self._selected,
            "final": self._final,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._first, self._sensitivity = state["first"], state["sensitivity"]
        self._selected, self._final = state["selected"], state["final"]

    def diagnostics(self) -> dict[str, float]:
        """Return the round of the rollback, its sensitivity, and the number of selected rounds."""
        return {
            "rollback_round": float(self._first),
            "sensitivity": self._sensitivity,
            "selected_rounds": float(len(self._selected or ())),
        }


def _ratio(argument: str, value: float) -> float:
    return check_float(argument, value, minimum=0, maximum=1, open_minimum=True)
