"""Memory is used again when nobody can see it, and only then."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedrec.history import LMDBHistory
from fedrec.history.conversion import to_record
from fedrec.history.lmdb.history import _host_memory as host_memory
from fedrec.history.lmdb.pool import Buffers

SHAPE = (4, 2**17)  # two megabytes


def of_torch(size: int) -> NDArray[np.float32]:
    """Memory as it is for a GPU: it belongs to a tensor."""
    return torch.empty(size).numpy()


@pytest.fixture(params=[host_memory, of_torch])
def buffers(request: pytest.FixtureRequest) -> Buffers:
    return Buffers(request.param)


def address(array: NDArray[np.float32]) -> int:
    return array.ctypes.data


@pytest.mark.parametrize(
    "hold",
    [
        lambda array: array,
        lambda array: array[1:3, 5],
        lambda array: array.reshape(-1).view(np.uint8)[7:],
        memoryview,
        torch.from_numpy,
        lambda array: torch.from_numpy(array)[2].numpy()[1:],
        lambda array: torch.from_numpy(array).view(torch.int32).unbind()[0],
    ],
)
def test_what_is_held_is_not_handed_out(buffers: Buffers, hold: Callable[..., object]) -> None:
    other = buffers.take(*SHAPE)  # while one is held, free ones are kept
    first = buffers.take(*SHAPE)
    where = address(first)
    held = hold(first)
    del first
    assert address(buffers.take(*SHAPE)) not in (where, address(other))
    del held
    assert where in {address(array) for array in (buffers.take(*SHAPE), buffers.take(*SHAPE))}


def test_all_memory_goes_with_the_last_array(buffers: Buffers) -> None:
    first, second = buffers.take(*SHAPE), buffers.take(*SHAPE)
    assert len(buffers._kept) == 2
    del first
    assert len(buffers._kept) == 2
    del second
    assert buffers._kept == []


def test_free_memory_of_another_size_is_given_up(buffers: Buffers) -> None:
    first = buffers.take(*SHAPE)
    buffers.take(*SHAPE)
    second = buffers.take(5, 2**17)
    assert second.shape == (5, 2**17)
    assert sorted(kept.size for kept in buffers._kept) == [first.size, second.size]


def test_no_more_than_three_are_kept(buffers: Buffers) -> None:
    held = [buffers.take(*SHAPE) for _ in range(5)]
    assert len(buffers._kept) == 3
    assert len({address(array) for array in held}) == 5


def test_small_arrays_are_not_kept(buffers: Buffers) -> None:
    held = buffers.take(3, 5)
    assert held.shape == (3, 5)
    assert buffers._kept == []


def test_a_pickled_one_is_empty_and_has_the_same_memory() -> None:
    buffers = Buffers(host_memory)
    held = buffers.take(*SHAPE)
    copy = pickle.loads(pickle.dumps(buffers))
    assert copy._kept == []
    assert copy._allocate is host_memory
    assert held.shape == SHAPE


def test_what_was_read_never_changes_while_it_is_held(tmp_path, manifest, arrays) -> None:
    """Rounds of a megabyte: held ones keep their numbers, others are read into their memory."""
    size = 2**17
    wide = dataclasses.replace(manifest, num_parameters=size)
    with LMDBHistory(tmp_path / "h") as history:
        history.begin(wide)
        for t in range(6):
            updates = np.full((5, size), float(t), np.float32)
            weights = np.zeros(size, np.float32)
            record = arrays(t, updates=updates, global_weights=weights, aggregate=weights)
            history.write_round(to_record(record))
        held, where = {}, []
        for t in range(6):
            read = history.read_round(t).updates
            where.append(read.data_ptr())
            if t in (1, 2):
                held[t] = read[2]
        assert where[1] not in where[2:]
        assert where[2] not in where[3:]
        assert where[0] in where[1:]
        assert where[5] in where[3:5]
        assert {t: row.unique().tolist() for t, row in held.items()} == {1: [1.0], 2: [2.0]}
