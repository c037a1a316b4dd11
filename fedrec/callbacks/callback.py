"""The base of callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedrec.loop import FederatedLoop
    from fedrec.types import CohortUpdates, RoundContext, RunResult

__all__ = ["Callback"]


class Callback:
    """Hooks into `FederatedLoop`; all empty, override what you need.

    Examples:
        >>> class Shout(Callback):
        ...     def on_round_end(self, loop, ctx, metrics):
        ...         if metrics:
        ...             print(ctx.round, metrics)
    """

    def on_record_start(self, loop: FederatedLoop, max_rounds: int, first_round: int) -> None:
        """Called before the first round of a recording (or of its resumption)."""

    def on_record_end(self, loop: FederatedLoop, result: RunResult) -> None:
        """Called after the last round of a recording."""

    def on_recover_start(
        self, loop: FederatedLoop, name: str, max_rounds: int, first_round: int
    ) -> None:
        """Called before the first round of a recovery (or of its resumption)."""

    def on_recover_end(self, loop: FederatedLoop, result: RunResult) -> None:
        """Called after the last round of a recovery."""

    def on_round_start(self, loop: FederatedLoop, ctx: RoundContext) -> None:
        """Called before the clients of a round are asked."""

    def on_updates(self, loop: FederatedLoop, ctx: RoundContext, updates: CohortUpdates) -> None:
        """Called with what clients sent, after attack and checks; in recovery per exact request."""

    def on_round_end(
        self, loop: FederatedLoop, ctx: RoundContext, metrics: Mapping[str, float]
    ) -> None:
        """Called after the server step, with what was evaluated and logged in this round.

        The round of a recording may still be on its way to the disk; all earlier rounds are stored.
        """

    def on_exception(self, loop: FederatedLoop, error: BaseException) -> None:
        """Called when the run ends by an error or an interrupt."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed recovery has to give back to the callback."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
