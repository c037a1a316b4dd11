"""The base of callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torchmetrics import Metric

    from fedrec.executors import Executor
    from fedrec.history import HistoryStore
    from fedrec.types import CohortUpdates, RoundContext, RunResult

__all__ = ["Callback", "LoopSettings"]


class LoopSettings(Protocol):
    """The part of the loop that a callback may read: the arguments of `FederatedLoop`, by name.

    Besides, `history` is the store that is written or read, and `None` between runs.

    Examples:
        >>> from fedrec import FederatedLoop
        >>> def seed_of(loop: LoopSettings) -> int:
        ...     return loop.seed
        >>> seed_of(FederatedLoop(seed=3))
        3
    """

    accelerator: str
    devices: int
    num_nodes: int
    strategy: str
    num_shards: int | None
    timeout: float
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
    history: HistoryStore | None


class Callback:
    """Hooks into `FederatedLoop`. All are empty: override those you need.

    Every hook is given the loop, to read its settings. The weights and updates that hooks are shown
    must not be changed in place.

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
        """Called with what clients sent, after attack and checks; in a recovery, per `exact`."""

    def on_round_end(
        self, loop: LoopSettings, ctx: RoundContext, metrics: Mapping[str, float]
    ) -> None:
        """Called after the server step, with the values that were evaluated and logged in it.

        In a recording, the round may not be stored yet; all earlier rounds are.
        """

    def on_exception(self, loop: LoopSettings, error: BaseException) -> None:
        """Called when the run ends by an error or an interrupt."""

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state, which a resumed recovery gives to `load_state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that `state_dict` returned."""
