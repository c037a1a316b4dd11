"""Clients that share a module, in one round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrec.clients.lightning import LightningClient
from fedrec.clients.local import LogMeans
from fedrec.executors.batches import ClientData
from fedrec.executors.kinds import CannotGroupError
from fedrec.types import RoundContext

__all__ = ["Cohort", "Train"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Cohort:
    """Clients that share a module, and their batches in one round.

    Args:
        clients: The clients.
        batches: Sample indices for each client and local step.
        data: What batches are read from.
        scale: Learning rate over `local_lr` by parameter name, for one step of plain SGD.
        global_weights: Shape $(d,)$.
        ctx: The round.
    """

    clients: Sequence[LightningClient]
    batches: Sequence[Sequence[np.ndarray]]
    data: ClientData
    scale: Mapping[str, float]
    global_weights: Tensor
    ctx: RoundContext

    @property
    def module(self) -> Any:
        """The module that the clients share."""
        return self.clients[0].module

    def load(self) -> None:
        """Put the global weights and buffers into the module."""
        self.ctx.layout.load(self.module, self.global_weights)
        if self.ctx.buffers is not None:
            self.ctx.layout.load_buffers(self.module, self.ctx.buffers)

    def refuse_other_weights(self, weights: Tensor | None = None) -> None:
        """Raise `CannotGroupError` if a training step wrote to the weights, for all clients.

        Args:
            weights: What they are now, shape $(d,)$; those of the module if left out.
        """
        weights = self.ctx.layout.flatten(self.module) if weights is None else weights
        if not torch.equal(weights, self.global_weights):
            raise CannotGroupError("it changes its weights itself")

    def steps(self) -> Iterator[Any]:
        """Yield the batches of each local step, see `ClientData.steps`."""
        return self.data.steps(self.clients, self.batches, self.ctx)

    def select(self, rows: Sequence[int]) -> Cohort:
        """Return some of the clients, in this order; itself if those are all as they are."""
        if list(rows) == list(range(len(self.clients))):
            return self
        return replace(
            self,
            clients=[self.clients[r] for r in rows],
            batches=[self.batches[r] for r in rows],
        )

    def train(
        self,
        train: Train,
        chunk_size: int | None,
        rows: Sequence[int],
        updates: Tensor,
        logs: LogMeans,
    ) -> None:
        """Compute updates with a function for clients whose batches have equal sizes.

        Args:
            train: The function.
            chunk_size: Most clients in a call; `None` for any number.
            rows: Which clients.
            updates: Shape $(m, d)$, written in place.
            logs: Gets what was logged.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for row in rows:
            groups.setdefault(tuple(map(len, self.batches[row])), []).append(row)
        for group in groups.values():
            size = chunk_size or len(group)
            for start in range(0, len(group), size):
                chunk = group[start : start + size]
                if chunk[-1] - chunk[0] == len(chunk) - 1:
                    train(self.select(chunk), updates[chunk[0] : chunk[-1] + 1], logs)
                else:
                    own = updates.new_empty(len(chunk), updates.shape[1])
                    train(self.select(chunk), own, logs)
                    updates[chunk] = own


Train = Callable[[Cohort, Tensor, LogMeans], None]
