"""What a recoverer gets to work with in one round. Part of `FederatedLoop`."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedrec.clients.objective import LocalWork
from fedrec.exceptions import ConfigurationError, RecoveryError, ShapeError
from fedrec.history.manifest import FLOAT_BYTES
from fedrec.loop.server import server_client, server_loss, trained
from fedrec.recoverers.context import RecoveryContext
from fedrec.types import CohortUpdates, RoundContext, RoundRecord

if TYPE_CHECKING:
    from fedrec.loop.recovery import Recovery
    from fedrec.loop.round import Engine

__all__ = ["help_from_attackers", "recovery_context", "require_cooperation"]


def recovery_context(
    recovery: Recovery,
    t: int,
    cohort: tuple[str, ...],
    weights: Tensor,
    logged: dict[str, float],
) -> RecoveryContext:
    """Give a round its history, its door to clients, which meters, and its server step.

    Args:
        recovery: The recovery that the round is of.
        t: The round.
        cohort: The recorded clients of the round that take part.
        weights: Recovered global weights, shape $(d,)$.
        logged: Where the round's values are put by name.
    """
    engine = recovery.engine
    ctx = engine.context(t, cohort, weights, logged.__setitem__)
    sizes = recovery.history.manifest.clients

    def history(round: int, client_ids: Sequence[str] | None = None) -> RoundRecord:
        if round == t and (client_ids is None or set(client_ids) <= set(cohort)):
            record = recovery.reader.read(t)
            if client_ids is None:
                return record
            if set(client_ids) <= set(record.client_ids):
                return record.select(client_ids)
        return recovery.view.read(round, client_ids).to(engine.device)

    def exact(
        client_ids: Sequence[str], reason: str, work: LocalWork | None = None
    ) -> CohortUpdates:
        _check_asked(recovery, t, client_ids, cohort)
        began = time.perf_counter()
        sent = engine.ask(ctx, client_ids, work)
        spent = time.perf_counter() - began
        recovery.client_seconds[reason] = recovery.client_seconds.get(reason, 0.0) + spent
        recovery.asked += len(client_ids)
        worked = ctx if work is None else dataclasses.replace(ctx, work=work)
        # Costs are compared over the clients that remain; what is asked of others is noted beside.
        for client_id in client_ids:
            recovery.ledger.add(
                client_id,
                t,
                reason,
                local_steps=engine.clients[client_id].num_local_steps(worked),
                num_bytes=2 * FLOAT_BYTES * weights.numel(),
            )
        recovery.loop.call("on_updates", ctx, sent)
        return sent

    def train_at_server(
        global_weights: Tensor,
        work: LocalWork | None = None,
        dataset: Dataset[Any] | None = None,
    ) -> Tensor:
        server = server_client(recovery.federation, recovery.name)
        if dataset is not None:
            server = server.with_dataset(dataset)
        sent = trained(server, global_weights, dataclasses.replace(ctx, work=work))
        engine.keep_buffers(sent)
        return sent.updates[0]

    def loss_at_server(global_weights: Tensor) -> float:
        return server_loss(
            recovery.federation, global_weights, engine.buffers, engine.device, recovery.name
        )

    def local_steps(client_ids: Sequence[str]) -> list[int]:
        return [engine.clients[c].num_local_steps(ctx) for c in client_ids]

    def server_step(
        updates: Tensor,
        client_ids: Sequence[str] | None = None,
        global_weights: Tensor | None = None,
    ) -> Tensor:
        ids = cohort if client_ids is None else tuple(client_ids)
        if len(ids) == 0:
            return weights if global_weights is None else global_weights
        if updates.shape != (len(ids), weights.numel()):
            raise ShapeError(
                f"Expected {recovery.name} to give updates of shape {(len(ids), weights.numel())}, "
                f"one row per client of round {t}, but got {tuple(updates.shape)}."
            )
        num_samples = torch.tensor([sizes[c] for c in ids])
        start = weights if global_weights is None else global_weights
        return engine.server_step(ctx, updates, num_samples, ids, start)[0]

    def coefficients(client_ids: Sequence[str]) -> Tensor | None:
        if not client_ids:
            return None
        return engine.coefficients(torch.tensor([sizes[c] for c in client_ids]))

    def apply(aggregate: Tensor) -> Tensor:
        return engine.apply_checked(ctx, weights, aggregate)

    def compare(client_ids: Sequence[str], estimates: Tensor) -> None:
        _check_asked(recovery, t, client_ids, cohort)
        began = time.perf_counter()
        sent = _simulated(engine, ctx, client_ids)
        if sent.client_ids:
            place = {c: i for i, c in enumerate(client_ids)}
            rows = estimates[[place[c] for c in sent.client_ids]]
            recovery.estimate_errors.add(t, sent.client_ids, rows, sent.updates)
        recovery.comparing += time.perf_counter() - began

    fields = {f.name: getattr(ctx, f.name) for f in dataclasses.fields(ctx)}
    return RecoveryContext(
        **{**fields, "purpose": "recoverer"},
        history=history,
        exact=exact,
        train_at_server=train_at_server,
        server_loss=loss_at_server,
        compare=compare,
        local_steps=local_steps,
        server_step=server_step,
        coefficients=coefficients,
        apply=apply,
        max_rounds=recovery.rounds,
        excluded=recovery.exclude,
        server_lr=engine.server_lr,
    )


def require_cooperation(recovery: Recovery) -> None:
    """Refuse a method that asks excluded clients if those are gone or would not do it.

    Raises:
        ConfigurationError: If one of them has left the federation, or is malicious under attack.
    """
    name, exclude = type(recovery.recoverer).__name__, set(recovery.exclude)
    gone = sorted(exclude.difference(recovery.federation.client_ids))
    if gone:
        raise ConfigurationError(
            f"{name} asks the excluded clients for help, but {gone[:10]} are not in the "
            "federation. HINT: use another recoverer once they have left."
        )
    hostile = sorted(exclude.intersection(recovery.federation.malicious))
    if recovery.attack is not None and hostile:
        raise ConfigurationError(help_from_attackers(name, hostile))


def help_from_attackers(name: str, hostile: Sequence[str]) -> str:
    """Say why a method that asks excluded clients is refused if they are malicious."""
    return (
        f"{name} asks the excluded clients for help, but {hostile[:10]} are malicious and would "
        "send what they want. HINT: use a recoverer that leaves them alone."
    )


def _simulated(engine: Engine, ctx: RoundContext, client_ids: Sequence[str]) -> CohortUpdates:
    """Compute what asking would give, leaving no trace: nothing is remembered, logged or raised."""
    other = copy.copy(engine)
    other.attack = copy.deepcopy(engine.attack)  # it may have a memory
    other.on_bad_update = "drop"
    other._new_buffers = []
    return other.ask(dataclasses.replace(ctx, logger=lambda name, value: None), client_ids)


def _check_asked(
    recovery: Recovery, t: int, client_ids: Sequence[str], cohort: tuple[str, ...]
) -> None:
    """Raise `RecoveryError` if one of these clients may not be asked in this round."""
    allowed = set(cohort)
    if recovery.recoverer.needs_excluded_client:
        allowed |= set(recovery.exclude)
    odd = [c for c in client_ids if c not in allowed]
    if odd:
        raise RecoveryError(
            f"{recovery.name} asked clients {odd} in round {t}, but they are excluded or did not "
            "take part in it."
        )
