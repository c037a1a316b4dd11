"""Rollback: go back to an earlier global model, and train again from there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedrec._checks import check_float, check_int
from fedrec.random import torch_generator
from fedrec.recoverers._rollback import rollback_round
from fedrec.recoverers.base import ReplayRecoverer
from fedrec.recoverers.context import RecoveryContext
from fedrec.types import CohortUpdates

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView

__all__ = ["RollbackRetrain"]


class RollbackRetrain(ReplayRecoverer):
    r"""Goes back to the last model that excluded clients have hardly moved, and trains from there.

    Their influence up to round $n$ is bounded by the sum of what they changed in single rounds,

    $$ \Psi(n) = \eta \sum_{s < n} \lVert \Delta_s(I) - \Delta_s(I \setminus S) \rVert $$

    where $\Delta_s(I)$ is the mean of all updates of round $s$, weighted by samples,
    $\Delta_s(I \setminus S)$ that of the clients that remain, and $\eta$ the server's learning
    rate. Recovery starts at the last $n < T$ with $\Psi(n) \le \Psi^*$, adds Gaussian noise to the
    weights, and asks the remaining clients in rounds $n$, ..., $T - 1$.

    Several excluded clients count as one, since they may collude. The weighted mean is the paper's
    rule; under a robust rule, the influence is smaller. With the default $\Psi^* = 0$, the recovery
    is train-from-scratch without the rounds before the first excluded client took part.

    The method needs every update of the rounds up to $n$, those of the excluded clients included.

    Args:
        max_sensitivity: $\Psi^*$, at least 0, in units of the weights; see
            [`certified_sensitivity`][fedrec.functional.certified_sensitivity].
        noise_std: Standard deviation of the noise, at least 0.
        num_rounds: Rounds to train for; `None` for all rounds from $n$ on.

    Raises:
        ConfigurationError: If an argument is out of range; or at the start of a recovery, if the
            history lacks an update that is needed.

    References:
        - Fraboni et al., SIFU: Sequential Informed Federated Unlearning for Efficient and Provable
          Client Unlearning in Federated Optimization, AISTATS 2024.

    Examples:
        >>> RollbackRetrain(max_sensitivity=0.1, noise_std=0.01)
        RollbackRetrain(max_sensitivity=0.1, noise_std=0.01, num_rounds=None)
    """

    def __init__(
        self,
        *,
        max_sensitivity: float = 0.0,
        noise_std: float = 0.0,
        num_rounds: int | None = None,
    ) -> None:
        self.max_sensitivity = check_float("max_sensitivity", max_sensitivity, minimum=0)
        self.noise_std = check_float("noise_std", noise_std, minimum=0)
        if num_rounds is not None:
            num_rounds = check_int("num_rounds", num_rounds, minimum=1)
        self.num_rounds = num_rounds
        self._first = 0
        self._sensitivity = 0.0

    def start(self, history: HistoryView, max_rounds: int) -> None:
        """Find the round to go back to."""
        self._first, self._sensitivity = rollback_round(
            history, max_rounds, self.max_sensitivity, type(self).__name__
        )

    def initial_weights(self, history: HistoryView) -> Tensor:
        """Return the recorded weights of the round to go back to, with noise."""
        weights = history.read(self._first, ()).global_weights
        if self.noise_std == 0:
            return weights
        generator = torch_generator(history.manifest.seed, "rollback-noise", self._first)
        noise = torch.randn(weights.shape, generator=generator, dtype=torch.float32)
        return weights + self.noise_std * noise.to(weights)

    def rounds(self, history: HistoryView, max_rounds: int) -> range:
        """Return the rounds from the rollback on."""
        if self.num_rounds is None:
            return range(self._first, max_rounds)
        return range(self._first, min(max_rounds, self._first + self.num_rounds))

    def round_updates(self, t: int, global_weights: Tensor, ctx: RecoveryContext) -> CohortUpdates:
        """Ask all remaining clients of the round."""
        return ctx.exact(ctx.client_ids, "scratch")

    def state_dict(self) -> dict[str, Any]:
        """Return the round of the rollback and its sensitivity."""
        return {"first": self._first, "sensitivity": self._sensitivity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._first, self._sensitivity = state["first"], state["sensitivity"]

    def diagnostics(self) -> dict[str, float]:
        """Return the round of the rollback, and its sensitivity: the influence up to there."""
        return {"rollback_round": float(self._first), "sensitivity": self._sensitivity}
