"""A live view of a run: in a terminal, and in a notebook."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any, Protocol

from fedrec.callbacks.callback import Callback

if TYPE_CHECKING:
    from rich.console import Console

    from fedrec.callbacks.callback import LoopSettings
    from fedrec.types import CohortUpdates, RoundContext, RunResult

__all__ = ["RichProgressBar"]

_EVERY = 1.0  # seconds
# A picture is drawn after so many times the seconds that the last one took: drawing takes at most
# 1 / 200 of a run, however slow the terminal is.
_COSTS = 200
_WIDEST = 100
_NAME = 24


class RichProgressBar(Callback):
    """Shows how a run goes: rounds, time left, error rates, clients, bytes of the history.

    Two lines in a terminal, which go when the run ends; the same in a notebook, where they stay.
    Elsewhere, as in a file of output, nothing. Error rates are the last that were evaluated.
    Clients are those of the last round. In a recovery, *exact* ones were asked as planned, *fixed*
    ones because their estimate was abnormal, and of the others the method used what the history
    has, as FedRecover's estimates do.
    """

    def __init__(self) -> None:
        self._view: _View | None = None

    def _start(self, loop: LoopSettings, name: str, max_rounds: int, first_round: int) -> None:
        self._view = _new_view()
        self._name, self._total, self._first = name, max_rounds, first_round
        self._done = first_round
        self._rates: dict[str, float] = {}
        self._clients = ""
        self._asked: list[int] | None = None
        self._began = time.monotonic()
        self._next = 0.0
        self._draw(loop)

    def _draw(self, loop: LoopSettings) -> None:
        """Draw, unless that was done a moment ago."""
        began = time.monotonic()
        if self._view is None or began < self._next:
            return
        done = self._done - self._first
        left = (began - self._began) / done * (self._total - self._done) if done else None
        parts = [f"{name.upper()} {100 * rate:.1f} %" for name, rate in self._rates.items()]
        parts += [self._clients] if self._clients else []
        if loop.history is not None:
            parts.append(f"{loop.history.num_bytes() / 1e6:,.0f} MB")
        self._view.show(self._name, self._done, self._total, _clock(left), "  ".join(parts))
        now = time.monotonic()
        self._next = now + max(_EVERY, _COSTS * (now - began))

    def _end(self, loop: LoopSettings) -> None:
        self._next = 0.0
        self._draw(loop)
        self._close()

    def _close(self) -> None:
        if self._view is not None:
            self._view.close()
        self._view = None

    def on_record_start(self, loop: LoopSettings, max_rounds: int, first_round: int) -> None:
        """Show the view."""
        self._start(loop, "record", max_rounds, first_round)

    def on_recover_start(
        self, loop: LoopSettings, name: str, max_rounds: int, first_round: int
    ) -> None:
        """Show the view."""
        self._start(loop, name, max_rounds, first_round)

    def on_updates(self, loop: LoopSettings, ctx: RoundContext, updates: CohortUpdates) -> None:
        """Count who sent an update that can be used, while recording."""
        if self._view is not None and ctx.phase == "record":
            refused = f", {len(updates.refused)} refused" if updates.refused else ""
            self._clients = f"{len(updates.client_ids)} clients{refused}"

    def on_round_end(
        self, loop: LoopSettings, ctx: RoundContext, metrics: Mapping[str, float]
    ) -> None:
        """Take over the figures of the round."""
        if self._view is None:
            return
        self._done = ctx.round + 1
        for name in ("ter", "asr"):
            if name in metrics:
                self._rates[name] = metrics[name]
        if ctx.phase == "recover":
            fixed = int(metrics.get("fixed", 0))
            exact = int(metrics["asked"]) - fixed
            others = max(0, len(ctx.client_ids) - exact - fixed)
            self._clients = f"exact {exact}  fixed {fixed}  from history {others}"
        self._draw(loop)

    def on_record_end(self, loop: LoopSettings, result: RunResult) -> None:
        """Take the view away."""
        self._end(loop)

    def on_recover_end(self, loop: LoopSettings, result: RunResult) -> None:
        """Take the view away."""
        self._end(loop)

    def on_exception(self, loop: LoopSettings, error: BaseException) -> None:
        """Take the view away."""
        self._close()


def _clock(seconds: float | None) -> str:
    """Return a time that is left as text.

    Examples:
        >>> _clock(3725.2), _clock(59.6), _clock(None)
        ('1:02:05 left', '1:00 left', '')
    """
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} left" if hours else f"{minutes}:{rest:02} left"


class _View(Protocol):
    def show(self, name: str, done: int, total: int, left: str, figures: str) -> None: ...

    def close(self) -> None: ...


def _new_view() -> _View | None:
    """Return a view for where the process runs; `None` where there is no place for one."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_jupyter:
        return _Notebook()
    return _Terminal(console) if console.is_interactive else None


class _Terminal:
    """Two lines at the bottom of the terminal; what is written meanwhile goes above them."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        # Without a thread that draws: it would take time from rounds that are computed.
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def show(self, name: str, done: int, total: int, left: str, figures: str) -> None:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        width = min(self._live.console.width, _WIDEST)
        line = Table.grid(expand=True, padding=(0, 1, 0, 0))
        line.width = width
        line.add_column(no_wrap=True, max_width=_NAME)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        line.add_column(no_wrap=True)
        bar = ProgressBar(total=max(total, 1), completed=done)
        line.add_row(Text(name, overflow="ellipsis"), bar, f"{done}/{total}", left)
        below = Text(figures, no_wrap=True, overflow="ellipsis", style="dim")
        self._live.update(Group(line, below), refresh=True)

    def close(self) -> None:
        self._live.stop()


class _Notebook:
    """A part of a cell's output, which is replaced; it needs no widgets."""

    def __init__(self) -> None:
        self._shown: Any = None

    def show(self, name: str, done: int, total: int, left: str, figures: str) -> None:
        display: Any = importlib.import_module("IPython.display").display
        numbers = "  ".join(part for part in (f"{done}/{total}", left) if part)
        html = (
            f"<div>{escape(name)} <progress value='{done}' max='{max(total, 1)}'></progress> "
            f"{numbers}<br><small>{escape(figures)}</small></div>"
        )
        content = {"text/plain": f"{name}  {numbers}\n{figures}", "text/html": html}
        if self._shown is None:
            self._shown = display(content, raw=True, display_id=True)
        else:
            self._shown.update(content, raw=True)

    def close(self) -> None:
        pass
