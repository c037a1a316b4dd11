"""Rounds as the loop sees them (torch), and as stores keep them (NumPy)."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedrec.exceptions import ShapeError
from fedrec.history.rounds import RoundArrays
from fedrec.types import CohortUpdates, RoundRecord

__all__ = ["is_small", "to_array", "to_arrays", "to_record"]

# Of a smaller round more time is spent in Python than in copying.
_SMALL = 2**20


def is_small(record: RoundRecord) -> bool:
    """Tell whether a round is not worth a thread of its own to encode or to read it."""
    return record.updates.nbytes < _SMALL


def to_array(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as an array, which shares its memory if that is possible."""
    result: NDArray[Any] = tensor.detach().cpu().contiguous().numpy()
    return result


def to_arrays(record: RoundRecord) -> RoundArrays:
    """Return a record as arrays, which share its memory where that is possible.

    Raises:
        ShapeError: If a tensor is not float32 (`num_samples`: int64, `buffers`: or float64).
    """

    def array(name: str, tensor: Tensor, dtype: torch.dtype = torch.float32) -> NDArray[Any]:
        if tensor.dtype != dtype:
            raise ShapeError(
                f"Expected `{name}` of round {record.round} to be {dtype}, but got {tensor.dtype}."
            )
        return to_array(tensor)

    buffers = record.buffers
    is_wide = buffers is not None and buffers.dtype == torch.float64
    wide = torch.float64 if is_wide else torch.float32
    return RoundArrays(
        round=record.round,
        global_weights=array("global_weights", record.global_weights),
        client_ids=tuple(record.client_ids),
        updates=array("updates", record.updates),
        num_samples=array("num_samples", record.num_samples, torch.int64),
        aggregate=array("aggregate", record.aggregate),
        cohort=tuple(record.cohort),
        refused=dict(record.refused),
        buffers=None if buffers is None else array("buffers", buffers, wide),
        departure=record.departure,
    )


def to_record(arrays: RoundArrays) -> RoundRecord:
    """Return arrays as a record, which shares their memory."""
    return RoundRecord(
        round=arrays.round,
        global_weights=torch.from_numpy(arrays.global_weights),
        sent=CohortUpdates(
            client_ids=arrays.client_ids,
            updates=torch.from_numpy(arrays.updates),
            num_samples=torch.from_numpy(arrays.num_samples),
            refused=arrays.refused,
        ),
        aggregate=torch.from_numpy(arrays.aggregate),
        cohort=arrays.cohort,
        buffers=None if arrays.buffers is None else torch.from_numpy(arrays.buffers),
        departure=arrays.departure,
    )
