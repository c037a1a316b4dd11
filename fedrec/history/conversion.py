"""Rounds as the loop sees them (torch), and as stores keep them (NumPy)."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedrec.exceptions import ShapeError
from fedrec.history.rounds import RoundArrays
from fedrec.types import CohortUpdates, RoundRecord

__all__ = ["to_array", "to_arrays", "to_record"]


def to_array(tensor: Tensor, *, pinned: bool = False) -> NDArray[Any]:
    """Return a tensor as an array, which shares its memory if that is possible.

    Args:
        tensor: The tensor.
        pinned: Copy from a GPU to pinned memory, which it writes at full speed, and of which there
            is little.
    """
    tensor = tensor.detach()
    if pinned and tensor.is_cuda:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        tensor = host.copy_(tensor)
    result: NDArray[Any] = tensor.cpu().contiguous().numpy()
    return result


def to_arrays(
    record: RoundRecord, updates: Tensor | None = None, *, pinned: bool = False
) -> RoundArrays:
    """Return a record as arrays, which share its memory where that is possible.

    Args:
        record: The record.
        updates: What to take for its updates; by default `record.updates`.
        pinned: As in `to_array`, for arrays that are soon gone.

    Raises:
        ShapeError: If a tensor is not float32 (`num_samples`: int64, `buffers`: or float64).
    """
    tensors = {
        "global_weights": record.global_weights,
        "updates": record.updates if updates is None else updates,
        "num_samples": record.num_samples,
        "aggregate": record.aggregate,
    }
    if record.buffers is not None:
        tensors["buffers"] = record.buffers
    arrays: dict[str, NDArray[Any]] = {}
    for name, tensor in tensors.items():
        dtype = torch.int64 if name == "num_samples" else torch.float32
        if tensor.dtype != dtype and not (name == "buffers" and tensor.dtype == torch.float64):
            raise ShapeError(
                f"Expected `{name}` of round {record.round} to be {dtype}, but got {tensor.dtype}."
            )
        arrays[name] = to_array(tensor, pinned=pinned)
    return RoundArrays(
        round=record.round,
        global_weights=arrays["global_weights"],
        client_ids=tuple(record.client_ids),
        updates=arrays["updates"],
        num_samples=arrays["num_samples"],
        aggregate=arrays["aggregate"],
        cohort=tuple(record.cohort),
        refused=dict(record.refused),
        buffers=arrays.get("buffers"),
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
