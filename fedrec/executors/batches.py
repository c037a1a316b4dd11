"""Mini-batches of many clients, read together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import TensorDataset

from fedrec.clients.batches import take
from fedrec.clients.lightning import LightningClient
from fedrec.clients.local import random_numbers
from fedrec.types import RoundContext

__all__ = ["ClientData"]

# On a CPU a second copy saves little and costs as much memory as the data.
_LARGEST_COPY = {"cpu": 64 << 20}
_LARGEST_COPY_ON_DEVICE = 4 << 30


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
        self._datasets = {id(c.dataset): c.dataset for c in clients}
        self._offsets: dict[int, int] = {}
        self._tensors: tuple[Tensor, ...] = ()
        found = [d.tensors for d in self._datasets.values() if type(d) is TensorDataset]
        if len(found) < len(self._datasets) or not _alike(found):
            return
        size = sum(t.nbytes for tensors in found for t in tensors)
        if size > _LARGEST_COPY.get(device.type, _LARGEST_COPY_ON_DEVICE):
            return
        self._tensors = tuple(
            torch.cat([t.to(device) for t in parts]) for parts in zip(*found, strict=True)
        )
        starts = np.cumsum([0, *(len(tensors[0]) for tensors in found)]).tolist()
        self._offsets = dict(zip(self._datasets, starts, strict=False))

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
        """
        num_steps = range(len(batches[0]))
        if all(type(c.dataset) is TensorDataset for c in clients):
            for step in num_steps:
                yield self._read(clients, [steps[step] for steps in batches])
            return
        parts = [_draw(c, steps, ctx) for c, steps in zip(clients, batches, strict=True)]
        for step in num_steps:
            yield tree_map(lambda *xs: torch.cat(xs), *(taken[step] for taken in parts))

    def _read(
        self, clients: Sequence[LightningClient], indices: Sequence[np.ndarray]
    ) -> tuple[Tensor, ...]:
        starts = [self._offsets[id(c.dataset)] for c in clients if id(c.dataset) in self._offsets]
        if len(starts) == len(clients):
            rows = np.concatenate(indices) + np.repeat(starts, len(indices[0]))
            index = torch.from_numpy(rows).to(self.device)
            return tuple(t.index_select(0, index) for t in self._tensors)
        parts = [take(c.dataset, i, self.device) for c, i in zip(clients, indices, strict=True)]
        return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


def _alike(datasets: Sequence[tuple[Tensor, ...]]) -> bool:
    """Whether samples of all data sets have the same shapes and types."""
    return len({tuple((t.shape[1:], t.dtype) for t in tensors) for tensors in datasets}) == 1


def _draw(client: LightningClient, steps: Sequence[np.ndarray], ctx: RoundContext) -> list[Any]:
    """Return the batch of each step, drawing the random numbers a sequential client draws."""
    with random_numbers(ctx, client.client_id):
        return [take(client.dataset, indices, ctx.device) for indices in steps]
