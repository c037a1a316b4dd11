"""How long the rest of a sweep will take."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Clock", "time_text"]


@dataclass(eq=False)
class Clock:
    """Tells how long the rest of a sweep will take, from how long its parts took so far.

    Args:
        points: How many points are to do.
        recordings: How many recordings they need.
    """

    points: int
    recordings: int
    _points: list[float] = field(default_factory=list)
    _recordings: list[float] = field(default_factory=list)

    def recorded(self, seconds: float | None) -> None:
        """Note a recording, or that it was there already."""
        self.recordings -= 1
        self._recordings += [] if seconds is None else [seconds]

    def skipped(self, points: int) -> None:
        """Note that a recording failed, and so the points on it."""
        self.recordings -= 1
        self.points -= points

    def did(self, seconds: float) -> None:
        """Note a point."""
        self.points -= 1
        self._points.append(seconds)

    def left(self) -> str:
        """Say how long the rest will take."""
        pairs = (self._points, self.points), (self._recordings, self.recordings)
        left = sum(sum(took) / len(took) * more for took, more in pairs if took)
        return f", about {time_text(left)} left" if self.points else ""


def time_text(seconds: float) -> str:
    """Write a time as people say it.

    Args:
        seconds: The time.

    Examples:
        >>> time_text(3.2), time_text(600), time_text(9000)
        ('3 s', '10 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
