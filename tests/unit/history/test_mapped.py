"""Reading from a file what lies in a map of it."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedrec.history import snapshot
from fedrec.history.environment import Environment
from fedrec.history.mapped import MappedFile
from fedrec.history.rounds import RoundArrays
from fedrec.history.store import RoundStore

CONTENT = bytes(range(256)) * 64


@pytest.mark.parametrize(("first", "last"), [(0, 16384), (1, 300), (4095, 4097), (16000, 16384)])
def test_a_view_is_read_from_its_place(tmp_path: Path, first: int, last: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    file = MappedFile(path)
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = memoryview(mapped)[first:last]
        head, tail = bytearray(1), bytearray(last - first - 1)
        assert file.read_into(view, (head, tail))
        assert bytes(head + tail) == CONTENT[first:last]
        view.release()
    file.close()


def test_what_is_no_map_of_the_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    file = MappedFile(path)
    out = bytearray(100)
    assert not file.read_into(memoryview(CONTENT)[:100], (out,))
    assert out == bytes(100)
    file.close()


@pytest.mark.parametrize("found", [True, False])
def test_a_round_is_the_same_whichever_way_it_is_read(
    recorded: Callable[..., Path],
    arrays: Callable[..., RoundArrays],
    monkeypatch: pytest.MonkeyPatch,
    found: bool,
) -> None:
    path = recorded(num_rounds=2)
    monkeypatch.setattr(snapshot, "_LARGE", 0)
    done = []
    original = MappedFile.read_into

    def read_into(self: MappedFile, view: memoryview, buffers: tuple[bytearray, ...]) -> bool:
        done.append(found and original(self, view, buffers))
        return done[-1]

    monkeypatch.setattr(MappedFile, "read_into", read_into)
    read = RoundStore(path).read_round(1)
    assert np.array_equal(read.updates, arrays(1).updates)
    assert np.array_equal(read.global_weights, arrays(1).global_weights)
    assert done == [found] * len(done)
    assert len(done) >= len(read.client_ids)


def test_the_file_is_closed_with_the_environment(recorded: Callable[..., Path]) -> None:
    environment = Environment.acquire(recorded(num_rounds=1), None)
    file = environment.file._file
    environment.release()
    with pytest.raises(OSError, match="Bad file descriptor"):
        mmap.mmap(file, 0, prot=mmap.PROT_READ)
