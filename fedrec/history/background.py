"""Writing and reading rounds in a thread of their own, while others are computed."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import torch

from fedrec.exceptions import HistoryError
from fedrec.history.base import HistoryStore
from fedrec.history.codecs.rows import unaided_until
from fedrec.history.conversion import is_small
from fedrec.history.rounds import RoundArrays
from fedrec.history.view import HistoryView
from fedrec.types import RoundRecord

__all__ = ["BackgroundWriter", "RoundReader", "read_ahead"]

# As a niceness: a tenth of the time of one that computes where both want the same processor.
_NICER = 10
# Rounds that are not yet stored, and their bytes, if it is more than one.
_MOST_ROUNDS = 8
_MOST_BYTES = 2**22
_ALL_ROOM = _MOST_BYTES + 1


@runtime_checkable
class Stages(Protocol):
    """A store that can do most of `append` before it is the round's turn to be written."""

    def stage(self, arrays: RoundArrays) -> Any:
        """Do all of `append` but to write; the arrays may change from then on."""

    def write_staged(self, rounds: Sequence[Any], before_commit: Callable[[], None]) -> None:
        """Append what `stage` returned, in one transaction."""


class BackgroundWriter:
    """Writes rounds in order, while others are computed.

    A round is handed over when the one before is stored: memory stays at two rounds, however slow
    the disk. Of small rounds up to 8, or 4 MiB, may wait: those that come while the disk is busy
    are written together, and wait for it once. What a small round takes of Python's lock is taken
    before `write` returns, if the disk is idle (`Stages`): two threads
    that fight for the lock take longer than one after the other. A large round is encoded by this
    one thread, and by others as soon as someone waits for it.

    Args:
        history: Where to write.
    """

    def __init__(self, history: HistoryStore) -> None:
        self._history = history
        self._staging = history if isinstance(history, Stages) else None
        self._thread = ThreadPoolExecutor(1, "fedrec-history-writer", initializer=_give_way)
        self._changed = threading.Condition()
        self._waiting: list[Any] = []  # for the thread: staged rounds, or one that was not
        self._sizes: list[int] = []  # of all rounds that are not yet stored
        self._error: BaseException | None = None
        self._is_waited_for = False

    def write(self, record: RoundRecord) -> None:
        """Hand over a round, whose tensors must not change any more.

        Raises:
            HistoryError: If it, or one before it, cannot be stored.
        """
        if self._history.in_memory:
            self._history.write_round(record)
            return
        size = record.updates.nbytes if is_small(record) else _ALL_ROOM
        self._wait_for_room(size)
        try:
            staged = None
            if self._staging is not None and is_small(record):
                staged = self._staging.stage(self._history.to_arrays(record))
        except HistoryError:
            self.wait()  # raises if one before it could not be stored
            raise
        if staged is None:
            size = _ALL_ROOM
            self._wait_for_room(size)
        may_go_on = threading.Event()
        with self._changed:
            self._waiting.append(record if staged is None else staged)
            self._sizes.append(size)
            is_idle = len(self._sizes) == 1
        self._thread.submit(self._write, may_go_on)
        if is_idle:
            may_go_on.wait()

    def _wait_for_room(self, size: int) -> None:
        def there_is() -> bool:
            few = len(self._sizes) < _MOST_ROUNDS and sum(self._sizes) + size <= _MOST_BYTES
            return few or not self._sizes

        with self._changed:
            self._is_waited_for = True
            self._changed.wait_for(there_is)
            self._is_waited_for = False
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, may_go_on: threading.Event) -> None:
        """Write all that waits."""
        with self._changed:
            taken, self._waiting = self._waiting, []
        stored = len(taken)
        try:
            if taken and isinstance(taken[0], RoundRecord):  # alone, as it took all the room
                may_go_on.set()
                with unaided_until(lambda: self._is_waited_for):
                    self._history.write_round(taken[0])
            elif taken and self._staging is not None:
                self._staging.write_staged(taken, may_go_on.set)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that computes
            with self._changed:
                self._error = error
                self._waiting = []  # they were to come behind it
                stored = len(self._sizes)
        with self._changed:
            del self._sizes[:stored]
            self._changed.notify_all()
        may_go_on.set()

    def wait(self) -> None:
        """Return when all that was handed over is stored.

        Raises:
            HistoryError: If it could not be stored.
        """
        self._wait_for_room(_ALL_ROOM)

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()


def _give_way() -> None:
    """Let this thread, and those that it starts, have the processors when nobody computes.

    All processors compute a round: one that is taken for encoding holds up the others.
    """
    if sys.platform == "linux":  # elsewhere it would be the whole process
        thread = threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread) + _NICER
        with contextlib.suppress(OSError):  # not every sandbox lets one
            os.setpriority(os.PRIO_PROCESS, thread, nice)


class RoundReader:
    """Reads the rounds of a recovery, each once, and the next one ahead of time.

    Only what is asked for is read: the next round is fetched when this one was asked for.

    Args:
        history: The recording; updates of clients that do not remain are never read.
        rounds: Rounds in the order in which they will be read.
        device: Where records are put.
    """

    def __init__(self, history: HistoryView, rounds: Iterable[int], device: torch.device) -> None:
        self._history = history
        steps = list(rounds)
        self._next = dict(itertools.pairwise(steps))
        self._device = device
        self._thread = ThreadPoolExecutor(1, "fedrec-history-reader")
        self._ahead: tuple[int, Future[RoundRecord]] | None = None
        self._current: RoundRecord | None = None

    def read(self, t: int) -> RoundRecord:
        """Return round `t` with what is kept of its cohort; its tensors must not be changed."""
        if self._current is not None and self._current.round == t:
            return self._current
        self._current = None  # its memory may be needed for the next one
        ahead, self._ahead = self._ahead, None
        record = ahead[1].result() if ahead is not None and ahead[0] == t else self._read(t)
        self._current = record
        following = self._next.get(t)
        if following is not None and not is_small(record):
            self._ahead = following, self._thread.submit(self._read, following)
        return record

    def _read(self, t: int) -> RoundRecord:
        return self._history.read(t).to(self._device)

    def close(self) -> None:
        """Forget what was read, and end the thread."""
        self._current = self._ahead = None
        self._thread.shutdown()


def read_ahead(
    history: HistoryView, rounds: Iterable[int], device: torch.device
) -> Iterator[RoundRecord]:
    """Read rounds one after another, the next one while this one is worked on.

    Args:
        history: The recording; updates of clients that do not remain are never read.
        rounds: Rounds, each once.
        device: Where records are put.
    """
    steps = list(rounds)
    reader = RoundReader(history, steps, device)
    try:
        for t in steps:
            yield reader.read(t)
    finally:
        reader.close()
