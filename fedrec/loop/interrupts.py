"""Ending a run cleanly when the user or the system asks for it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["StopRequest", "stop_between_rounds"]


class StopRequest:
    """The first SIGINT or SIGTERM that has arrived, if any."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def obey(self, when: str, kept: str) -> None:
        """Raise the exception of the signal, if a signal has arrived.

        Args:
            when: After what the run stops, for the message.
            kept: A sentence on what is stored, for the message.

        Raises:
            KeyboardInterrupt: After SIGINT.
            SystemExit: After SIGTERM, with the customary status 143.
        """
        if self.signal == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        if self.signal is not None:
            raise KeyboardInterrupt(f"Stopped {when}. {kept}")


@contextmanager
def stop_between_rounds(*, at_once: bool = False) -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request; a second one acts as if there was no run.

    Args:
        at_once: Obey the request where it arrives, as a round may wait for clients for hours.

    Yields:
        The request; call its `obey` between rounds.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        request.signal = number
        restore()
        if at_once:
            request.obey("during a round", "The rounds before it are stored.")

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.getsignal(number)
        signal.signal(number, handle)
    try:
        yield request
    finally:
        restore()
