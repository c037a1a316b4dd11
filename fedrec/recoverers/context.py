"""What a recoverer works with in one round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedrec.types import CohortUpdates, RoundContext, RoundRecord

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from fedrec.clients.objective import LocalWork

__all__ = ["RecoveryContext"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RecoveryContext(RoundContext, ABC):
    """What a recoverer works with: history, the metered door to clients, and the server step.

    Letters: $m'$ clients that are named, $d$ parameters.

    Args:
        max_rounds: Number of rounds $T$ of this recovery.
        excluded: Clients that are left out.
        server_lr: Learning rate of the server step.
    """

    max_rounds: int
    excluded: tuple[str, ...] = ()
    server_lr: float = 1.0

    @abstractmethod
    def history(self, t: int, client_ids: Sequence[str] | None = None) -> RoundRecord:
        """Read a round of the recording.

        Args:
            t: The round.
            client_ids: Whose updates to read; by default those of the clients that take part in
                the recovery and whose updates of that round the history kept.

        Returns:
            The record. Its tensors must not be changed: another call may return the same ones.

        Raises:
            HistoryError: If the history does not have it.
        """

    @abstractmethod
    def exact(
        self, client_ids: Sequence[str], reason: str, work: LocalWork | None = None
    ) -> CohortUpdates:
        """Ask clients for their exact updates: the only door to them, which meters every call.

        Args:
            client_ids: Whom to ask, of this round's `client_ids`; excluded clients too for a
                method that declares `needs_excluded_client`.
            reason: What the ledger says why; see `fedrec.metrics.REASONS`.
            work: Other local training than the recorded one.

        Returns:
            One row per client whose update can be used, in this order, and who was refused.

        Raises:
            RecoveryError: If one of them may not be asked.
            UpdateError: If one of them sends something unusable and `on_bad_update="raise"`.
        """

    @abstractmethod
    def train_at_server(
        self,
        global_weights: Tensor,
        work: LocalWork | None = None,
        dataset: Dataset[Any] | None = None,
    ) -> Tensor:
        """Let the server train on its clean data as a client would; it costs clients nothing.

        Args:
            global_weights: Weights to start from, shape $(d,)$.
            work: Other local training than the clients'.
            dataset: What to train on; all of the server's data by default.

        Returns:
            Its update, shape $(d,)$.

        Raises:
            ConfigurationError: If the server has no data.
            AggregationError: If the update is not finite.
        """

    @abstractmethod
    def server_loss(self, global_weights: Tensor) -> float:
        """Return the mean loss of these weights on the server's clean data.

        Args:
            global_weights: Shape $(d,)$.

        Raises:
            ConfigurationError: If the server has no data, or the module gives no loss.
        """

    @abstractmethod
    def compare(self, client_ids: Sequence[str], estimates: Tensor) -> None:
        """Note how far estimated updates are from exact ones, see `RunResult.estimate_errors`.

        The exact ones are computed for this alone: in simulation, at no cost, unseen by the
        recoverer.

        Args:
            client_ids: Some of this round's `client_ids`.
            estimates: Shape $(m', d)$, one row per client.

        Raises:
            RecoveryError: If one of them may not be asked.
        """

    @abstractmethod
    def local_steps(self, client_ids: Sequence[str]) -> list[int]:
        """Return how many steps each of these clients takes in its own local training.

        Args:
            client_ids: Clients of the federation.
        """

    @abstractmethod
    def server_step(
        self,
        updates: Tensor,
        client_ids: Sequence[str] | None = None,
        global_weights: Tensor | None = None,
    ) -> Tensor:
        """Aggregate updates by the aggregation rule, and do the server step.

        Args:
            updates: Shape $(m', d)$, one row per client.
            client_ids: Whose updates these are; by default those of this round's `client_ids`.
                None at all make no step.
            global_weights: Weights to step from, shape $(d,)$; by default those of the round.

        Returns:
            The next global weights, shape $(d,)$.

        Raises:
            ShapeError: If there is not one row per client.
            AggregationError: If a row or the result is not finite, or the rule cannot work with
                so many clients.
        """

    @abstractmethod
    def coefficients(self, client_ids: Sequence[str]) -> Tensor | None:
        """Return what the aggregation rule multiplies these clients' rows with.

        Args:
            client_ids: Whose rows would be aggregated.

        Returns:
            Shape $(m',)$; `None` for a rule that is no such sum, and for no client.
        """
