"""Reading from a file what lies in a map of it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedrec.exceptions import HistoryCorruptedError
from fedrec.history import LMDBHistory, Manifest
from fedrec.history.lmdb import vectors
from fedrec.history.lmdb.environment import Environment
from fedrec.history.lmdb.mapped import MappedFile
from fedrec.history.lmdb.vectors import VectorReader
from fedrec.history.rounds import RoundArrays

CONTENT = bytes(range(256)) * 64


@pytest.mark.parametrize(("first", "last"), [(0, 16384), (1, 300), (4095, 4097), (16000, 16384)])
def test_a_view_is_read_from_its_place(tmp_path: Path, first: int, last: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    file = MappedFile(path)
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = memoryview(mapped)[first:last]
        head, tail = bytearray(1), bytearray(last - first - 1)
        offset = file.offset(view)
        assert offset == first
        assert file.read_into([(offset, (head, tail))])
        assert bytes(head + tail) == CONTENT[first:last]
        view.release()
    file.close()


def test_views_next_to_each_other_are_read_in_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies between them is skipped; one that is far off, or earlier, is read on its own."""
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    file = MappedFile(path)
    calls = []
    original = os.preadv

    def preadv(descriptor: int, buffers: list[Any], offset: int) -> int:
        calls.append(offset)
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    places = [(10, 300), (300, 700), (4700, 5000), (9097, 9100), (0, 16384)]
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        whole = memoryview(mapped)
        views = [whole[first:last] for first, last in places]
        outs = [bytearray(last - first) for first, last in places]
        offsets = [file.offset(view) for view in views]
        assert offsets == [first for first, _ in places]
        assert file.read_into((first, (out,)) for (first, _), out in zip(places, outs, strict=True))
        assert [bytes(out) for out in outs] == [CONTENT[first:last] for first, last in places]
        for view in (*views, whole):
            view.release()
    assert calls == [10, 9097, 0]
    file.close()


def test_what_is_no_map_of_the_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    file = MappedFile(path)
    assert file.offset(memoryview(CONTENT)[:100]) is None
    assert not file.read_into([(16300, (bytearray(100),))])  # the file ends before
    file.close()


@pytest.mark.parametrize("found", [True, False])
def test_a_round_is_the_same_whichever_way_it_is_read(
    recorded: Callable[..., Path],
    arrays: Callable[..., RoundArrays],
    monkeypatch: pytest.MonkeyPatch,
    found: bool,
) -> None:
    path = recorded(num_rounds=2)
    monkeypatch.setattr(vectors, "_LARGE", 0)
    done: list[bool] = []
    records: list[Any] = []
    original = MappedFile.read_into

    def read_into(self: MappedFile, wanted: Iterable[Any]) -> bool:
        places = list(wanted)
        records.extend(places)
        done.append(found and original(self, places))
        return done[-1]

    monkeypatch.setattr(MappedFile, "read_into", read_into)
    read = LMDBHistory(path).read(1)
    assert np.array_equal(read.updates, arrays(1).updates)
    assert np.array_equal(read.global_weights, arrays(1).global_weights)
    assert done == [found] * len(done)
    assert len(records) == len(read.client_ids) + 2  # global weights and aggregate


@pytest.mark.parametrize("rank", [0, 2, 4])
def test_an_update_is_looked_for_where_it_is_not_as_expected(
    recorded: Callable[..., Path],
    arrays: Callable[..., RoundArrays],
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
) -> None:
    """The first, the last, or one between them is damaged: it is named, and no other is."""
    path = recorded(num_rounds=2)
    monkeypatch.setattr(vectors, "_LARGE", 0)
    data = bytearray((path / "data.mdb").read_bytes())
    data[data.index(arrays(1).updates[rank].tobytes())] ^= 1
    (path / "data.mdb").write_bytes(data)
    store = LMDBHistory(path)
    client_ids = arrays(1).client_ids
    with pytest.raises(HistoryCorruptedError, match=f"round 1, client `{client_ids[rank]}`"):
        store.read(1)
    others = [k for k in range(5) if k != rank]
    read = store.read(1, [client_ids[k] for k in others])
    assert np.array_equal(read.updates, arrays(1).updates[others])
    store.close()


@pytest.mark.parametrize(("first", "last"), [(0, 4), (1, 2), (4, 4)])
def test_no_more_is_fetched_than_lies_between(
    recorded: Callable[..., Path],
    arrays: Callable[..., RoundArrays],
    monkeypatch: pytest.MonkeyPatch,
    first: int,
    last: int,
) -> None:
    """Of a round with many clients, one may be wanted; two vectors more are what may follow."""
    path = recorded(num_rounds=2)
    monkeypatch.setattr(vectors, "_LARGE", 0)
    fetched: list[tuple[int, int]] = []
    monkeypatch.setattr(MappedFile, "expect", lambda _, *place: fetched.append(place))
    client_ids = [arrays(1).client_ids[k] for k in sorted({first, last})]
    LMDBHistory(path).read(1, client_ids)
    data = (path / "data.mdb").read_bytes()
    place = data.index(arrays(1).updates[first].tobytes()) - 48  # where its header begins
    assert fetched == [(place, (last - first + 3) * 8192)]  # 48 + 8,000 bytes take two pages


@pytest.mark.parametrize("short", [0, 10**9])
def test_updates_that_do_not_lie_in_a_row_are_found(
    tmp_path: Path,
    manifest: Manifest,
    arrays: Callable[..., RoundArrays],
    monkeypatch: pytest.MonkeyPatch,
    short: int,
) -> None:
    """They were written in several transactions: pages of keys lie between them.

    With all rows long, each is looked up before it is read; with all short, only afterwards.
    """
    monkeypatch.setattr(vectors, "_LARGE", 0)
    monkeypatch.setattr(vectors, "_SHORT_ROW", short)
    read_in_vain: list[bool] = []
    decode = VectorReader._decode

    def counted(self: VectorReader, *arguments: Any) -> Any:
        found = decode(self, *arguments)
        read_in_vain.append(found is not None)
        return found

    monkeypatch.setattr(VectorReader, "_decode", counted)
    store = LMDBHistory(tmp_path / "history")
    store.transaction_bytes = 10_000  # one vector of 8,000 bytes each
    store.begin(manifest)
    for t in range(3):
        store.append(arrays(t))
    for t in range(3):
        assert np.array_equal(store.read(t).updates, arrays(t).updates)
        some = [arrays(t).client_ids[k] for k in (4, 1, 3)]
        assert np.array_equal(store.read(t, some).updates, arrays(t).updates[[4, 1, 3]])
    assert any(read_in_vain) == (short > 0)
    store.close()


def test_the_file_is_closed_with_the_environment(recorded: Callable[..., Path]) -> None:
    environment = Environment.acquire(recorded(num_rounds=1), None)
    file = environment.file._file
    environment.release()
    with pytest.raises(OSError, match="Bad file descriptor"):
        mmap.mmap(file, 0, prot=mmap.PROT_READ)
