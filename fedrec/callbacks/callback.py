"""The base of callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torchmetrics import Metric

    from fedrec.executors import Executor
    from fedrec.types import CohortUpdates, RoundContext, RunResult

__all__ = ["Callback", "LoopSettings"]


class LoopSettings(Protocol):
    """What a callback may read of the loop: the arguments of `FederatedLoop`, by their names.

    Examples:
        >>> from fedrec import FederatedLoop
        >>> def seed_of(loop: LoopSettings) -> int:
        ...     return loop.seed
        >>> seed_of(FederatedLoop(seed=3))
        3
    """

    accelerator: str
    devices: int
    precision: str
    executor: str | Executor
    callbacks: list[Callback]
    logger: Any
    enable_progress_bar: bool
    eval_every: int | None
    eval_samples: int | None
    metrics: dict[str, Metric]
    default_root_dir: Path | None
    seed: int
    deterministic: bool
    fast_dev_run: bool | int
    checkpoint_every: float
    num_threads: int | None


class Callback:
    """Hooks into `FederatedLoop`; all empty, override what you need.

    Each is handed the loop, to read its settings.

    Examples:
        >>> class Shout(Callback):
        ...     def on_round_end(self, loop, ctx, metrics):
        ...         if metrics:
        ...             print(ctx.round, metrics)
    """

    def on_record_start(self, loop: LoopSettings, max_rounds: int, first_round: int) -> None:
        """Called before the first round of a recording (or of its resumption)."""

    def on_record_end(self, loop: LoopSettings, result: RunResult) -> None:
        """Called after the last round of a recording."""

    def on_recover_start(
        self, loop: LoopSettings, name: str, max_rounds: int, first_round: int
    ) -> None:
        """Called before the first round of a recovery (or of its resumption)."""

    def on_recover_end(self, loop: LoopSettings, result: RunResult) -> None:
        """Called after the last round of a recovery."""

    def on_round_start(self, loop: LoopSettings, ctx: RoundContext) -> None:
        """Called before the clients of a round are asked."""

    def on_updates(self, loop: LoopSettings, ctx: RoundContext, updates: CohortUpdates) -> None:
        """Called with what clients sent, after attack and checks; in recovery per exact request."""

    def on_round_end(
        self, loop: LoopSettings, ctx: RoundContext, metrics: Mapping[str, float]
    ) -> None:
        """Called after the server step, with what was evaluated and logged in this round.

        The round of a recording may still be on its way to the disk; all earlier rounds are stored.
        """

    def on_exception(self, loop: LoopSettings, error: BaseException) -> None:
        """Called when the run ends by an error or an interrupt."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed recovery has to give back to the callback."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
