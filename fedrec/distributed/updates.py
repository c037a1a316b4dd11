"""Updates whose rows are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedrec.distributed.ranks import Ranks
from fedrec.distributed.sharding import Sharding
from fedrec.functional.aggregation.order_statistics import choose_kernel, use_kernel
from fedrec.functional.distances import gram_matrix
from fedrec.types import ClientCost, CohortUpdates, rows_of

__all__ = ["ShardedUpdates", "gram_of"]

# Of some columns of all rows, shape (m, c), what is subtracted from them, shape (c,), or `None`.
Center = Callable[[Tensor], Tensor | None]

# Columns of a shard, below which rows are as quickly sent, and kernels differ.
_FEWEST_COLUMNS = 256


class ShardedUpdates(CohortUpdates):
    """What the clients of a round sent, of which each rank has the updates of its own clients.

    All else is the same in all ranks. `updates` gathers the rows of all ranks when it is first
    asked for, in all of them at once: who needs less takes `measured`, `by_columns`, `gram` or
    `weighted_sum`.
    What `dataclasses.replace` makes of it is plain `CohortUpdates`.

    Args:
        part: The updates of this rank's clients, shape $(m_r, d)$, in the order of the shards.
        sharding: Says whose they are.
        ranks: The processes.
        client_ids: As in `CohortUpdates`, like those that follow.
        num_samples: Of all $m$ clients.
        metrics: Of all clients.
        refused: Of all ranks.
        buffers: Of all clients.
        costs: Of all ranks.
    """

    def __new__(cls, **given: Any) -> CohortUpdates:  # type: ignore[misc]
        """Make one; but for `dataclasses.replace`, which has no `part`, the plain kind."""
        return super().__new__(cls) if "part" in given else CohortUpdates(**given)

    def __init__(
        self,
        *,
        part: Tensor,
        sharding: Sharding,
        ranks: Ranks,
        client_ids: tuple[str, ...],
        num_samples: Tensor,
        metrics: Mapping[str, float] | None = None,
        refused: Mapping[str, str] | None = None,
        buffers: Tensor | None = None,
        costs: Mapping[str, ClientCost] | None = None,
    ) -> None:
        given = {
            "part": part,
            "sharding": sharding,
            "ranks": ranks,
            "client_ids": client_ids,
            "num_samples": num_samples,
            "metrics": metrics or {},
            "refused": refused or {},
            "buffers": buffers,
            "costs": costs or {},
        }
        self.__dict__.update(given)  # the base class is frozen

    part: Tensor
    sharding: Sharding
    ranks: Ranks

    @classmethod
    def of(cls, sent: CohortUpdates, sharding: Sharding, ranks: Ranks) -> ShardedUpdates:
        """Return updates of which every rank has all rows."""
        if isinstance(sent, ShardedUpdates):
            return sent
        place = {c: i for i, c in enumerate(sent.client_ids)}
        rows = [place[c] for c in sharding.in_order(sharding.owned(sent.client_ids))]
        part = sent.updates[rows]
        made = cls(part=part, sharding=sharding, ranks=ranks, **sent.besides())
        made.__dict__["updates"] = sent.updates  # nobody has to gather them
        return made

    @cached_property
    def updates(self) -> Tensor:
        """Updates of all clients, shape $(m, d)$, gathered from all ranks."""
        ordered = self.sharding.in_order(self.client_ids)
        rows = self.ranks.rows(self.part, self.sharding.counts(self.client_ids))
        if tuple(ordered) == self.client_ids:
            return rows
        place = {c: i for i, c in enumerate(ordered)}
        return rows[[place[c] for c in self.client_ids]]

    @property
    def own_ids(self) -> list[str]:
        """The clients of the rows of `part`."""
        return self.sharding.in_order(self.sharding.owned(self.client_ids))

    @property
    def num_bytes(self) -> int:
        """Bytes of the updates in this process."""
        return self.part.nbytes

    def by_columns(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what a function makes of every column by itself; rows are as `places` says."""
        if self.is_narrow:
            return function(self.updates[self.places])
        found = self._each_block(lambda _, block: function(block))
        ranks = [slice(of[0].start, of[-1].stop) for of in self._blocks]
        return self.ranks.whole(torch.cat(found), ranks)

    def rows_by_columns(
        self, function: Callable[[slice, Tensor], Tensor], client_ids: Sequence[str]
    ) -> ShardedUpdates:
        """Return other updates of some clients, made of a block of columns at a time.

        Args:
            function: Called with the columns and with these columns of the updates of all clients,
                shape $(m, c)$, it returns shape $(k, c)$. Rows are in the order of the shards
                (`places`).
            client_ids: The $k$ clients.
        """
        counts = self.sharding.counts(client_ids)
        if self.is_narrow:
            rows = function(slice(0, self.part.shape[1]), self.updates[self.places])
            begin = sum(counts[: self.sharding.rank])
            part = rows[begin : begin + counts[self.sharding.rank]]
        else:
            part = self.ranks.rows_of_columns(self._each_block(function), counts, self._blocks)
        return self.select(client_ids)._with(part=part)

    def _each_block(self, function: Callable[[slice, Tensor], Tensor]) -> list[Tensor]:
        """Call a function with each block of columns of this rank; return what it returns.

        There is a block for each shard, so that bits do not depend on the number of ranks.
        """
        kept: Sequence[Tensor] | None = self.__dict__.pop("_kept", None)
        if kept is None:
            counts = self.sharding.counts(self.client_ids)
            kept = self.ranks.columns(self.part, counts, self._blocks)
        # Of the whole width, as everywhere: the kernel must not depend on the number of shards.
        kernel = choose_kernel(self.part.device, len(self.client_ids), self.part.shape[1])
        with use_kernel(kernel):
            return [
                function(columns, block.contiguous())  # else its memory depends on the ranks
                for columns, block in zip(self._blocks[self.sharding.rank], kept, strict=True)
            ]

    def keep(self, blocks: Sequence[Tensor]) -> None:
        """Take this rank's columns of all rows until they are first looked at: they do not travel.

        Args:
            blocks: Of each own shard, shape $(m, c)$, with rows in the order of the shards.
        """
        if not self.is_narrow:
            self.__dict__["_kept"] = blocks

    @property
    def _blocks(self) -> list[list[slice]]:
        return self.sharding.blocks_by_rank(self.part.shape[1])

    @property
    def is_narrow(self) -> bool:
        """Whether rows are as quickly sent as columns."""
        return self.part.shape[1] < _FEWEST_COLUMNS * self.sharding.num_shards

    def gram(self, center: Center | None = None) -> Tensor:
        """Return the inner products of every two rows; see `fedrec.functional.gram_matrix`.

        Each rank computes what its blocks of columns add, and all are added up in one order.

        Args:
            center: What to subtract from every row, made of every column by itself: called with
                some columns of all rows, shape $(m, c)$, it returns shape $(c,)$. `None` for 0.

        Returns:
            Shape $(m, m)$, in the order of `client_ids`; the same bits for any number of ranks.
        """
        size = len(self.client_ids) * self.sharding.num_shards
        if self.is_narrow or 2 * size > self.part.shape[1]:  # rows are less to send than products
            return gram_matrix(self.updates, None if center is None else center(self.updates))

        def product(_: slice, block: Tensor) -> Tensor:
            return gram_matrix(block, None if center is None else center(block)).flatten()

        counts = self.sharding.owned_counts(range(self.sharding.num_shards))
        total = _sum(self.ranks.rows(torch.stack(self._each_block(product)), counts))
        place = self.places.argsort().to(total.device)
        return total.view(len(place), -1)[place][:, place]

    @cached_property
    def places(self) -> Tensor:
        """The place in `client_ids` of each client in the order of the shards, shape $(m,)$."""
        place = {c: i for i, c in enumerate(self.client_ids)}
        return torch.tensor([place[c] for c in self.sharding.in_order(self.client_ids)])

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        """Return the sum of all rows times their coefficients: of each shard, then of the shards.

        Args:
            coefficients: One for each of `client_ids`, shape $(m,)$.

        Returns:
            Shape $(d,)$, with the same bits for any number of ranks.
        """
        place = {c: i for i, c in enumerate(self.client_ids)}
        shards = self.sharding.by_shard(self.client_ids)
        sums, begin = [self.part[:0]], 0
        for shard in self.sharding.own:
            ids = shards.get(shard, [])
            if ids:
                factors = coefficients[[place[c] for c in ids]].to(self.part)
                sums.append((factors @ self.part[begin : begin + len(ids)])[None])
                begin += len(ids)
        return _sum(self.ranks.rows(torch.cat(sums), self.sharding.owned_counts(shards)))

    def to(self, device: torch.device) -> ShardedUpdates:
        """Return the updates on a device; the object itself if they are there."""
        if self.part.device == device:
            return self
        return self._with(part=self.part.to(device))

    def select(self, client_ids: Sequence[str]) -> ShardedUpdates:
        """Return the updates of some clients, in the given order, with all refusals."""
        if tuple(client_ids) == self.client_ids:
            return self
        place = {c: i for i, c in enumerate(self.client_ids)}
        rows = [place[c] for c in client_ids]
        own = {c: i for i, c in enumerate(self.own_ids)}
        chosen = self.sharding.in_order(self.sharding.owned(client_ids))
        return self._with(
            client_ids=tuple(client_ids),
            part=self.part[[own[c] for c in chosen]],
            num_samples=self.num_samples[rows],
            buffers=None if self.buffers is None else self.buffers[rows],
        )

    def joined(self, *others: CohortUpdates, client_ids: Sequence[str]) -> ShardedUpdates:
        """Return updates that are here or in others, in the given order, and nothing besides."""
        parts = [self, *(ShardedUpdates.of(one, self.sharding, self.ranks) for one in others)]
        own = self.sharding.in_order(self.sharding.owned(client_ids))
        sizes = [(part.client_ids, part.num_samples) for part in parts]
        return ShardedUpdates(
            part=rows_of([(part.own_ids, part.part) for part in parts], own),
            sharding=self.sharding,
            ranks=self.ranks,
            client_ids=tuple(client_ids),
            num_samples=rows_of(sizes, client_ids),
        )

    def in_process(self) -> CohortUpdates:
        """Return the updates of this rank's clients, in the order of the shards."""
        ids = self.own_ids
        sizes = rows_of([(self.client_ids, self.num_samples)], ids)
        return CohortUpdates(client_ids=tuple(ids), updates=self.part, num_samples=sizes)

    def shards(self) -> dict[int | None, CohortUpdates]:
        """Return the updates of each of this rank's shards that has any, by shard."""
        own, begin = self.in_process(), 0
        found: dict[int | None, CohortUpdates] = {}
        for shard, ids in self.sharding.by_shard(own.client_ids).items():
            rows = slice(begin, begin + len(ids))
            found[shard] = CohortUpdates(
                client_ids=tuple(ids),
                updates=self.part[rows],
                num_samples=own.num_samples[rows],
            )
            begin = rows.stop
        return found

    def with_rows(self, rows: Sequence[Tensor]) -> ShardedUpdates:
        """Return the same with other updates, of each of `shards()`."""
        if len(rows) == 1:
            return self._with(part=rows[0])
        return self._with(part=torch.cat(list(rows)) if rows else self.part[:0])

    def with_besides(self, **changes: Any) -> ShardedUpdates:
        """Return the same updates with something else known besides them."""
        made = self._with(**changes)
        made.__dict__.update({k: v for k, v in self.__dict__.items() if k in ("updates", "_kept")})
        return made

    def narrowed(self, columns: Tensor) -> ShardedUpdates:
        """Return some columns of the updates."""
        return self._with(part=self.part[:, columns.to(self.part.device)])

    def gathered(self, values: Sequence[Tensor]) -> Tensor:
        """Return what is known of each client, in the order of `client_ids`, in all ranks."""
        found = torch.cat([value for rank in self.ranks.gather(list(values)) for value in rank])
        return rows_of([(self.sharding.in_order(self.client_ids), found)], self.client_ids)

    def _with(self, **changes: object) -> ShardedUpdates:
        kept = {k: v for k, v in self.__dict__.items() if k not in ("updates", "places", "_kept")}
        return ShardedUpdates(**{**kept, **changes})


def gram_of(sent: CohortUpdates, center: Center | None = None) -> Tensor:
    """Return the inner products of every two rows, whichever processes have them.

    Args:
        sent: The updates.
        center: See `ShardedUpdates.gram`.

    Returns:
        Shape $(m, m)$, in the order of `client_ids`.
    """
    if isinstance(sent, ShardedUpdates):
        return sent.gram(center)
    return gram_matrix(sent.updates, None if center is None else center(sent.updates))


def _sum(rows: Tensor) -> Tensor:
    """Return the sum of rows, added up from the first to the last."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
