"""Writing and reading rounds in a thread of their own, while others are computed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from fedrec.history.base import HistoryStore
from fedrec.history.view import HistoryView
from fedrec.types import RoundRecord

__all__ = ["BackgroundWriter", "RoundReader", "read_ahead"]

# Niceness: a tenth of the time of a thread that computes on the same processor.
_NICER = 10
# The most rounds that wait to be stored, and their most bytes if there are several.
_MOST_ROUNDS = 8
_MOST_BYTES = 2**22
# Bytes of updates: to read or encode fewer is work for Python alone.
_WORTH_A_THREAD = 2**20


class BackgroundWriter:
    """Writes rounds in order, while others are computed.

    A round is handed over when the one before is stored: memory stays at two rounds, however slow
    the disk. Of small rounds up to 8, or 4 MiB, may wait. From a GPU, rounds are copied in a stream
    of their own, beside what computes the next one.

    Args:
        history: Where to write.
    """

    def __init__(self, history: HistoryStore) -> None:
        self._history = history
        self._thread = ThreadPoolExecutor(1, "fedrec-history-writer")
        self._gives_way = False
        self._stream: torch.cuda.Stream | None = None
        self._waiting: deque[tuple[Future[None], int]] = deque()  # with the bytes of the round

    def write(self, record: RoundRecord) -> None:
        """Hand over a round, whose tensors must not change any more.

        Raises:
            HistoryError: If one before it cannot be stored.
        """
        if self._history.in_memory:
            self._history.write_round(record)
            return
        size = record.sent.num_bytes
        room = _MOST_BYTES - size - sum(size for _, size in self._waiting)
        while self._waiting:
            first, first_size = self._waiting[0]
            if not first.done() and len(self._waiting) < _MOST_ROUNDS and room >= 0:
                break
            self._finish_first()
            room += first_size
        if size >= _WORTH_A_THREAD and not self._gives_way:
            self._gives_way = True
            self._thread.submit(_give_way)
        device, computed = record.aggregate.device, None
        if device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(device)
            computed = torch.cuda.current_stream(device).record_event()
        self._waiting.append((self._thread.submit(self._store, record, computed), size))

    def _store(self, record: RoundRecord, computed: torch.cuda.Event | None) -> None:
        if self._stream is None or computed is None:
            self._history.write_round(record)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            self._history.write_round(record)

    def _finish_first(self) -> None:
        first, _ = self._waiting.popleft()
        try:
            first.result()
        except BaseException:
            # The rounds behind it are refused by the store: they are not the next.
            concurrent.futures.wait(future for future, _ in self._waiting)
            self._waiting.clear()
            raise

    def wait(self) -> None:
        """Return when all that was handed over is stored.

        Raises:
            HistoryError: If it could not be stored.
        """
        while self._waiting:
            self._finish_first()

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()


def _give_way() -> None:
    """Let this thread, and those that it starts, have the processors when nobody computes.

    All processors compute a large round: if encoding takes one of them, the others wait for it. A
    small round is encoded with Python's lock, and whoever computes would wait for a thread that has
    the lock and no processor.
    """
    if sys.platform == "linux":  # elsewhere it would be the whole process
        thread = threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread) + _NICER
        with contextlib.suppress(OSError):  # not every sandbox lets one
            os.setpriority(os.PRIO_PROCESS, thread, nice)


class RoundReader:
    """Reads the rounds of a recovery, each once, and the next one ahead of time.

    When a round is asked for, the one after it is fetched, and no other.

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
        self._current = None  # its memory may be needed for the next round
        ahead, self._ahead = self._ahead, None
        record = ahead[1].result() if ahead is not None and ahead[0] == t else self._read(t)
        self._current = record
        following = self._next.get(t)
        if following is not None and record.sent.num_bytes >= _WORTH_A_THREAD:
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
