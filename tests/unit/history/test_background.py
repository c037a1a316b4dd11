"""Writing and reading in another thread changes when things happen, and nothing else."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedrec.aggregators import FedAvg
from fedrec.exceptions import HistoryCorruptedError, HistoryError, HistoryFullError
from fedrec.history import HistoryView, LMDBHistory, Manifest, MemoryHistory
from fedrec.history.background import BackgroundWriter, RoundReader, read_ahead
from fedrec.history.lmdb.environment import Environment
from fedrec.loop import FederatedLoop
from fedrec.recoverers import FedRecover, TrainFromScratch
from fedrec.testing.problems import quadratic_federation
from fedrec.types import CohortUpdates, RoundRecord

CPU = torch.device("cpu")
GPU = torch.device("cuda", 1)
CLIENTS = ("a", "b", "c")
SIZE = 2**18  # two clients' updates of a round are 2 MiB, and read ahead


def record(t: int, size: int = SIZE) -> RoundRecord:
    return RoundRecord(
        round=t,
        global_weights=torch.full((size,), float(t)),
        sent=CohortUpdates(
            client_ids=CLIENTS,
            updates=torch.tensor([[1.0], [2.0], [3.0]]).expand(3, size) * (t + 1),
            num_samples=torch.tensor([1, 2, 3]),
        ),
        aggregate=torch.zeros(size),
    )


class Watched(MemoryHistory):
    """Says who reads and writes what, and can be made to wait or to fail."""

    in_memory = False

    def __init__(self, num_rounds: int = 0, size: int = SIZE) -> None:
        super().__init__()
        self.reads: list[tuple[int, tuple[str, ...] | None, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.damaged: set[int] = set()
        self.full_from = 10**9
        self.begin(
            Manifest(
                model_fingerprint="f",
                num_parameters=size,
                clients={"a": 1, "b": 2, "c": 3},
                seed=0,
                aggregator=FedAvg().spec(),
                server_lr=0.1,
                max_rounds=100,
            )
        )
        for t in range(num_rounds):
            super().write_round(record(t, size))

    def write_round(self, record: RoundRecord) -> None:
        self.gate.wait()
        if record.round >= self.full_from:
            raise HistoryFullError(f"no room for round {record.round}")
        super().write_round(record)

    def read_round(self, t: int, client_ids: Sequence[str] | None = None) -> RoundRecord:
        ids = None if client_ids is None else tuple(client_ids)
        self.reads.append((t, ids, threading.get_ident()))
        if t in self.damaged:
            raise HistoryCorruptedError(f"round {t} is damaged")
        return super().read_round(t, client_ids)


@contextmanager
def in_a_thread(writer: BackgroundWriter, method: str, *args: Any) -> Iterator[SimpleQueue[str]]:
    """Call a method of the writer meanwhile; the queue is told when it waits, and that it ended."""
    told: SimpleQueue[str] = SimpleQueue()
    finish = writer._finish_first

    def finish_first() -> None:
        told.put("waits")
        finish()

    def call() -> None:
        try:
            getattr(writer, method)(*args)
        finally:
            told.put("ended")

    thread = threading.Thread(target=call)
    writer._finish_first = finish_first
    thread.start()
    yield told
    thread.join()


def test_the_writer_lets_one_round_wait_and_no_more() -> None:
    history = Watched()
    history.gate.clear()
    writer = BackgroundWriter(history)
    writer.write(record(0))  # returns, although nothing can be stored yet
    assert history.rounds() == range(0)
    with in_a_thread(writer, "write", record(1)) as told:
        first = told.get()
        history.gate.set()
    assert first == "waits"  # back-pressure
    writer.close()
    assert history.rounds() == range(2)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no niceness")
@pytest.mark.parametrize(("size", "lower"), [(SIZE, 10), (SIZE // 4, 0)])
def test_the_writer_of_large_rounds_gives_way_to_who_computes(size: int, lower: int) -> None:
    class Priorities(Watched):
        def write_round(self, record: RoundRecord) -> None:
            with ThreadPoolExecutor(1) as pool:  # as for encoding
                self.found = (niceness(), pool.submit(niceness).result())

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    history = Priorities(size=size)
    writer = BackgroundWriter(history)
    writer.write(record(0, size))
    writer.close()
    expected = min(19, before + lower)
    assert history.found == (expected, expected)
    assert niceness() == before


def test_the_writer_raises_what_went_wrong_and_keeps_what_was_stored() -> None:
    history = Watched()
    history.full_from = 1
    writer = BackgroundWriter(history)
    writer.write(record(0))
    writer.write(record(1))
    with pytest.raises(HistoryFullError, match="round 1"):
        writer.write(record(2))
    writer.close()  # the error was told; nothing is written behind it
    assert history.rounds() == range(1)


class Disk:
    """Holds up every commit until the gate opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        write = Environment.write

        @contextmanager
        def held_up(environment: Environment, num_bytes: int) -> Iterator[Any]:
            with write(environment, num_bytes) as txn:
                yield txn
                self.gate.wait()

        monkeypatch.setattr(Environment, "write", held_up)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Return a disk that is busy."""
    busy = Disk(monkeypatch)
    yield busy
    busy.gate.set()  # so that no thread outlives a test that failed


def begun(path: Path, size: int = 10, **arguments: Any) -> LMDBHistory:
    history = LMDBHistory(path, **arguments)
    history.begin(Watched(size=size).manifest)
    return history


@pytest.mark.parametrize(("size", "most"), [(10, 8), (80_000, 4)])  # of 960,000 bytes each
def test_some_small_rounds_may_wait_for_the_disk(
    tmp_path: Path, disk: Disk, size: int, most: int
) -> None:
    with begun(tmp_path, size) as history:
        writer = BackgroundWriter(history)
        for t in range(most):
            writer.write(record(t, size))  # returns, although nothing can be stored yet
        assert history.rounds() == range(0)
        with in_a_thread(writer, "write", record(most, size)) as told:
            first = told.get()
            disk.gate.set()
        assert first == "waits"  # back-pressure
        writer.close()
        assert history.verify() == range(most + 1)
        for t in range(most + 1):
            assert torch.equal(history.read_round(t).updates, record(t, size).updates)


def test_of_rounds_that_wait_those_are_stored_for_which_there_is_room(
    tmp_path: Path, disk: Disk
) -> None:
    """A round takes about 84 KB; the map has room for some of them, and not for seven."""
    size = 4096
    with begun(tmp_path, size, map_size=2**19) as history:
        writer = BackgroundWriter(history)
        for t in range(8):
            writer.write(record(t, size))
        disk.gate.set()
        with pytest.raises(HistoryFullError, match="all earlier rounds are intact"):
            writer.wait()
        head = len(history.rounds())
        assert 2 < head < 8
        assert history.verify() == range(head)
        writer.write(record(8, size))  # was to come behind those that are not stored
        with pytest.raises(HistoryError, match=f"Expected round {head} to be written next"):
            writer.wait()
        writer.write(record(head, size))  # but that one can be tried again
        with pytest.raises(HistoryFullError):
            writer.close()
    with LMDBHistory(tmp_path, map_size=2**22) as history:
        history.write_round(record(head, size))
        assert history.verify() == range(head + 1)


def test_computing_goes_on_before_a_large_round_is_committed(tmp_path: Path, disk: Disk) -> None:
    with begun(tmp_path, SIZE) as history:
        writer = BackgroundWriter(history)
        writer.write(record(0))
        assert history.rounds() == range(0)
        disk.gate.set()
        writer.close()
        assert history.rounds() == range(1)


def test_a_recording_stops_at_a_full_store_with_all_earlier_rounds() -> None:
    class Full(MemoryHistory):
        in_memory = False

        def write_round(self, record: RoundRecord) -> None:
            if record.round == 3:
                raise HistoryFullError("full")
            super().write_round(record)

    history = Full()
    loop = FederatedLoop(enable_progress_bar=False)
    with pytest.raises(HistoryFullError, match="full"):
        loop.record(quadratic_federation(), FedAvg(), history, max_rounds=9, server_lr=0.1)
    assert history.rounds() == range(3)


def test_the_last_round_is_stored_when_record_returns(tmp_path) -> None:
    loop = FederatedLoop(enable_progress_bar=False)
    memory, disk = MemoryHistory(), LMDBHistory(tmp_path / "h")
    for history in (memory, disk):
        loop.record(quadratic_federation(), FedAvg(), history, max_rounds=7, server_lr=0.1)
    with disk:
        assert disk.rounds() == memory.rounds() == range(7)
        for t in range(7):
            assert torch.equal(disk.read_round(t).updates, memory.read_round(t).updates)


def test_rounds_are_read_once_and_the_next_one_ahead() -> None:
    history = Watched(num_rounds=4)
    reader = RoundReader(HistoryView(history, ["a", "c"]), [0, 2, 3], CPU)
    me = threading.get_ident()
    first = reader.read(0)
    assert reader.read(0) is first
    assert torch.equal(first.updates[:, 0], torch.tensor([1.0, 3.0]))
    assert torch.equal(reader.read(2).updates[:, 0], torch.tensor([3.0, 9.0]))
    assert torch.equal(reader.read(3).updates[:, 0], torch.tensor([4.0, 12.0]))
    reader.close()
    assert [(t, ids) for t, ids, _ in history.reads] == [(t, ("a", "c")) for t in (0, 2, 3)]
    assert [thread == me for _, _, thread in history.reads] == [True, False, False]


def test_nothing_is_read_that_nobody_asked_for() -> None:
    history = Watched(num_rounds=3)
    view = HistoryView(history)
    reader = RoundReader(view, [0, 1, 2], CPU)
    for t in range(3):
        assert view.cohort(t) == CLIENTS
    reader.close()
    assert history.reads == []


def test_small_rounds_are_not_worth_a_thread() -> None:
    history = Watched(num_rounds=3, size=10)
    assert [r.round for r in read_ahead(HistoryView(history, ["b"]), range(3), CPU)] == [0, 1, 2]
    assert {thread for _, _, thread in history.reads} == {threading.get_ident()}


def test_a_damaged_round_is_an_error_only_where_it_is_needed() -> None:
    history = Watched(num_rounds=3)
    history.damaged = {1}
    reader = RoundReader(HistoryView(history), [0, 1, 2], CPU)
    reader.read(0)
    with pytest.raises(HistoryCorruptedError, match="round 1"):
        reader.read(1)
    assert reader.read(2).round == 2
    reader.close()


@pytest.mark.parametrize(("recoverer", "reads"), [(FedRecover(), 2), (TrainFromScratch(), 0)])
def test_a_recovery_reads_the_updates_of_a_round_once(recoverer, reads) -> None:
    """FedRecover reads once more beforehand, for the abnormality threshold."""
    recording, history = MemoryHistory(), Watched(size=4)
    federation = quadratic_federation()
    loop = FederatedLoop(enable_progress_bar=False)
    loop.record(federation, FedAvg(), recording, max_rounds=40, server_lr=0.1)
    history._manifest, history._rounds = recording._manifest, recording._rounds
    history._bounds = recording._bounds
    loop.recover(federation, history, recoverer, exclude=["q4"])
    final = set(range(35, 40))  # asked without looking at history
    for t in set(range(40)) - final:
        assert sum(1 for u, ids, _ in history.reads if u == t and ids) <= reads


def test_from_a_gpu_rounds_are_stored_in_a_stream_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No GPU is needed: streams note what is asked of them, in which order."""
    asked: list[str] = []
    current = threading.local()  # as in torch, every thread has its own

    class Stream:
        def __init__(self, name: object) -> None:
            self.name = name
            asked.append(f"made for {name}")

        def record_event(self) -> str:
            asked.append("computed")
            return "what was computed"

        def wait_event(self, event: str) -> None:
            asked.append(f"waits for {event}")

    @contextmanager
    def stream(wanted: Stream) -> Iterator[None]:
        current.stream = wanted
        yield
        current.stream = None

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    computing = Stream("computing")

    class There(Watched):
        def write_round(self, record: RoundRecord) -> None:
            asked.append(f"stores in that for {current.stream.name}")

    writer = BackgroundWriter(There())
    for t in range(2):
        there = SimpleNamespace(round=t, sent=record(t).sent, aggregate=SimpleNamespace(device=GPU))
        writer.write(there)
        writer.wait()
    writer.close()
    stored = ["waits for what was computed", "stores in that for cuda:1"]
    assert asked[1:] == ["made for cuda:1", "computed", *stored, "computed", *stored]
