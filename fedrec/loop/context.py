"""The context of a recoverer in one round, which meters what clients are asked for."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedrec.aggregators.base import ColumnRule
from fedrec.clients.objective import LocalWork
from fedrec.exceptions import RecoveryError, ShapeError
from fedrec.history.background import RoundReader
from fedrec.history.manifest import FLOAT_BYTES
from fedrec.history.view import HistoryView
from fedrec.loop.round import Engine
from fedrec.loop.server import server_client, server_loss, trained
from fedrec.metrics import CostLedger
from fedrec.metrics.estimate_errors import EstimateErrors
from fedrec.recoverers.aggregated import AggregatedUpdates
from fedrec.recoverers.context import RecoveryContext
from fedrec.types import ClientCost, CohortUpdates, RoundContext, RoundRecord

__all__ = ["Meter", "MeteredContext"]


@dataclass(kw_only=True, eq=False)
class Meter:
    """Counts what a recovery costs.

    Args:
        ledger: Which client was asked, in which round and why.
        estimate_errors: Errors of estimates that were compared with exact updates.
        client_seconds: Seconds spent on computing clients' updates, by reason.

    Attributes:
        asked: Number of clients that were asked in this round.
        fixed: How many of them, because their estimates were abnormal.
        comparing: Seconds of this round spent on comparing estimates.
        stepped: The result of the last server step of this round, which is known to be finite.
    """

    ledger: CostLedger
    estimate_errors: EstimateErrors
    client_seconds: dict[str, float]
    asked: int = 0
    fixed: int = 0
    comparing: float = 0.0
    stepped: Tensor | None = None

    def begin_round(self) -> None:
        """Set the counts of the round to 0."""
        self.asked, self.fixed, self.comparing, self.stepped = 0, 0, 0.0, None

    def add(
        self,
        ctx: RoundContext,
        engine: Engine,
        client_ids: Sequence[str],
        reason: str,
        costs: Mapping[str, ClientCost],
    ) -> None:
        """Note that clients were asked.

        Args:
            ctx: The context that the clients were given.
            engine: The engine, which has the clients.
            client_ids: The clients that were asked.
            reason: Why they were asked.
            costs: What they have cost, where that was measured.
        """
        computed = ClientCost(2 * FLOAT_BYTES * ctx.global_weights.numel(), 0.0)
        self.asked += len(client_ids)
        self.fixed += len(client_ids) if reason == "abnormality" else 0
        # Excluded clients are noted, too; ACP is the mean over the remaining clients only.
        for client_id in client_ids:
            cost = costs.get(client_id, computed)
            self.ledger.add(
                client_id,
                ctx.round,
                reason,
                local_steps=engine.clients[client_id].num_local_steps(ctx),
                num_bytes=cost.num_bytes,
                seconds=cost.seconds,
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class MeteredContext(RecoveryContext):
    """The context of a recoverer: the history, a metered door to clients, the server step.

    Args:
        name: Name of the recovery, for errors.
        asking: The context that clients are given.
        engine: Computes the round.
        meter: Counts what clients are asked for.
        recorded: The recording, and the clients that take part in the recovery.
        reader: Reads rounds of the recording ahead.
        may_be_asked: Clients that may be asked in this round.
        on_updates: Called with the updates that clients sent.
    """

    name: str
    asking: RoundContext
    engine: Engine
    meter: Meter
    recorded: HistoryView
    reader: RoundReader
    may_be_asked: frozenset[str]
    on_updates: Callable[[RoundContext, CohortUpdates], None]

    def history(
        self, t: int, client_ids: Sequence[str] | None = None, *, vectors: bool = True
    ) -> RoundRecord:
        """Read a round of the recording; the current round has been read ahead."""
        if not vectors:
            ids = self.recorded.cohort(t) if client_ids is None else tuple(client_ids)
            none = self.global_weights.new_empty(0)
            rows, sizes = none.expand(len(ids), 0), self._num_samples(ids)
            sent = CohortUpdates(client_ids=ids, updates=rows, num_samples=sizes)
            sent = self.recorded.sharded(sent)
            return RoundRecord(round=t, global_weights=none, sent=sent, aggregate=none)
        if t == self.round and (client_ids is None or set(client_ids) <= set(self.client_ids)):
            record = self.reader.read(t)
            if client_ids is None:
                return record
            if set(client_ids) <= set(record.client_ids):
                return record.select(client_ids)
        return self.recorded.read(t, client_ids).to(self.device)

    def exact(
        self, client_ids: Sequence[str], reason: str, work: LocalWork | None = None
    ) -> CohortUpdates:
        """Ask clients for their exact updates, and meter the request."""
        self._check_asked(client_ids)
        if not client_ids:
            none = self.global_weights.new_empty(0, self.global_weights.numel())
            empty = CohortUpdates(client_ids=(), updates=none, num_samples=self._num_samples(()))
            return self.recorded.sharded(empty)
        began = time.perf_counter()
        sent = self.recorded.sharded(self.engine.ask(self.asking, client_ids, work))
        spent = time.perf_counter() - began
        seconds = self.meter.client_seconds
        seconds[reason] = seconds.get(reason, 0.0) + spent
        worked = self.asking if work is None else dataclasses.replace(self.asking, work=work)
        self.meter.add(worked, self.engine, client_ids, reason, sent.costs)
        self.on_updates(self.asking, sent)
        return sent

    def train_at_server(
        self,
        global_weights: Tensor,
        work: LocalWork | None = None,
        dataset: Dataset[Any] | None = None,
    ) -> Tensor:
        """Return the update that the server computes on its clean data, trained like a client."""
        server = server_client(self.engine.federation, self.name)
        if dataset is not None:
            server = server.with_dataset(dataset)
        sent = trained(server, global_weights, dataclasses.replace(self.asking, work=work))
        self.engine.buffers.add(sent)
        return sent.updates[0]

    def server_loss(self, global_weights: Tensor) -> float:
        """Return the mean loss of these weights on the server's clean data."""
        engine = self.engine
        return server_loss(
            engine.federation, global_weights, engine.buffers.values, engine.device, self.name
        )

    def compare(self, estimates: CohortUpdates) -> None:
        """Note how far estimated updates are from exact ones, which are computed for this alone."""
        self._check_asked(estimates.client_ids)
        began = time.perf_counter()
        sent = self.recorded.sharded(self.engine.simulate(self.asking, estimates.client_ids))
        if sent.client_ids:
            chosen = estimates.select(sent.client_ids)
            self.meter.estimate_errors.add(self.round, chosen, sent)
        self.meter.comparing += time.perf_counter() - began

    def local_steps(self, client_ids: Sequence[str]) -> list[int]:
        """Return the number of local steps that each client takes."""
        return [self.engine.clients[c].num_local_steps(self.asking) for c in client_ids]

    def server_step(
        self,
        updates: Tensor | CohortUpdates,
        client_ids: Sequence[str] | None = None,
        global_weights: Tensor | None = None,
    ) -> Tensor:
        """Aggregate updates, and do the server step."""
        if isinstance(updates, CohortUpdates):
            sent = updates if client_ids is None else updates.select(client_ids)
        else:
            ids = self.client_ids if client_ids is None else tuple(client_ids)
            shape = (len(ids), self.global_weights.numel())
            if not isinstance(updates, Tensor) or updates.dtype != self.global_weights.dtype:
                kind = updates.dtype if isinstance(updates, Tensor) else type(updates).__name__
                raise ShapeError(
                    f"Expected {self.name} to give updates as a tensor of "
                    f"{self.global_weights.dtype}, but got {kind}."
                )
            updates = updates.detach()
            if ids and updates.shape != shape:
                raise ShapeError(
                    f"Expected {self.name} to give updates of shape {shape}, "
                    f"one row per client of round {self.round}, but got {tuple(updates.shape)}."
                )
            sizes = self._num_samples(ids)
            sent = CohortUpdates(client_ids=ids, updates=updates, num_samples=sizes)
        start = self.global_weights if global_weights is None else global_weights
        if not sent.client_ids:
            return start
        is_done = isinstance(sent, AggregatedUpdates)
        num_samples = None if is_done else self._num_samples(sent.client_ids)
        new, _ = self.engine.server_step(self.asking, sent, start, num_samples=num_samples)
        self.meter.stepped = new
        return new

    def column_rule(self, client_ids: Sequence[str]) -> ColumnRule | None:
        """Return what the server step does with every column of these clients' updates."""
        return self.engine.column_rule(client_ids, self._num_samples) if client_ids else None

    def coefficients(self, client_ids: Sequence[str]) -> Tensor | None:
        """Return the factors of the clients' rows in the aggregation rule, or `None`."""
        if not client_ids:
            return None
        return self.engine.coefficients(self._num_samples(client_ids))

    def _num_samples(self, client_ids: Sequence[str]) -> Tensor:
        """Return the recorded data set sizes of clients, shape $(m',)$."""
        sizes = self.recorded.manifest.clients
        return torch.tensor([sizes[c] for c in client_ids], dtype=torch.int64)

    def _check_asked(self, client_ids: Sequence[str]) -> None:
        """Raise `RecoveryError` if a client may not be asked in this round."""
        forbidden = [c for c in client_ids if c not in self.may_be_asked]
        if forbidden:
            raise RecoveryError(
                f"{self.name} asked clients {forbidden} in round {self.round}, but they are "
                "excluded or did not take part in it."
            )
