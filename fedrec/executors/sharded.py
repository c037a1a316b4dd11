"""Clients in shards, each computed by itself, in the rank that owns it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedrec.clients.base import Client
from fedrec.clients.fake import FakeClient
from fedrec.distributed.ranks import Ranks
from fedrec.distributed.sharding import Sharding
from fedrec.distributed.updates import ShardedUpdates
from fedrec.executors.base import Executor
from fedrec.executors.fakes import compute_with_fakes
from fedrec.executors.finite import refuse_nonfinite
from fedrec.executors.vectorized import VectorizedExecutor
from fedrec.types import ClientCost, CohortUpdates, RoundContext

__all__ = ["ShardedExecutor"]


class ShardedExecutor(Executor):
    """Computes the clients of the rank's own shards, one shard after the other.

    Clients of different shards are never computed together: updates are a function of the shards,
    and not of the number of ranks.

    Args:
        make: Makes the executor of a shard.
        sharding: Which client is in which shard, and whose it is.
        ranks: The processes.
    """

    def __init__(self, *, make: Callable[[], Executor], sharding: Sharding, ranks: Ranks) -> None:
        self._sharding, self._ranks = sharding, ranks
        self._executors = {shard: make() for shard in sharding.own}
        # Clients a round whose updates are computed sequentially as well.
        self._audit: int = getattr(self._executors[sharding.own[0]], "audit", 0)
        self._departure: Mapping[str, Any] | None = None

    @property
    def departure(self) -> Mapping[str, Any] | None:
        """Why the first shard left its plan; all others do so after the round."""
        return self._departure

    @departure.setter
    def departure(self, value: Mapping[str, Any] | None) -> None:
        self._departure = value
        for executor in self._executors.values():
            executor.departure = value

    def plan(
        self, clients: Sequence[Client], global_weights: Tensor, ctx: RoundContext
    ) -> dict[str, Any]:
        """Let every shard choose its path."""
        self.departure = None

        def own() -> dict[int, dict[str, Any]]:
            return {
                shard: self._executors[shard].plan(group, global_weights, ctx)
                for shard, group in self._own(clients).items()
            }

        plans = {shard: plan for found in self._ranks.each(own) for shard, plan in found.items()}
        sizes = [plan.pop("chunk_size") for plan in plans.values() if "chunk_size" in plan]
        first, *others = plans.values()
        plan = {**first, "num_shards": self._sharding.num_shards}
        if sizes:
            plan["chunk_size"] = min(sizes)
        if any(other != first for other in others):
            plan["path"] = "by shard"
            plan["shards"] = {str(shard): other for shard, other in plans.items()}
        return plan

    def _own(self, clients: Sequence[Client]) -> dict[int, list[Client]]:
        """Return the clients of each of the own shards that has any."""
        by_id = {client.client_id: client for client in clients}
        groups = self._sharding.by_shard(by_id)
        own = self._sharding.own
        return {shard: [by_id[c] for c in ids] for shard, ids in groups.items() if shard in own}

    def compute(
        self, clients: Sequence[Client], global_weights: Tensor, ctx: RoundContext
    ) -> CohortUpdates:
        """Compute the own clients; learn from the other ranks who has sent what."""
        sent: list[CohortUpdates] = []
        asked = [client.client_id for client in clients]
        shards = list(self._sharding.by_shard(asked))
        audited = shards[ctx.round % len(shards)] if shards else None

        def own() -> list[_Said]:
            for shard, group in self._own(clients).items():
                executor = self._executors[shard]
                if isinstance(executor, VectorizedExecutor):
                    # As many clients are audited in a round as without shards.
                    executor.audit = self._audit if shard == audited else 0
                found = compute_with_fakes(executor, group, global_weights, ctx)
                found = refuse_nonfinite(found, buffers=ctx.buffers is not None)
                sent.append(found)
                fakes = {c.client_id for c in group if isinstance(c, FakeClient)}
                num_logged = len(set(found.client_ids) - fakes)
                said.append(_Said(found, executor.departure, num_logged))
            return said

        said: list[_Said] = []
        every = [one for found in self._ranks.each(own) for one in found]
        departures = [one.departure for one in every if one.departure is not None]
        if departures and self._departure is None:
            self.departure = departures[0]
        parts = [found.updates for found in sent]
        if len(parts) != 1:
            empty = global_weights.new_empty(0, global_weights.numel())
            parts = [torch.cat([empty, *parts])]
        return _joined(every, asked, parts[0], self._sharding, self._ranks)


class _Said:
    """What a rank tells the others of a shard: all but the updates."""

    def __init__(
        self, sent: CohortUpdates, departure: Mapping[str, Any] | None, num_logged: int
    ) -> None:
        self.client_ids = sent.client_ids
        self.num_samples: list[int] = sent.num_samples.tolist()
        self.metrics = dict(sent.metrics)
        self.refused = dict(sent.refused)
        self.buffers = None if sent.buffers is None else sent.buffers.cpu()
        self.costs: dict[str, ClientCost] = dict(sent.costs)
        self.departure = departure
        self.num_logged = num_logged  # clients that the metrics are of: fake ones log nothing


def _joined(
    said: Sequence[_Said],
    asked: Sequence[str],
    part: Tensor,
    sharding: Sharding,
    ranks: Ranks,
) -> ShardedUpdates:
    """Join what all shards said, in the order in which clients were asked."""
    sizes = {c: k for one in said for c, k in zip(one.client_ids, one.num_samples, strict=True)}
    refused = {c: why for one in said for c, why in one.refused.items()}
    ids = tuple(c for c in asked if c in sizes)
    sent = [one for one in said if one.client_ids]
    logged = [one for one in sent if one.num_logged]
    counts = [one.num_logged for one in logged]
    names = logged[0].metrics if logged else {}
    metrics = {
        name: sum(one.metrics[name] * k for one, k in zip(logged, counts, strict=True))
        / sum(counts)
        for name in names
        if all(name in one.metrics for one in logged)
    }
    buffers = None
    if sent and sent[0].buffers is not None:
        rows = {
            c: row
            for one in sent
            if one.buffers is not None
            for c, row in zip(one.client_ids, one.buffers, strict=True)
        }
        buffers = torch.stack([rows[c] for c in ids]).to(part.device)
    return ShardedUpdates(
        part=part,
        sharding=sharding,
        ranks=ranks,
        client_ids=ids,
        num_samples=torch.tensor([sizes[c] for c in ids], dtype=torch.int64),
        metrics=metrics,
        refused={c: refused[c] for c in asked if c in refused},
        buffers=buffers,
        costs={c: cost for one in said for c, cost in one.costs.items()},
    )
