"""The abstract recoverers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedrec.component import Component
from fedrec.recoverers.context import RecoveryContext
from fedrec.types import CohortUpdates

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fedrec.history.view import HistoryView

__all__ = ["Recoverer", "ReplayRecoverer"]


class Recoverer(Component, ABC):
    """A way to get a clean model back from a recording.

    `FederatedLoop.recover` calls `start`, then `step` for every round of `rounds`, beginning with
    `initial_weights`. Most recoverers extend `ReplayRecoverer` instead.
    """

    #: Whether the method needs clean data at the server (`Federation.server_data`).
    needs_server_data: bool = False

    #: Whether the method asks excluded clients.
    needs_excluded_client: bool = False

    #: Whether the method assumes that updates are gradients; a warning names clients whose are not.
    assumes_gradients: bool = False

    def check_plan(self, max_rounds: int, server_samples: int | None) -> str | None:
        """Refuse a recipe that the method cannot work with, before anything is recorded.

        Args:
            max_rounds: Number of rounds $T$.
            server_samples: Number of samples at the server; `None` if that is not known yet.

        Returns:
            A warning about a recipe that the method can work with, or `None`.

        Raises:
            ConfigurationError: If a recovery is certain to be refused.
        """
        return None

    def start(self, history: HistoryView, max_rounds: int) -> None:
        """Prepare for a new recovery: reset all state, check that the history has what is needed.

        Args:
            history: The recording, and the clients that take part.
            max_rounds: Number of rounds $T$.
        """

    def initial_weights(self, history: HistoryView) -> Tensor:
        """Return the weights to start from, shape $(d,)$; by default the recorded initial ones."""
        return history.read(0, ()).global_weights

    def rounds(self, history: HistoryView, max_rounds: int) -> Iterable[int]:
        """Return the rounds to step through, increasing; by default `range(max_rounds)`."""
        return range(max_rounds)

    def kept_bytes(self, num_clients: int, num_parameters: int) -> int:
        """Return about how many bytes of memory the method keeps from round to round.

        Args:
            num_clients: Clients that remain.
            num_parameters: $d$.
        """
        return 0

    @abstractmethod
    def step(self, t: int, global_weights: Tensor, ctx: RecoveryContext) -> Tensor:
        """Do one round, and return the next global weights.

        Args:
            t: Round of the recording.
            global_weights: Recovered global weights, shape $(d,)$; must not be changed.
            ctx: History, clients and server step of this round.

        Returns:
            The next global weights, shape $(d,)$.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the method, as tensors, numbers, strings, lists and dicts.

        It is the same in all processes, if there are several.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that `state_dict` returned, to resume a recovery."""

    def shard_states(self) -> dict[int, dict[str, Any]]:
        """Return the state that belongs to each shard of clients, by shard, beside `state_dict`.

        Where clients are in shards, as on several devices, each process has that of its own shards
        alone, and saves it by itself. By default there is nothing.
        """
        return {}

    def load_shard_states(self, states: dict[int, dict[str, Any]], history: HistoryView) -> None:
        """Take over what `shard_states` returned; called after `load_state_dict`.

        Args:
            states: By shard, those of this process's shards of which somebody remains.
            history: As in `start`.
        """

    def diagnostics(self) -> dict[str, float]:
        """Return numbers worth reporting about the recovery, by name."""
        return {}


class ReplayRecoverer(Recoverer):
    """A recoverer that replays the recorded rounds with other updates.

    Write `round_updates`; the server step is the recording's.

    Examples:
        >>> class Impatient(ReplayRecoverer):
        ...     "Asks the clients in even rounds and reuses history in odd ones."
        ...     def round_updates(self, t, global_weights, ctx):
        ...         if t % 2 == 0:
        ...             return ctx.exact(ctx.client_ids, "other").updates
        ...         return ctx.history(t).updates
        >>> Impatient()
        Impatient()
    """

    @abstractmethod
    def round_updates(
        self, t: int, global_weights: Tensor, ctx: RecoveryContext
    ) -> Tensor | CohortUpdates | None:
        """Return the updates to aggregate in this round.

        Args:
            t: Round.
            global_weights: Recovered global weights, shape $(d,)$.
            ctx: History, clients and server step of this round.

        Returns:
            Shape $(m', d)$, one row per client of `ctx.client_ids`; or the `CohortUpdates` of some
            of these clients; or `None` for no step.
        """

    def step(self, t: int, global_weights: Tensor, ctx: RecoveryContext) -> Tensor:
        """Do the server step with the updates of `round_updates`."""
        updates = self.round_updates(t, global_weights, ctx)
        if updates is None:
            return global_weights
        return ctx.server_step(updates)
