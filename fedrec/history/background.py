"""Writing and reading rounds in a thread of their own, while others are computed."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from fedrec.history.base import HistoryStore
from fedrec.types import RoundRecord

__all__ = ["BackgroundWriter", "RoundReader", "read_ahead"]

# Reading less than this takes less time than handing it to a thread.
_SMALL_ROUND = 2**20
# As a niceness: a tenth of the time of one that computes where both want the same processor.
_NICER = 10


class BackgroundWriter:
    """Writes rounds in order, one while the next one is computed.

    At most one round waits: `write` returns at once if the round before is stored, and when it is
    otherwise. So memory stays at two rounds, however slow the disk. What a small round takes of
    Python's lock is taken before `write` returns (`HistoryStore.write_behind`): two threads that
    fight for the lock take longer than one after the other.

    Args:
        history: Where to write.
    """

    def __init__(self, history: HistoryStore) -> None:
        self._history = history
        self._thread = ThreadPoolExecutor(1, "fedrec-history-writer", initializer=_give_way)
        self._pending: Future[None] | None = None

    def write(self, record: RoundRecord) -> None:
        """Hand over a round, whose tensors must not change any more.

        Raises:
            HistoryError: If the round before could not be stored.
        """
        self.wait()
        if self._history.in_memory:
            self._history.write_round(record)
        else:
            may_go_on = threading.Event()
            self._pending = self._thread.submit(self._write, record, may_go_on)
            may_go_on.wait()

    def _write(self, record: RoundRecord, may_go_on: threading.Event) -> None:
        try:
            self._history.write_behind(record, may_go_on.set)
        finally:
            may_go_on.set()

    def wait(self) -> None:
        """Return when all that was handed over is stored.

        Raises:
            HistoryError: If it could not be stored.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

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
        history: The recording.
        client_ids: Clients that remain; the others' updates are never read.
        rounds: Rounds in the order in which they will be read.
        device: Where records are put.
    """

    def __init__(
        self,
        history: HistoryStore,
        client_ids: Iterable[str],
        rounds: Iterable[int],
        device: torch.device,
    ) -> None:
        self._history = history
        self._remaining = frozenset(client_ids)
        steps = list(rounds)
        self._next = dict(itertools.pairwise(steps))
        self._device = device
        self._thread = ThreadPoolExecutor(1, "fedrec-history-reader")
        self._ahead: tuple[int, Future[RoundRecord]] | None = None
        self._current: RoundRecord | None = None

    def cohort(self, t: int) -> tuple[str, ...]:
        """Return the clients that remain of those that took part in round `t`."""
        return tuple(c for c in self._history.present(t) if c in self._remaining)

    def read(self, t: int) -> RoundRecord:
        """Return round `t` with what is kept of its cohort; its tensors must not be changed."""
        if self._current is not None and self._current.round == t:
            return self._current
        self._current = None  # its memory may be needed for the next one
        ahead, self._ahead = self._ahead, None
        record = ahead[1].result() if ahead is not None and ahead[0] == t else self._read(t)
        self._current = record
        following = self._next.get(t)
        if following is not None and record.updates.nbytes >= _SMALL_ROUND:
            self._ahead = following, self._thread.submit(self._read, following)
        return record

    def _read(self, t: int) -> RoundRecord:
        kept = [c for c in self._history.kept(t) if c in self._remaining]
        return self._history.read_round(t, kept).to(self._device)

    def close(self) -> None:
        """Forget what was read, and end the thread."""
        self._current = self._ahead = None
        self._thread.shutdown()


def read_ahead(
    history: HistoryStore, client_ids: Iterable[str], rounds: Iterable[int], device: torch.device
) -> Iterator[RoundRecord]:
    """Read rounds one after another, the next one while this one is worked on.

    Args:
        history: The recording.
        client_ids: Read only these clients' updates, where they are kept.
        rounds: Rounds, each once.
        device: Where records are put.
    """
    steps = list(rounds)
    reader = RoundReader(history, client_ids, steps, device)
    try:
        for t in steps:
            yield reader.read(t)
    finally:
        reader.close()
