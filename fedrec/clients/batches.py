"""Which samples a client trains on in a round, and how they become batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from fedrec.random import reused_generator

__all__ = ["batch_indices", "take"]


def batch_indices(
    *,
    seed: int,
    round: int,
    client_id: str,
    num_samples: int,
    batch_size: int | None,
    local_steps: int | None,
    local_epochs: int | None,
    purpose: str = "batch",
) -> list[np.ndarray]:
    """Draw the mini-batches of one client in one round, without replacement within an epoch.

    Args:
        seed: Seed of the recording.
        round: Round $t$.
        client_id: Name of the client.
        num_samples: Size of the data set that batches are drawn from.
        batch_size: Samples per batch; `None`, or at least `num_samples`, for the full batch, which
            needs no randomness.
        local_steps: Batches to draw; exactly one of this and `local_epochs` is not `None`.
        local_epochs: Passes over the data; the last batch of a pass may be smaller.
        purpose: Name of the random stream; another name gives other batches.

    Returns:
        One array of indices per local step.
    """
    size = num_samples if batch_size is None else min(batch_size, num_samples)
    if size == num_samples:
        steps = local_steps if local_steps is not None else local_epochs
        return [np.arange(num_samples)] * (steps or 0)
    generator = reused_generator(seed, purpose, round, client_id)
    if local_epochs is not None:
        return [
            order[i : i + size]
            for order in (generator.permutation(num_samples) for _ in range(local_epochs))
            for i in range(0, num_samples, size)
        ]
    batches: list[np.ndarray] = []
    order = generator.permutation(num_samples)
    start = 0
    for _ in range(local_steps or 0):
        if start + size > num_samples:
            order, start = generator.permutation(num_samples), 0
        batches.append(order[start : start + size])
        start += size
    return batches


def take(dataset: Dataset[Any], indices: np.ndarray, device: torch.device) -> Any:
    """Return the collated samples at these indices, on the device."""
    if type(dataset) is TensorDataset:  # a subclass may transform in __getitem__
        index = torch.from_numpy(indices)
        return tuple(t[index.to(t.device)].to(device) for t in dataset.tensors)
    batch = default_collate([dataset[int(i)] for i in indices])
    return _to(batch, device)


def _to(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {k: _to(v, device) for k, v in batch.items()}
    if isinstance(batch, (list, tuple)):
        return tuple(_to(v, device) for v in batch)
    return batch
