"""Mini-batches of many clients, read together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from fedrec.clients.batches import is_plain
from fedrec.clients.generators import random_numbers
from fedrec.clients.lightning import LightningClient
from fedrec.types import RoundContext

__all__ = ["CannotJoinError", "ClientData"]

# On a CPU a second copy saves little and costs as much memory as the data.
_LARGEST_COPY = {"cpu": 64 << 20}
_LARGEST_COPY_ON_DEVICE = 4 << 30


class CannotJoinError(Exception):
    """The batches of several clients cannot be made one; the message says why."""


class ClientData:
    """The clients' data as one tensor on the device, if that fits.

    Then the mini-batches of any number of clients are one indexed read. Up to 64 MiB of data are
    copied on a CPU, up to 4 GiB to another device. Larger data, and data sets other than a
    `TensorDataset`, are read client by client.

    Args:
        clients: All clients.
        device: Where batches are needed.
    """

    def __init__(self, clients: Sequence[LightningClient], device: torch.device) -> None:
        self.device = device
        # The data sets are kept, so that no other object gets the identity of one of them.
        unlike: dict[int, Any] = {id(c.dataset): c for c in clients}
        self._datasets = {key: c.dataset for key, c in unlike.items()}
        self._offsets: dict[int, int] = {}
        self._copied: dict[int, list[tuple[Tensor, int]]] = {}
        self._tensors: tuple[Tensor, ...] = ()
        found = [c.dataset.tensors for c in unlike.values() if is_plain(c.dataset, c.collate_fn)]
        if len(found) < len(self._datasets) or not _alike(found):
            return
        if any(t.layout != torch.strided for tensors in found for t in tensors):
            return
        size = sum(t.nbytes for tensors in found for t in tensors)
        if size > _LARGEST_COPY.get(device.type, _LARGEST_COPY_ON_DEVICE):
            return
        self._tensors = tuple(
            torch.cat([t.to(device) for t in parts]) for parts in zip(*found, strict=True)
        )
        starts = np.cumsum([0, *(len(tensors[0]) for tensors in found)]).tolist()
        self._offsets = dict(zip(self._datasets, starts, strict=False))
        self._copied = {
            key: [(t, t._version) for t in tensors]
            for key, tensors in zip(self._datasets, found, strict=True)
        }

    def _is_current(self, dataset: Any) -> bool:
        """Whether a data set is as it was when it was copied."""
        held = self._copied.get(id(dataset))
        return held is not None and all(
            now is tensor and now._version == version
            for now, (tensor, version) in zip(dataset.tensors, held, strict=True)
        )

    def steps(
        self,
        clients: Sequence[LightningClient],
        batches: Sequence[Sequence[np.ndarray]],
        ctx: RoundContext,
    ) -> Iterator[Any]:
        """Yield the batches of each local step, those of all clients one after the other.

        Args:
            clients: The clients, $c$ of them.
            batches: Sample indices for each client and local step, of equal sizes $b$ in a step.
            ctx: The round.

        Yields:
            What a data loader would give, with $c b$ samples.

        Raises:
            CannotJoinError: If the batches of the clients are not tensors of one shape and type
                with $b$ rows each, in the same places.
        """
        num_steps = range(len(batches[0]))
        if all(is_plain(c.dataset, c.collate_fn) for c in clients):
            for step in num_steps:
                yield self._read(clients, [steps[step] for steps in batches])
            return
        parts = [_draw(c, steps, ctx) for c, steps in zip(clients, batches, strict=True)]
        for step in num_steps:
            yield _joined([taken[step] for taken in parts], len(batches[0][step]))

    def _read(self, clients: Sequence[LightningClient], indices: Sequence[np.ndarray]) -> Any:
        starts = [self._offsets[id(c.dataset)] for c in clients if self._is_current(c.dataset)]
        if len(starts) == len(clients):
            rows = np.concatenate(indices) + np.repeat(starts, len(indices[0]))
            index = torch.from_numpy(rows).to(self.device)
            return [t.index_select(0, index) for t in self._tensors]
        parts = [c.read(i, self.device) for c, i in zip(clients, indices, strict=True)]
        return _joined(parts, len(indices[0]))


def _alike(datasets: Sequence[tuple[Tensor, ...]]) -> bool:
    """Whether samples of all data sets have the same shapes and types."""
    return len({tuple((t.shape[1:], t.dtype) for t in tensors) for tensors in datasets}) == 1


def _joined(batches: Sequence[Any], size: int) -> Any:
    """Make one batch of those of several clients, of `size` samples each."""
    # To torch's trees a packed sequence is a named tuple, but its rows are not those of samples.
    flat = [tree_flatten(b, is_leaf=lambda x: isinstance(x, PackedSequence)) for b in batches]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise CannotJoinError("clients' batches are not alike")
    joined = []
    for parts in zip(*(leaves for leaves, _ in flat), strict=True):
        if not all(isinstance(x, Tensor) and x.shape[:1] == (size,) for x in parts):
            raise CannotJoinError("batches do not consist of tensors with a row for each sample")
        if len({(x.shape, x.dtype) for x in parts}) > 1:
            raise CannotJoinError("clients' batches differ in shape or type")
        joined.append(torch.cat(parts))
    return tree_unflatten(joined, spec)


def _draw(client: LightningClient, steps: Sequence[np.ndarray], ctx: RoundContext) -> list[Any]:
    """Return the batch of each step, drawing the random numbers a sequential client draws."""
    with random_numbers(ctx, client.client_id, client.generators()):
        return [client.read(indices, ctx.device) for indices in steps]
