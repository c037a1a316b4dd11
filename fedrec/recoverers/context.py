"""The context of a recoverer in one round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedrec.aggregators.base import ColumnRule
from fedrec.types import CohortUpdates, RoundContext, RoundRecord

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from fedrec.clients.objective import LocalWork

__all__ = ["RecoveryContext"]


@dataclass(frozen=True, kw_only=True, eq=False)
class RecoveryContext(RoundContext, ABC):
    """The context of a recoverer: the history, the metered door to clients, the server step.

    Letters: $m'$ clients in the argument `client_ids`, $d$ parameters.

    Args:
        max_rounds: Number of rounds $T$ of this recovery.
        excluded: Clients that are left out.
        server_lr: Learning rate of the server step.
    """

    max_rounds: int
    excluded: tuple[str, ...] = ()
    server_lr: float = 1.0

    @abstractmethod
    def history(
        self, t: int, client_ids: Sequence[str] | None = None, *, vectors: bool = True
    ) -> RoundRecord:
        """Read a round of the recording.

        Args:
            t: The round.
            client_ids: The clients whose updates to read; by default all clients that take part in
                the recovery and whose updates of that round the history kept.
            vectors: Whether to read weights and updates. If not, they have no entries, shape $(0,)$
                and $(k, 0)$, and the record is of `client_ids`, by default of all clients that took
                part then and take part in the recovery.

        Returns:
            The record. Its tensors must not be changed: another call may return the same tensors.

        Raises:
            HistoryError: If the history does not have the round or an update.
        """

    @abstractmethod
    def exact(
        self, client_ids: Sequence[str], reason: str, work: LocalWork | None = None
    ) -> CohortUpdates:
        """Ask clients for their exact updates: the only door to them, which meters every call.

        Args:
            client_ids: The clients to ask, of this round's `client_ids`; a method that declares
                `needs_excluded_client` may ask excluded clients, too.
            reason: The reason for the ledger, see `fedrec.metrics.REASONS`.
            work: Settings of local training in place of the recorded, or `None`.

        Returns:
            One row per client whose update can be used, in the order of `client_ids`, and the
            refused clients.

        Raises:
            RecoveryError: If a client may not be asked.
            UpdateError: If a client's update is not finite and `on_bad_update="raise"`.
        """

    @abstractmethod
    def train_at_server(
        self,
        global_weights: Tensor,
        work: LocalWork | None = None,
        dataset: Dataset[Any] | None = None,
    ) -> Tensor:
        """Return the server's update from training on its clean data as a client would.

        It costs clients nothing.

        Args:
            global_weights: Weights to start from, shape $(d,)$.
            work: Settings of local training in place of the clients' own, or `None`.
            dataset: The data to train on; all of the server's data by default.

        Returns:
            The server's update, shape $(d,)$.

        Raises:
            ConfigurationError: If the server has no data.
            AggregationError: If the update is not finite.
        """

    @abstractmethod
    def server_loss(self, global_weights: Tensor) -> float:
        """Return the mean loss of global weights on the server's clean data.

        Args:
            global_weights: Shape $(d,)$.

        Raises:
            ConfigurationError: If the server has no data, or the module gives no loss.
        """

    @abstractmethod
    def compare(self, estimates: CohortUpdates) -> None:
        """Note how far estimated updates are from exact ones, see `RunResult.estimate_errors`.

        The exact updates are computed for this comparison alone: in simulation, without costs for
        clients, and unseen by the recoverer.

        Args:
            estimates: Estimated updates of some of this round's clients.

        Raises:
            RecoveryError: If a client may not be asked.
        """

    @abstractmethod
    def local_steps(self, client_ids: Sequence[str]) -> list[int]:
        """Return the number of steps that each client takes in its own local training.

        Args:
            client_ids: Clients of the federation.
        """

    @abstractmethod
    def server_step(
        self,
        updates: Tensor | CohortUpdates,
        client_ids: Sequence[str] | None = None,
        global_weights: Tensor | None = None,
    ) -> Tensor:
        """Aggregate updates by the aggregation rule, and do the server step.

        Args:
            updates: Shape $(m', d)$, one row per client; or what clients sent.
            client_ids: The clients of the rows; by default this round's `client_ids`, or those that
                sent. Without any client, there is no step.
            global_weights: Weights to step from, shape $(d,)$; by default those of the round.

        Returns:
            The next global weights, shape $(d,)$.

        Raises:
            ShapeError: If there is not one row per client.
            AggregationError: If a row or the result is not finite, or the rule cannot work with
                so many clients.
        """

    @abstractmethod
    def column_rule(self, client_ids: Sequence[str]) -> ColumnRule | None:
        """Return what `server_step` does with every column of clients' updates.

        Args:
            client_ids: The clients whose updates would be aggregated.

        Returns:
            `None` if the aggregation rule does something that a `ColumnRule` cannot say.
        """

    @abstractmethod
    def coefficients(self, client_ids: Sequence[str]) -> Tensor | None:
        """Return the factors of clients' updates in the aggregation rule.

        Args:
            client_ids: The clients whose updates would be aggregated.

        Returns:
            Shape $(m',)$; `None` if the rule is no weighted sum, or there is no client.
        """
