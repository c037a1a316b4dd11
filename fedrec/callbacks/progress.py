"""A progress bar in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedrec.callbacks.callback import Callback

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from fedrec.callbacks.callback import LoopSettings
    from fedrec.types import RoundContext, RunResult

__all__ = ["RichProgressBar"]


class RichProgressBar(Callback):
    """Shows rounds, time left and the last evaluated figures; nothing if there is no terminal.

    Examples:
        >>> RichProgressBar().is_shown  # no terminal here
        False
    """

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    @property
    def is_shown(self) -> bool:
        """Whether a bar is on the screen."""
        return self._progress is not None

    def _start(self, name: str, max_rounds: int, first_round: int) -> None:
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=Console(stderr=True),
        )
        self._progress.start()
        self._task = self._progress.add_task(
            name, total=max_rounds, completed=first_round, figures=""
        )

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = None

    def on_record_start(self, loop: LoopSettings, max_rounds: int, first_round: int) -> None:
        """Show the bar."""
        self._start("record", max_rounds, first_round)

    def on_recover_start(
        self, loop: LoopSettings, name: str, max_rounds: int, first_round: int
    ) -> None:
        """Show the bar."""
        self._start(name, max_rounds, first_round)

    def on_round_end(
        self, loop: LoopSettings, ctx: RoundContext, metrics: Mapping[str, float]
    ) -> None:
        """Move the bar on by one round."""
        if self._progress is None or self._task is None:
            return
        self._progress.update(self._task, completed=ctx.round + 1)
        shown = [
            f"{name.upper()} {100 * metrics[name]:.1f} %"
            for name in ("ter", "asr")
            if name in metrics
        ]
        if shown:
            self._progress.update(self._task, figures="  ".join(shown))

    def on_record_end(self, loop: LoopSettings, result: RunResult) -> None:
        """Take the bar away."""
        self._stop()

    def on_recover_end(self, loop: LoopSettings, result: RunResult) -> None:
        """Take the bar away."""
        self._stop()

    def on_exception(self, loop: LoopSettings, error: BaseException) -> None:
        """Take the bar away."""
        self._stop()
